"""A module that is no sequence, captured from its first arguments; and calls of it, which have to be alike."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipe.errors import PlanError
from pipe.partition.attributes import State
from pipe.partition.capture import HOOKED, capture, has_hooks
from pipe.partition.deferred import on_meta
from pipe.partition.exported import Exported, export
from pipe.partition.graph import GraphLayers


def bind(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of the module's forward by name; those that are None, like their default, are left out.

    Raises:
        PlanError: they do not fit its signature, or have no names.
    """
    signature, kind = inspect.signature(model.forward), type(model).__name__
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise PlanError(f"the arguments do not fit {kind}.forward{signature} ({error}); give those that it names") from None
    found: dict[str, Any] = {}
    for name, value in bound.items():
        how = signature.parameters[name].kind
        if how is inspect.Parameter.VAR_POSITIONAL:
            raise PlanError(f"{kind}.forward takes *{name}; stages get arguments by name: give each a name in the signature")
        found.update(value if how is inspect.Parameter.VAR_KEYWORD else {name: value})
    return {name: value for name, value in found.items() if value is not None or name not in signature.parameters}


def why_not(model: nn.Module, stages: int) -> str:
    """Why the module cannot be cut into stages, as far as that shows without a batch, given only what its forward must have; else empty."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if has_hooks(model):
        return f"{type(model).__name__} {HOOKED}"
    try:
        nodes = sum(node.op not in ("placeholder", "output", "get_attr") for node in capture(model, needed, {}).nodes) if needed else stages
    except PlanError:
        return ""  # what cannot be traced may be exported, with a batch
    return "" if nodes >= stages else f"its forward is a graph of {nodes} node{'s' * (nodes != 1)}, fewer than the stages"


class Captured:
    """The graph of a module, and the kind of call that it is good for: tensors may differ, all else is a part of it."""

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of one micro-batch, by name.

        Raises:
            PlanError: it cannot be captured.
        """
        self._fixed = {name: value for name, value in given.items() if not _holds_tensors(value)}
        self._given = {name: value for name, value in given.items() if name not in self._fixed}.keys()
        tensors = {name: given[name] for name in self._given}
        found = _graph(model, tensors, self._fixed)
        self._sizes, self._guards, self._constants = found.sizes, found.guards, found.fixed
        if on_meta(model):  # nothing to compare, and shapes are those of inputs on the meta device
            tensors = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), tensors)
        else:
            with _untouched(model):
                _compare(model, found, tensors)
        with _untouched(model):
            self.layers = GraphLayers(found.root, found.graph, tensors)

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuses a call of another kind.

        Raises:
            PlanError: names the first argument that differs.
        """
        for name in sorted({*given, *self._given, *self._fixed}):
            now, then = self._kind(given, name), "tensors" if name in self._given else self._kind(self._fixed, name)
            if now != then:
                raise PlanError(
                    f"argument {name!r} is {now}, and the model was captured with {then}; a captured graph is for one kind of call: call "
                    "it alike, or make an engine for each kind"
                )

    def check_sizes(self, given: Mapping[str, Any]) -> None:
        """Refuses a micro-batch of another size where the graph holds for one only.

        Raises:
            PlanError: names the first argument that differs.
        """
        for name, sizes in self._sizes.items():
            for dim, size in sizes.items():
                if given[name].shape[dim] != size:
                    raise PlanError(
                        f"argument {name!r} of a micro-batch has the shape {tuple(given[name].shape)}, and the model was captured with "
                        f"{size} in dimension {dim}, which its code fixes, or which was 1 at first: pass example=((x,), {{}}) with other "
                        "sizes, or keep to it"
                    )
        for guard in self._guards:
            try:
                guard(*(given[name] for name in self._given), *self._constants.values())
            except AssertionError as error:
                raise PlanError(
                    f"a micro-batch has sizes for which the model's code goes another way than at capture ({error}); a captured graph is "
                    "for one way: keep to sizes like the first, or pass example=((x,), {}) with those that come"
                ) from None

    def _kind(self, values: Mapping[str, Any], name: str) -> str:
        if name not in values:
            return "its default"
        return "tensors" if _holds_tensors(values[name]) else repr(values[name])


def _graph(model: nn.Module, tensors: Mapping[str, Any], fixed: Mapping[str, Any]) -> Exported:
    """The model's graph, by torch.fx or else by torch.export.

    Raises:
        PlanError: neither can make it.
    """
    try:
        return Exported(model, capture(model, tensors.keys(), fixed), fixed)
    except PlanError as error:
        try:
            return export(model, tensors, fixed)
        except PlanError as other:
            raise PlanError(f"{error}; {other}") from error


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the modes, attributes and buffers of the model are as before."""
    modes = {module: module.training for module in model.modules()}
    state, buffers = State(model), [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        state.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _compare(model: nn.Module, found: Exported, tensors: Mapping[str, Any]) -> None:
    """Runs the model and the graph on the example, in the modes that its modules are in and in eval mode, with the same random numbers.

    Raises:
        PlanError: they give different values.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = pytree.tree_map_only(Tensor, lambda t: t.detach().to(device).clone(), dict(tensors))
    graph = fx.GraphModule(found.root, found.graph)
    own = {module: module.training for module in found.root.modules()}
    for is_eval in (False, True):
        if is_eval:
            model.eval()
            found.root.eval()
        try:
            alike = _alike(model, found, graph, given)
        except PlanError:
            raise
        except Exception as error:  # of the user's model, or of a graph that holds for its example only
            first = next(iter(str(error).splitlines()), "")
            raise PlanError(
                f"{type(model).__name__} and its captured graph cannot be compared ({type(error).__name__}: {first[:160]})"
            ) from error
        finally:
            for module, training in own.items():
                module.training = training
        if not alike:
            raise PlanError(f"the captured graph of {type(model).__name__} gives other values than the module on the example")


def _alike(model: nn.Module, found: Exported, graph: fx.GraphModule, given: Mapping[str, Any]) -> bool:
    state, buffers = State(model), [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(0)  # the caller has forked the generator
    want, spec = pytree.tree_flatten(model(**copy.deepcopy(given), **found.fixed))
    if (changed := state.restore()) and found.root is not model:  # what torch.fx cannot follow it keeps whole
        raise PlanError(f"{min(changed) or type(model).__name__} assigns to attributes in its forward, which a graph does not do")
    for buffer, value in buffers:
        buffer.copy_(value)
    torch.manual_seed(0)
    got, other = pytree.tree_flatten(graph(**copy.deepcopy(given)))
    return spec == other and all(_equal(one, other) for one, other in zip(want, got))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    return bool(type(one) is type(other) and one == other)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
