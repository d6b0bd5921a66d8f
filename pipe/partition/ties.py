"""Weights that several layers share: which a cut separates, and what cannot be shared over stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipe.errors import PlanError

_DEEP = 3  # levels of attributes searched for weights of other layers
Group = tuple[str, ...]


@dataclass(frozen=True)
class Tie:
    """One tensor that several stages hold, each a copy: its first full name on each of them, by stage in ascending order.

    The first stage owns it: there its gradients are summed, its optimizer state lives, and its new value comes from.
    """

    names: Mapping[int, str]

    @property
    def owner(self) -> int:
        """The stage that owns it."""
        return next(iter(self.names))

    @property
    def name(self) -> str:
        """Its name in the unsplit model, where it counts once."""
        return self.names[self.owner]


def tied(layers: Sequence[nn.Module], names: Sequence[str]) -> list[Group]:
    """Groups of full names, "<layer>.<parameter or buffer>", that are the same tensor object, in the model's order."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, layer in zip(names, layers):
        for inner, tensor in _held(layer):
            found[id(tensor)].append(f"{name}.{inner}")
    return [tuple(group) for group in found.values() if len(group) > 1]


def separated(groups: Iterable[Group], names: Sequence[str], counts: Sequence[int]) -> tuple[Tie, ...]:
    """The groups of `tied` that a cut into `counts` layers per stage separates."""
    stage_of = _stages(names, counts)
    ties = []
    for group in groups:
        first: dict[int, str] = {}
        for full in group:
            first.setdefault(stage_of[full.partition(".")[0]], full)
        if len(first) > 1:
            ties.append(Tie(dict(sorted(first.items()))))
    return tuple(ties)


def check(layers: Sequence[nn.Module], names: Sequence[str], counts: Sequence[int], ties: Iterable[Tie]) -> None:
    """Refuses a cut after which stages would silently disagree on what they share.

    Raises:
        PlanError: a BatchNorm's statistics would be shared, two parameters that are not the same object share memory, or a layer
            keeps another's weights where its own are not registered.
    """
    whole = nn.ModuleDict()
    whole._modules.update(zip(names, layers))
    for tie in ties:
        if isinstance(whole.get_submodule(tie.name.rpartition(".")[0]), _BatchNorm) and tie.name.endswith("running_mean"):
            raise PlanError(
                f"{' and '.join(tie.names.values())} are the running statistics of one BatchNorm, used on stages "
                f"{', '.join(map(str, tie.names))}; they are updated in one place: put its uses into one stage with split="
            )
    stage_of = _stages(names, counts)
    _check_memory(layers, names, stage_of)
    _check_hidden(layers, names, stage_of)


def _check_memory(layers: Sequence[nn.Module], names: Sequence[str], stage_of: Mapping[str, int]) -> None:
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = defaultdict(list)
    for name, layer in zip(names, layers):
        for inner, t in _held(layer):
            if t.layout is torch.strided and t.device.type != "meta" and t.numel():
                end = t.data_ptr() + t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())))
                spans[t.untyped_storage().data_ptr()].append((t.data_ptr(), end, f"{name}.{inner}", t))
    for found in spans.values():
        found.sort(key=lambda span: span[:2])
        for (_, end, one, t), (begin, _, other, u) in pairwise(found):
            if t is not u and begin < end and stage_of[one.partition(".")[0]] != stage_of[other.partition(".")[0]]:
                raise PlanError(
                    f"{one} and {other} are two tensors over the same memory, on two stages; stages share a weight that is one object: "
                    "assign the parameter itself (head.weight = embedding.weight), or put both into one stage with split="
                )


def _check_hidden(layers: Sequence[nn.Module], names: Sequence[str], stage_of: Mapping[str, int]) -> None:
    home = {id(p): (name, inner) for name, layer in zip(names, layers) for inner, p in layer.named_parameters()}
    for name, layer in zip(names, layers):
        own = {id(p) for p in layer.parameters()}
        for module in layer.modules():
            for attribute, value in vars(module).items():
                for p in () if attribute in ("_parameters", "_buffers", "_modules") else _weights(value, _DEEP):
                    if id(p) not in own and id(p) in home and stage_of[home[id(p)][0]] != stage_of[name]:
                        full = ".".join(home[id(p)])
                        raise PlanError(
                            f"layer {name!r} uses {full} through its attribute {attribute!r}, which is not registered in it, from another "
                            f"stage; a stage knows the weights that its layers register: register it (self.{attribute.strip('_')} = the "
                            "module or the nn.Parameter), or put both layers into one stage with split="
                        )


def _weights(value: Any, deep: int) -> Iterator[nn.Parameter]:
    """The parameters in an attribute's value, in containers and unregistered modules, too."""
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif deep and isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _weights(item, deep - 1)
    elif deep and hasattr(value, "__self__"):  # a method of another module
        yield from _weights(value.__self__, deep - 1)


def _held(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def _stages(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    return dict(zip(names, (s for s, n in enumerate(counts) for _ in range(n))))
