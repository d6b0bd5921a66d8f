"""A model as a sequence of layers: their names, where to cut them, what they share, and the module of one stage."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

from torch import nn

from pipe.errors import PlanError
from pipe.follower import Follower
from pipe.partition.spec import Layer, LayerSpec


@dataclass(frozen=True)
class Layers:
    """A model that is a sequence: each layer's value is the next one's input. The same module may stand there twice."""

    names: tuple[str, ...]
    layers: tuple[Layer, ...]
    kind: str  # "sequential" (an nn.Sequential) or "list"

    def __len__(self) -> int:
        return len(self.names)


def layers_of(model: object) -> Layers | None:
    """The model's layers under the names that the unsplit model gives them, or None where it cannot be cut as a sequence.

    A list of modules or specs, or an nn.ModuleList, is named like nn.Sequential(*list): "0", "1", ...

    Raises:
        PlanError: a list is empty or holds something that is no layer.
    """
    if isinstance(model, nn.ModuleList | list | tuple):
        return _listed(list(model))
    if isinstance(model, nn.Sequential) and not why_whole(model):
        held = {name: layer for name, layer in model._modules.items() if layer is not None}
        return Layers(tuple(held), tuple(held.values()), "sequential")
    return None


def why_whole(model: nn.Module) -> str:
    """Why `layers_of` gives None: a phrase to put behind the model's name; empty if it can be cut."""
    if not isinstance(model, nn.Sequential):
        return "is neither an nn.Sequential nor a list of layers"
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
        return "is an nn.Sequential with a forward of its own"
    if model._parameters or model._buffers:
        return f"is an nn.Sequential that holds {', '.join([*model._parameters, *model._buffers])} outside of its layers"
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values(), *model._backward_hooks.values()]
    if [hook for hook in hooks + [*model._backward_pre_hooks.values()] if not isinstance(hook, Follower)]:
        return "has hooks on the whole model, which would belong to no stage (hooks on its layers are kept)"
    return ""


def _listed(layers: list[Any]) -> Layers:
    if not layers:
        raise PlanError("the model is an empty list; it needs at least one layer: list nn.Modules or pipe.LayerSpecs")
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module | LayerSpec):
            raise PlanError(
                f"entry {i} of the model's list is {layer!r} ({type(layer).__qualname__}); a layer is an nn.Module or a pipe.LayerSpec: "
                f"wrap a function in a module, or write LayerSpec(cls, *args)"
            )
    return Layers(tuple(map(str, range(len(layers)))), tuple(layers), "list")


def resolve(split: object, names: Sequence[str], stages: int) -> tuple[int, ...] | None:
    """How many layers each stage has; None for "auto", which is chosen later from measured costs.

    Args:
        split: "auto", layers per stage, or the names of the layers that begin the second and later stages.

    Raises:
        PlanError: fewer layers than stages, or a split that does not fit the names or the number of stages.
    """
    if len(names) < stages:
        raise PlanError(
            f"{stages} stages for {len(names)} layer{'s' * (len(names) != 1)}; each stage needs at least one: "
            f"use --stages {max(len(names), 1)} or fewer, or give the model as a longer list of layers"
        )
    if isinstance(split, str) and split == "auto":
        return None
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise _unfit(split, 'is neither "auto" nor a list', names, stages)
    wanted = list(split)
    if wanted and all(isinstance(n, Integral) and not isinstance(n, bool) for n in wanted):
        return _counts([int(n) for n in wanted], names, stages)
    if all(isinstance(n, str) for n in wanted):
        return _from_names(wanted, names, stages)
    raise _unfit(split, "mixes or holds other things than numbers of layers, or names of layers", names, stages)


def _counts(counts: list[int], names: Sequence[str], stages: int) -> tuple[int, ...]:
    if len(counts) != stages:
        raise _unfit(counts, f"has {len(counts)} numbers for {stages} stages", names, stages)
    if min(counts) < 1:
        raise _unfit(counts, f"gives stage {counts.index(min(counts))} {min(counts)} layers; each stage needs at least one", names, stages)
    if sum(counts) != len(names):
        raise _unfit(counts, f"adds up to {sum(counts)} layers; the model has {len(names)}", names, stages)
    return tuple(counts)


def _from_names(begins: list[str], names: Sequence[str], stages: int) -> tuple[int, ...]:
    for name in begins:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            raise _unfit(begins, f"names {name!r}, which is no layer{f' (near: {_listing(near)})' if near else ''}", names, stages)
    at = [list(names).index(name) for name in begins]
    for before, after in pairwise(at):
        if before >= after:
            raise _unfit(begins, f"has {names[after]!r} behind {names[before]!r}; names stand once, in the model's order", names, stages)
    at = at[1:] if at[:1] == [0] else at  # stage 0 begins there anyway
    if len(at) != stages - 1:
        raise _unfit(begins, f"begins {len(at) + 1} stages; there are {stages}", names, stages)
    ends = [*at, len(names)]
    return tuple(end - begin for begin, end in zip([0, *at], ends))


def _unfit(split: object, what: str, names: Sequence[str], stages: int) -> PlanError:
    even = [len(names) * (s + 1) // stages - len(names) * s // stages for s in range(stages)]
    begins = [names[n] for n in list(accumulate(even))[:-1]]
    return PlanError(
        f'split={split!r} {what}: use "auto", {stages} numbers of layers such as {even}, or the {stages - 1} names that begin a stage '
        f"such as {begins!r}; the layers are {_listing(names)}"
    )


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    return shown if len(names) <= 12 else f"{shown}, ... {names[-1]} ({len(names)} in all)"


@dataclass(frozen=True)
class Keywords:
    """What a layer's forward takes by keyword: these names or, if `everything`, any; never `filled`, which the value before it fills."""

    names: frozenset[str]
    everything: bool = False
    filled: str | None = None

    def takes(self, name: str) -> bool:
        """Whether the layer gets this keyword argument."""
        return name != self.filled and (self.everything or name in self.names)

    def pick(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The part of the keyword arguments that goes to the layer."""
        return {name: value for name, value in given.items() if self.takes(name)} if given else {}

    def __str__(self) -> str:
        return ", ".join([*sorted(self.names), *(["**"] if self.everything else [])]) or "none"


def keywords(layers: Sequence[nn.Module], names: Sequence[str], *, first: bool = True) -> dict[str, Keywords]:
    """What each layer takes by keyword, by its name.

    Args:
        first: whether the list begins with the model's first layer, whose inputs may all come by keyword; the first input of
            every other layer is the value of the one before.
    """
    return {name: _keywords(layer, first=first and i == 0) for i, (name, layer) in enumerate(zip(names, layers))}


def _keywords(layer: nn.Module, first: bool) -> Keywords:
    forward = getattr(layer, "_orig_mod", layer).forward  # torch.compile hides the signature
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # a scripted forward, for one, has none that Python can read
        return Keywords(frozenset())
    kinds = inspect.Parameter
    named = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    everything = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    head = parameters[0] if parameters and not first else None
    filled = head.name if head is not None and head.kind is kinds.POSITIONAL_OR_KEYWORD else None
    return Keywords(frozenset(named) - {filled}, everything, filled)


def route(taken: Mapping[str, Keywords], given: Iterable[str]) -> str:
    """What is wrong with the names of keyword arguments: those that no layer's forward takes, beside what each takes; else empty."""
    lost = [name for name in given if not any(layer.takes(name) for layer in taken.values())]
    if not lost:
        return ""
    listed = "\n".join(f"  layer {name!r} takes {takes}" for name, takes in taken.items())
    return f"no layer's forward takes {', '.join(map(repr, lost))}; each goes to the layers that name it: rename it\n{listed}"


class Chain(nn.Module):
    """The layers of one stage under their unsplit names, so that `state_dict` has the unsplit model's keys.

    Passes one value along like nn.Sequential; a keyword argument goes to each layer whose forward names it or has **kwargs.
    """

    current: str | None  # the layer whose call has begun last, and None after the last one
    _takes: dict[str, Keywords]
    _at: Callable[[str], AbstractContextManager[None]] | None

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str], *, first: bool = True) -> None:
        """Takes the layers as they are.

        Args:
            first: whether this is the model's first stage, whose first layer takes several arguments and all by keyword, too.
        """
        super().__init__()
        self._modules.update(zip(names, layers))  # not add_module: a layer may be called like an attribute of this class
        self._set(_takes=keywords(layers, names, first=first), _at=None, current=None)

    def _set(self, **attributes: Any) -> None:
        """Sets them past nn.Module, which would put them in the place of layers of these names."""
        self.__dict__.update(attributes)

    def surround(self, at: Callable[[str], AbstractContextManager[None]]) -> None:
        """From now on each layer's call is in the context that this gives for its name."""
        self._set(_at=at)

    @property
    def keywords(self) -> frozenset[str] | None:
        """The names of the keyword arguments that some layer here takes; None for any."""
        if any(takes.everything for takes in self._takes.values()):
            return None
        return frozenset().union(*(takes.names for takes in self._takes.values()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The last layer's value."""
        value: tuple[Any, ...] = args
        for name, layer in self._modules.items():
            if layer is not None:
                self._set(current=name)
                with nullcontext() if self._at is None else self._at(name):
                    value = (layer(*value, **self._takes[name].pick(kwargs)),)
        self._set(current=None)
        return value[0]
