"""A model as a graph: what its forward does, node after node, good for train and eval and for any batch.

Traced by torch.fx in both modes. A module is kept whole, as one node, if it cannot be traced, does another thing in eval than in train
(dropout as a function, stochastic depth), draws random numbers by itself, or has hooks; then the rest is traced again:

    trace in train, trace in eval --differ inside module M--> keep M whole --again--> ... --the same graph--> done
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipe.errors import PlanError
from pipe.follower import Follower
from pipe.partition.attributes import CONSTANT, State

_CHECKPOINT = "_infer_device_type"  # of torch.utils.checkpoint, which it calls itself whatever name the model has imported
_KINDS = ("cpu", "cuda")
_ROUNDS = 50  # each keeps at least one more module whole
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKED = "has hooks on the whole model, which would belong to no stage (hooks on its modules are kept)"
_DRAWS = ("dropout", "rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "rrelu", "poisson", "gumbel_softmax")
_MAKERS = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor", "as_tensor", "rand", "randn", "randint", "randperm")
_Key = dict[str, list[tuple[Any, ...]]]


def capture(model: nn.Module, given: Collection[str], fixed: Mapping[str, Any]) -> fx.Graph:
    """What the model's forward does, as a graph whose placeholders are the arguments `given`.

    Args:
        given: names of arguments that hold tensors.
        fixed: arguments with other values, which are constants of the graph. All others keep their defaults, as constants, too.

    Raises:
        PlanError: it cannot be captured; says which module, and why.
    """
    if has_hooks(model):
        raise PlanError(f"{type(model).__name__} {HOOKED}")
    constants = {**_defaults(model, {*given, *fixed}), **fixed}
    if keeps_more(model):
        raise PlanError(f"{type(model).__name__} has a state of its own (get_extra_state), which would belong to no stage")
    whole = {name for name, module in model.named_modules() if name and (_is_hooked(module) or keeps_more(module))}
    for _ in range(_ROUNDS):
        state = State(model)
        try:
            graphs = [_trace(model, mode, whole, constants) for mode in (True, False)]
        except Exception as error:  # whatever a forward raises when it meets a proxy
            name = _innermost(model, error)
            if not name or name in whole:
                raise PlanError(f"{name or type(model).__name__} cannot be traced ({_line(error)})") from error
            whole.add(name)
            continue
        finally:
            changed = state.restore()
        if changed:
            if "" in changed or changed <= whole:
                raise PlanError(f"{type(model).__name__}.forward assigns to attributes of its module, which a graph does not do")
            whole |= changed
            continue
        ways = [_by_module(graph) for graph in graphs]
        differ = {name for name in ways[0].keys() | ways[1].keys() if ways[0].get(name) != ways[1].get(name)}
        differ |= {name for name, nodes in ways[0].items() if any(op == "get_attr" and of.startswith(CONSTANT) for op, of, *_ in nodes)}
        differ |= {name for name, nodes in ways[0].items() if any(_draws(*node[:2]) for node in nodes)}
        if not differ:
            return _without_constants(graphs[0], given)
        if "" in differ:
            raise PlanError(
                f"{type(model).__name__}.forward itself does another thing in eval than in train, draws random numbers, or has a "
                "tensor that is no buffer"
            )
        whole |= differ
    raise PlanError(f"{type(model).__name__} changes with every trace")


def has_hooks(module: nn.Module) -> bool:
    """Whether it has hooks of the user's."""
    return any(not isinstance(hook, Follower) for hooks in HOOKS for hook in getattr(module, hooks, {}).values())


def keeps_more(module: nn.Module) -> bool:
    """Whether its state_dict has more than parameters and buffers."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _is_hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks, None) for hooks in HOOKS)


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module, whole: set[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._whole = whole
        self._began = _context()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; refused in a context that the graph would not have, so that the module around is kept whole."""
        if _context() != self._began:
            raise PlanError("its forward switches autocast or gradients on or off")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """An argument; torch.fx would make a plain dict out of an OrderedDict."""
        if type(a) is OrderedDict:
            pairs = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", OrderedDict, (pairs,), {})
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """An attribute of a module; a buffer is a node as parameters are, so that a write to it is one, too."""
        name = self._buffers.get(id(attr_val))
        if name is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module, train: bool, whole: set[str], constants: Mapping[str, Any]) -> fx.Graph:
    """The graph in one mode; in eval mode under autocast, so that what switches it shows in one of the two."""
    numbers = random.getstate()
    with mode(model, train), _autocast(not train), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Was not able to add assertion")  # that a constant is one: we look ourselves
        tracer = _Tracer(model, whole)
        with _replaced(torch, _recorders(tracer)), _replaced(torch.utils.checkpoint, {_CHECKPOINT: _refuse_checkpoint}):
            graph = tracer.trace(model, dict(constants) or None)
    if random.getstate() != numbers:
        raise PlanError("it draws numbers of Python's random module, which would be constants of the graph: draw them with torch")
    return graph


def _recorders(tracer: fx.Tracer) -> dict[str, Callable[..., Any]]:
    """What makes a tensor out of numbers as what makes a node: its size may come from the batch."""

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_function", original, args, kwargs)

        return make

    return {name: recorded(getattr(torch, name)) for name in _MAKERS}


def _refuse_checkpoint(*_: Any, **__: Any) -> Any:
    raise PlanError("its forward calls torch.utils.checkpoint, which a graph does not do")


@contextmanager
def _replaced(module: Any, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile, in this thread, calls of functions of a module go elsewhere."""
    own, originals = threading.get_ident(), {name: getattr(module, name) for name in replacements}

    def switch(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (replacement if threading.get_ident() == own else original)(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(module, name, switch(original, replacements[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    before = {kind: torch.is_autocast_enabled(kind) for kind in _KINDS}
    for kind in _KINDS:
        torch.set_autocast_enabled(kind, enabled)
    try:
        yield
    finally:
        for kind, was in before.items():
            torch.set_autocast_enabled(kind, was)


@contextmanager
def mode(model: nn.Module, train: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _context() -> tuple[Any, ...]:
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocasts


def _defaults(model: nn.Module, given: Collection[str]) -> dict[str, Any]:
    """The defaults of arguments that were not given."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in given and p.default is not p.empty}


def _without_constants(graph: fx.Graph, given: Collection[str]) -> fx.Graph:
    """The graph without the placeholders of constants, and without fx's checks of them; its output as the model gives it."""
    if (spec := getattr(getattr(graph._codegen, "pytree_info", None), "out_spec", None)) is not None:  # a constant was a container
        output = next(node for node in graph.nodes if node.op == "output")
        output.args = (pytree.tree_unflatten(list(output.args[0]), spec),)
    graph.set_codegen(fx.graph.CodeGen())
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.target not in given]:
        _erase(graph, node)
    graph.lint()
    return graph


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _by_module(graph: fx.Graph) -> _Key:
    """What the nodes of each module do, by its name; the root's is ""."""
    found: _Key = defaultdict(list)
    homes: dict[fx.Node, tuple[str, str]] = {}  # of each node: its module, and what it is there
    for node in graph.nodes:
        path = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        if node.op == "call_module":
            path = path[:-1]
        home = path[-1] if path else ""
        show = functools.partial(_shown, home, homes)
        homes[node] = home, f"node {len(found[home])}"
        found[home].append((node.op, _named(node), show(node.args), show(node.kwargs)))
    return dict(found)


def _shown(home: str, homes: Mapping[fx.Node, tuple[str, str]], value: Any) -> str:
    """Arguments of a node in the module `home`: a node of the same module by its number there, any other by its module."""

    def show(node: fx.Node) -> str:
        module, number = homes[node]
        return number if module == home else f"of {module}"

    return repr(fx.node.map_arg(value, show))


def draws(graph: fx.Graph) -> bool:
    """Whether a node that is no module draws random numbers."""
    return any(_draws(node.op, _named(node)) for node in graph.nodes)


def _named(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _draws(op: str, name: str) -> bool:
    name = name.rstrip("_")
    return op in ("call_function", "call_method") and any(name == word or name.startswith(f"{word}_") for word in _DRAWS)


def _innermost(model: nn.Module, error: BaseException) -> str:
    """The name of the module whose forward was the innermost on the stack when the trace failed."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name != "__getattr__" and names.get(id(module)):
            found = names[id(module)]
        trace = trace.tb_next
    return found


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
