"""Copies of modules for workers in threads, and modules as bytes for workers in other processes.

A copy shares what cannot be copied (locks, open files); bytes refuse it, by name. Both keep ties, `requires_grad`, strides and the
hooks of parameters, and take a tensor that some forward left as an attribute (the old weight_norm's) without its graph.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, fx, nn

from pipe import pickler
from pipe.culprit import culprit
from pipe.errors import PlanError
from pipe.strides import restore, ship

_ATTEMPTS = 1000
_OWN = ("pipe", "launch", "__main__", "__mp_main__")  # packages that every worker has, and the script, which is by value anyway
_INSTALLED = ("site-packages", "dist-packages")


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy on the same devices, with the hooks of its parameters; what cannot be copied is shared.

    Raises:
        PlanError: a part cannot be copied, and what holds it makes it anew at every attempt.
    """
    memo: dict[int, Any] = {}
    with torch.no_grad():  # the copy of a scripted module has weights that remember where they come from
        try:
            copied: nn.Module = copy.deepcopy(module, memo)
        except Exception:
            memo = _replacements(module)
            copied = copy.deepcopy(module, memo)
    for old, new in zip(_tensors(module), _tensors(copied)):
        new.requires_grad_(old.requires_grad and old.is_leaf)
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
        for hook in _hooks(old):
            _register(new, hook[0], _copy_hook(hook[1], memo))
    return copied


def dump_module(value: Any, names: Sequence[str] = ()) -> bytes:
    """A module, a sequence of layers or a function as bytes, its tensors on the host; what `__main__` defines goes by value.

    Args:
        names: of the layers in a sequence, for the error.

    Raises:
        PlanError: it holds what cannot be sent; the message names the attribute.
    """
    tensors = [t for module in _modules(value) for t in _tensors(module)]
    hooks = [(t, kept) for t in dict.fromkeys(tensors) if (kept := _hooks(t))]
    try:
        return _dumps((value, hooks))
    except Exception as error:
        raise PlanError(_complaint(value, hooks, names, error)) from error


def load_module(data: bytes) -> Any:
    """What `dump_module` was given."""
    value, hooks = pickle.loads(data)
    for tensor, kept in hooks:
        for method, hook in kept:
            _register(tensor, method, hook)
    return value


def by_value(folder: str | Path) -> tuple[str, ...]:
    """Makes `dump_module` send what the loaded modules of the script's folder define by value, since other hosts may lack the files.

    Call it right before dumping: a module that is imported later is not known. Returns their names.
    """
    root = Path(folder).resolve()
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not str(file).endswith(".py") or not Path(file).is_absolute() or name.partition(".")[0] in _OWN:
            continue
        path = Path(file).resolve()
        installed = any(part in _INSTALLED for part in path.parts) or path.is_relative_to(Path(pickle.__file__).resolve().parent)
        if path.is_relative_to(root) and not installed:
            cloudpickle.register_pickle_by_value(module)
            found.append(name)
    return tuple(found)


class _Dumper(pickler.Pickler):
    """By value where need be; tensors on the host, with their own bytes only, and without a graph."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device.type != "meta":
            sent, geometry = ship(value.detach())
            raw = torch.empty(0, dtype=torch.uint8).set_(sent.untyped_storage()).numpy()
            held = (bytearray(raw), sent.dtype, tuple(sent.size()), sent.stride(), sent.storage_offset(), geometry)
            return _rebuild, (type(value), held, value.requires_grad and value.is_leaf, dict(vars(value)))
        if isinstance(value, Tensor) and not value.is_leaf:
            return _same, (value.detach(),)
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value._schema.name, value._overloadname)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return getattr, (torch.ops.higher_order, value._name)
        if isinstance(value, fx.GraphModule):  # torch.fx would trace it anew, as if its nodes were a user's forward
            state = {key: kept for key, kept in vars(value).items() if key not in ("_graph", "_code")}
            return _graph_module, (_nodes(value.graph), state)
        if isinstance(value, nn.Module) and nn.utils.parametrize.is_parametrized(value):  # its __getstate__ raises
            return object.__new__, (type(value),), vars(value), None, None, _set_vars
        return super().reducer_override(value)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Dumper(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _rebuild(kind: type, held: tuple[Any, ...], requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    raw, dtype, size, stride, offset, geometry = held
    storage = torch.frombuffer(raw, dtype=torch.uint8).clone() if raw else torch.empty(0, dtype=torch.uint8)
    t = restore(torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, size, stride), geometry, torch.device("cpu"))
    t = nn.Parameter(t, requires_grad) if kind is nn.Parameter else t.requires_grad_(requires_grad)
    vars(t).update(attributes)
    return t


@dataclass(frozen=True)
class _Ref:
    """A node among the arguments of another."""

    name: str


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as plain data."""

    def refer(leaf: Any) -> Any:
        return _Ref(leaf.name) if isinstance(leaf, fx.Node) else leaf

    return [(node.op, node.name, node.target, *fx.node.map_aggregate((node.args, dict(node.kwargs)), refer)) for node in graph.nodes]


def _graph_module(nodes: list[tuple[Any, ...]], state: dict[str, Any]) -> fx.GraphModule:
    """The inverse, with what else the module holds."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for op, name, target, *arguments in nodes:
        args, kwargs = fx.node.map_aggregate(tuple(arguments), lambda leaf: made[leaf.name] if isinstance(leaf, _Ref) else leaf)
        made[name] = graph.create_node(op, target, args, dict(kwargs), name)
    module = fx.GraphModule(nn.Module(), fx.Graph())
    vars(module).update(state)
    module.graph = graph
    return module


def _operator(name: str, overload: str) -> Any:
    namespace, _, own = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), own), overload)


def _same(value: Any) -> Any:
    return value


def _set_vars(value: Any, state: dict[str, Any]) -> None:
    value.__dict__.update(state)


def _replacements(module: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy with what it could not copy: non-leaf tensors detached, all else itself.

    Found by copying without the weights until that works: each failure tells, by its traceback, which object it was.
    """
    kept: list[Any] = []
    found: dict[int, Any] = {}
    weights = {id(t): t for t in _tensors(module) if t.is_leaf}
    for _ in range(_ATTEMPTS):
        try:
            copy.deepcopy(module, {**weights, **found})
        except Exception as error:
            at_fault = _at_fault(error)
            if at_fault is None or (isinstance(at_fault, Tensor) and at_fault.is_leaf):
                raise
            kept.append(at_fault)
            found[id(at_fault)] = at_fault.detach().clone() if isinstance(at_fault, Tensor) else at_fault
        else:
            return {**found, id(found): kept}  # kept: their ids must stay theirs
    raise PlanError(
        f"a {type(kept[-1]).__name__} in {type(module).__name__} cannot be copied, and is made anew each time; "
        f"a stage needs a copy of its layers: define __deepcopy__ or __getstate__ on the class that holds it"
    )


def _at_fault(error: Exception) -> Any:
    """The object that the innermost `copy.deepcopy` of the traceback was to copy."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return found


def _modules(value: Any) -> Iterator[nn.Module]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return (part for part in parts if isinstance(part, nn.Module))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _hooks(t: Tensor) -> list[tuple[str, Any]]:
    """The hooks of a parameter, each with the method that registers it."""
    after = getattr(t, "_post_accumulate_grad_hooks", None) or {}
    return [("register_hook", hook) for hook in (t._backward_hooks or {}).values()] + [
        ("register_post_accumulate_grad_hook", hook) for hook in after.values()
    ]


def _register(t: Tensor, method: str, hook: Any) -> None:
    getattr(t, method)(hook)


def _copy_hook(hook: Any, memo: dict[int, Any]) -> Any:
    """The hook; a method of a copied module is that of the copy."""
    try:
        return copy.deepcopy(hook, memo)
    except Exception:
        return hook


def _complaint(value: Any, hooks: Any, names: Sequence[str], error: Exception) -> str:
    path, at_fault = culprit(value, _dumps)
    where = ""
    if not path and hooks:
        where, (path, at_fault) = "a parameter's hook: ", culprit([hook for _, kept in hooks for _, hook in kept], _dumps)
        path = path[1:]
    elif path and isinstance(value, (list, tuple)):
        where, path = f"layer {str(names[path[0]] if names else path[0])!r}: ", path[1:]
    kind = f"{type(at_fault).__module__}.{type(at_fault).__qualname__}".removeprefix("builtins.")
    what = f"attribute {'.'.join(map(str, path))!r} is" if path else "it is"
    return (
        f"{where}{what} a {kind}, which cannot be sent ({error}); build it in the worker with pipe.LayerSpec, "
        f"or define __getstate__ on the class that holds it"
    )
