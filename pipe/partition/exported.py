"""A model as a graph by torch.export, for those that torch.fx cannot trace: exported in both modes, and joined to one graph.

    train: dropout(x, 0.1, True)      eval: dropout(x, 0.1, False)      joined: a ByMode, which does the one or the other by its mode

What draws random numbers, or differs between the modes in a constant, becomes such a module; a BatchNorm becomes the module again that it
was. Sizes stay free, but those of dimensions that the model's code has fixed.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipe.errors import PlanError
from pipe.partition.attributes import State
from pipe.partition.capture import has_hooks, keeps_more, mode

_SAME = ("aten.contiguous.default", "aten.alias.default")  # their value is their input's
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default")
_DRAWING = ("dropout", "rand", "bernoulli", "multinomial", "normal", "rrelu", "poisson", "exponential", "scaled_dot_product_attention")


@dataclass(frozen=True)
class Exported:
    """The graph, the module that holds what it names, the arguments that are constants of it, and what it holds for.

    `sizes`: of dimensions that are not free, by argument. `guards`: take all arguments, in order; raise AssertionError where the model's
    code would have gone another way.
    """

    root: nn.Module
    graph: fx.Graph
    fixed: Mapping[str, Any]
    sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    guards: tuple[Callable[..., Any], ...] = ()


def export(model: nn.Module, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> Exported:
    """What the model's forward does, from the arguments of one micro-batch by name.

    Args:
        given: those that are tensors, placeholders of the graph.
        fixed: all others, constants of the graph.

    Raises:
        PlanError: it cannot be exported; says why.
    """
    _check(model, given)
    fixed = {**fixed, **_without_cache(model, {*given, *fixed})}
    programs = [_export(model, train, given, fixed) for train in (True, False)]
    names = [*given, *fixed]
    modules = [program.module() for program in programs]
    guards = tuple(guard for module in modules if isinstance(guard := getattr(module, "_guards_fn", None), nn.Module))
    graphs = [_plain(module, model) for module in modules]
    joined = _Joined(model, names, *graphs)
    return Exported(joined.root, joined.graph(len(given), programs[0]), fixed, _sizes(graphs[0], list(given)), guards)


class ByMode(nn.Module):
    """One operator, with the constants that it has in train or in eval mode; its inputs are the same in both.

    Random numbers that it draws count as those of the module `draws_as`, in whose forward it stood.
    """

    def __init__(self, function: Callable[..., Any], train: Any, evaluation: Any, draws_as: str) -> None:
        """`train`, `evaluation`: (args, kwargs) with `Slot`s where inputs stand."""
        super().__init__()
        self.function = function
        self.templates = {True: train, False: evaluation}
        self.draws_as = draws_as

    def forward(self, *inputs: Any) -> Any:
        """What the operator gives."""
        args, kwargs = pytree.tree_map_only(Slot, lambda slot: inputs[slot.number], self.templates[self.training])
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Slot:
    """Where an input stands among the arguments of a ByMode."""

    number: int


class Constant(nn.Module):
    """A tensor that is neither a parameter nor a buffer; goes where the module goes, and is in no state_dict."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        """A copy, as the model would make one."""
        return self.value.clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constant:
        self.value = fn(self.value)
        return self


class Restored(nn.Module):
    """Puts the leaves of an output back into the structure that the model gives."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *leaves: Any) -> Any:
        """The structure."""
        return pytree.tree_unflatten(leaves, self.spec)


def place(module: nn.Module, device: torch.device) -> None:
    """Makes on this device what an exported graph makes out of numbers; it names the one that it was exported on."""
    for each in module.modules():
        if isinstance(each, ByMode):
            each.templates = {
                training: (args, {**kwargs, "device": device} if "device" in kwargs else kwargs)
                for training, (args, kwargs) in each.templates.items()
            }
        if isinstance(each, fx.GraphModule):
            for node in each.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload) and "device" in node.kwargs:
                    node.update_kwarg("device", device)
            each.recompile()


# --- exporting ---


def _check(model: nn.Module, given: Mapping[str, Any]) -> None:
    hooked = next((name or type(model).__name__ for name, module in model.named_modules() if has_hooks(module)), None)
    if hooked is not None:
        raise PlanError(f"{hooked} has hooks, which torch.export does not keep")
    if any(map(keeps_more, model.modules())):
        raise PlanError("one of its modules has a state of its own (get_extra_state), which torch.export does not keep")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise PlanError(f"argument {name!r} is a {type(value).__name__} that holds tensors; torch.export is used for plain ones only")


def _without_cache(model: nn.Module, said: set[str]) -> dict[str, Any]:
    """Transformers that write text keep a cache unless told not to; training needs none."""
    takes = inspect.signature(model.forward).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in takes.values()) and getattr(getattr(model, "config", None), "use_cache", False)
    return {"use_cache": False} if ("use_cache" in takes or passes_on) and "use_cache" not in said else {}


def _export(model: nn.Module, train: bool, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> ExportedProgram:
    tensors = {name: value.detach() for name, value in given.items()}
    shapes = {name: dict.fromkeys(range(value.dim()), Dim.AUTO) for name, value in tensors.items()} | dict.fromkeys(fixed)
    state = State(model)
    try:
        with mode(model, train), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (), {**tensors, **fixed}, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever a forward raises, or torch of it
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise PlanError(f"torch.export refuses it ({type(error).__name__}: {first[:160]})") from error
    finally:
        changed = state.restore()
        if changed:  # also what an error of torch's would hide
            raise PlanError(f"{min(changed) or type(model).__name__} assigns to attributes in its forward, which a graph does not do")


def _plain(module: nn.Module, model: nn.Module) -> fx.GraphModule:
    """The module of an exported program, without its checks, and with BatchNorms as modules."""
    assert isinstance(module, fx.GraphModule)
    graph = module.graph
    for node in list(graph.nodes):
        if str(node.target) in _CHECKS or node.target == "_guards_fn":
            graph.erase_node(node)
    for node in list(graph.nodes):
        if str(node.target) == "aten.batch_norm.default":
            _restore_batch_norm(graph, node, model)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        _name_all(node)
    written = next((node for node in graph.nodes if _writes_state(node)), None)
    if written is not None:
        raise PlanError(
            f"{_path(written) or type(model).__name__} writes to a buffer in its forward, which torch.export does not keep in a stage"
        )
    return module


def _restore_batch_norm(graph: fx.Graph, node: fx.Node, model: nn.Module) -> None:
    path = str(node.args[3].target).rpartition(".")[0] if isinstance(node.args[3], fx.Node) else _path(node)
    if not isinstance(model.get_submodule(path), _BatchNorm):
        raise PlanError(f"{path or type(model).__name__} computes a BatchNorm in its own forward; use the module nn.BatchNorm for it")
    for other in list(graph.nodes):  # the count of batches, which the module keeps itself
        if other.op == "get_attr" and other.target == f"{path}.num_batches_tracked":
            for user in list(other.users):
                graph.erase_node(user)
            graph.erase_node(other)
    with graph.inserting_before(node):
        called = graph.call_module(path, (node.args[0],))
    called.meta = dict(node.meta)
    node.replace_all_uses_with(called)
    graph.erase_node(node)


def _name_all(node: fx.Node) -> None:
    """Gives all its arguments by name, defaults too, so that two of its kind compare; what takes several lists stays as it is."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    if any(argument.name == "self" for argument in arguments[1:]):
        return
    given = dict(zip((argument.name for argument in arguments), node.args)) | node.kwargs
    named = {a.name: given.get(a.name, a.default_value) for a in arguments if a.name in given or a.has_default_value()}
    positional = [a.name for a in arguments if not a.kwarg_only and a.name in named]
    node.args = tuple(named.pop(name) for name in positional)
    node.kwargs = named


def _writes_state(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    first = node.args[0] if node.args else None
    return schema is not None and schema.is_mutable and isinstance(first, fx.Node) and first.op == "get_attr"


def _sizes(module: fx.GraphModule, names: Sequence[str]) -> dict[str, dict[int, int]]:
    """The dimensions of the arguments that the graph holds as numbers."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # takes seconds to import, as it imports sympy

    found = {}
    for name, node in zip(names, (node for node in module.graph.nodes if node.op == "placeholder")):
        value = node.meta.get("val")
        found[name] = {i: int(n) for i, n in enumerate(value.shape) if is_concrete_int(n)} if isinstance(value, Tensor) else {}
    return found


# --- joining ---


class _Joined:
    """Two graphs of one model that differ in constants only."""

    def __init__(self, model: nn.Module, names: Sequence[str], train: fx.GraphModule, evaluation: fx.GraphModule) -> None:
        self._model = model
        self._names = names
        self._train = train
        self._twin: dict[fx.Node, fx.Node] = {}  # of each node in train mode, the one in eval mode
        self._match(train, evaluation)
        self.root = self._made_root()

    def _match(self, train: fx.GraphModule, evaluation: fx.GraphModule) -> None:
        ours, theirs = (list(filter(_does, module.graph.nodes)) for module in (train, evaluation))
        for one, other in zip(ours, theirs):
            if not self._alike(one, other):
                break
            self._twin[one] = other
        else:
            if len(ours) == len(theirs):
                return
            one = ours[min(len(ours), len(theirs)) - 1]
        raise PlanError(f"{_path(one) or type(self._model).__name__} does another thing in eval than in train")

    def _alike(self, one: fx.Node, other: fx.Node) -> bool:
        if (one.op, str(one.target)) != (other.op, str(other.target)) and {one.op, other.op} != {"placeholder"}:
            return False
        ours, theirs = _leaves(one), _leaves(other)
        if len(ours) != len(theirs) or one.kwargs.keys() != other.kwargs.keys():
            return False
        nodes = [(a, b) for a, b in zip(ours, theirs) if isinstance(a, fx.Node) or isinstance(b, fx.Node)]
        return all(isinstance(a, fx.Node) and isinstance(b, fx.Node) and self._twin.get(_origin(a)) is _origin(b) for a, b in nodes)

    def graph(self, given: int, program: ExportedProgram) -> fx.Graph:
        """The joined graph: placeholders are the given arguments under their names, the output is what the model gives."""
        graph, env = fx.Graph(), dict[fx.Node, Any]()
        names = iter(self._names)
        for node in self._train.graph.nodes:
            if node.op == "placeholder":
                name = next(names)
                if name in self._names[:given]:
                    env[node] = graph.create_node("placeholder", name)
            elif node.op == "output":
                env[node] = graph.output(self._output(graph, fx.node.map_arg(node.args[0], env.__getitem__), program))
            elif node.op == "get_attr" and (constant := self._constant(node)) is not None:
                env[node] = graph.call_module(self._add(f"{_CONSTANTS}.{node.name}", constant))
            elif node in self._twin and self._is_by_mode(node):
                env[node] = self._by_mode(graph, node, env)
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
            if node.op not in ("placeholder", "output"):
                path = _path(node)
                env[node].meta = {"nn_module_stack": {path: (path, None)}}
        graph.lint()
        return graph

    def _made_root(self) -> nn.Module:
        """The module that holds what the graph names: the model's own parameters, buffers and BatchNorms under their names, and more."""
        root = nn.Module()
        whole = {str(node.target) for node in self._train.graph.nodes if node.op == "call_module"}
        for path, module in self._model.named_modules(remove_duplicate=False):
            inside = any(path.startswith(f"{name}.") for name in whole)
            if path in whole:
                _put(root, path, module)
            elif not inside:
                at = _at(root, path)
                at._parameters.update(module._parameters)
                at._buffers.update(module._buffers)
                at._non_persistent_buffers_set |= module._non_persistent_buffers_set
        for node in self._train.graph.nodes:  # regions with gradients or autocast switched are graphs of their own
            if node.op == "get_attr" and isinstance(found := _attribute(self._train, str(node.target)), fx.GraphModule):
                _put(root, str(node.target), found)
        return root

    def _add(self, name: str, module: nn.Module) -> str:
        _put(self.root, name, module)
        return name

    def _constant(self, node: fx.Node) -> nn.Module | None:
        """A tensor of the graph that the model does not hold under this name."""
        value = _attribute(self._train, str(node.target))
        own = isinstance(value, nn.Module) or _attribute(self._model, str(node.target)) is not None
        return None if own else Constant(value.detach())

    def _is_by_mode(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return False
        pairs = zip(_leaves(node), _leaves(self._twin[node]))
        return any(str(node.target).startswith(f"aten.{word}") for word in _DRAWING) or any(
            not isinstance(a, fx.Node) and (type(a) is not type(b) or a != b) for a, b in pairs
        )

    def _by_mode(self, graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
        inputs = [leaf for leaf in _leaves(node) if isinstance(leaf, fx.Node)]
        templates = []
        for each in (node, self._twin[node]):
            numbers = iter(range(len(inputs)))
            templates.append(fx.node.map_aggregate((each.args, dict(each.kwargs)), functools.partial(_slot, numbers)))
        path = _path(node)
        train, evaluation = map(_unfrozen, templates)
        module = ByMode(node.target, train, evaluation, path)  # type: ignore[arg-type]
        module.training = self._model.get_submodule(path).training
        name = self._add(".".join(part for part in (path, f"by_mode_{node.name}") if part), module)
        return graph.call_module(name, tuple(env[each] for each in inputs))

    def _output(self, graph: fx.Graph, leaves: Any, program: ExportedProgram) -> Any:
        spec = program.call_spec.out_spec
        if spec is None or spec.is_leaf():
            return leaves[0] if isinstance(leaves, (list, tuple)) else leaves
        return graph.call_module(self._add(f"{_CONSTANTS}.output", Restored(spec)), tuple(leaves))


_CONSTANTS = "of_the_graph"  # the module in the root that holds what is not the model's


def _does(node: fx.Node) -> bool:
    """Whether the node does something that its input has not done."""
    return str(node.target) not in _SAME


def _origin(node: fx.Node) -> fx.Node:
    while not _does(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _leaves(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return found


def _slot(numbers: Iterator[int], leaf: Any) -> Any:
    return Slot(next(numbers)) if isinstance(leaf, fx.Node) else leaf


def _unfrozen(value: Any) -> Any:
    """With plain lists and dicts in place of fx's own."""
    if isinstance(value, dict):
        return {key: _unfrozen(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unfrozen(each) for each in value]
    return tuple(map(_unfrozen, value)) if type(value) is tuple else value


def _path(node: fx.Node) -> str:
    """The module in whose forward the node is."""
    entries = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(entries[-1][0]) if entries else ""
    return "" if path.startswith("_empty_nn_module_stack") else path.partition("@")[0]


def _attribute(root: nn.Module, name: str) -> Any:
    try:
        return operator.attrgetter(name)(root)
    except AttributeError:
        return None


def _at(root: nn.Module, path: str) -> nn.Module:
    """The module there; bare ones are made on the way."""
    for step in path.split(".") if path else ():
        if root._modules.get(step) is None:
            root._modules[step] = nn.Module()
        root = root._modules[step]  # type: ignore[assignment]
    return root


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    around, _, name = path.rpartition(".")
    _at(root, around)._modules[name] = module
