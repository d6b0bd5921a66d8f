"""Weights that several layers share: which a cut separates, and what cannot be shared over stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipe.errors import PlanError

_DEEP = 3  # levels of attributes searched for weights of other layers


@dataclass(frozen=True)
class Tie:
    """One tensor that several stages hold, each a copy, under `names` by stage.

    The owner is the first stage that holds it under `name`, that of the unsplit model: there its gradients are summed, its optimizer
    state lives, and its new value comes from.
    """

    name: str
    owner: int
    names: Mapping[int, str]


def find(stages: Sequence[nn.Module], whole: nn.Module, *, buffers: bool = False) -> tuple[Tie, ...]:
    """The parameters, or the buffers, that more than one stage holds; modules of stages have the unsplit model's names."""
    kept = dict(_kind(whole, buffers, once=True))
    canonical = {id(tensor): name for name, tensor in kept.items()}
    held: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for s, stage in enumerate(stages):
        for name, tensor in _kind(stage, buffers):
            held[id(tensor)][s].append(name)
    ties = []
    for key, by_stage in held.items():
        if len(by_stage) > 1:
            name = canonical[key]
            names = {s: name if name in found else found[0] for s, found in by_stage.items()}
            ties.append(Tie(name, next(s for s, own in names.items() if own == name), names))
    return tuple(ties)


def check(stages: Sequence[nn.Module], whole: nn.Module) -> None:
    """Refuses a cut after which stages would silently disagree on what they share.

    Raises:
        PlanError: a BatchNorm's statistics would be shared, two parameters that are not the same object share memory, or a layer
            keeps another's weights where its own are not registered.
    """
    for tie in find(stages, whole, buffers=True):
        if isinstance(whole.get_submodule(tie.name.rpartition(".")[0]), _BatchNorm) and tie.name.endswith("running_mean"):
            raise PlanError(
                f"{' and '.join(dict.fromkeys(tie.names.values()))} are the running statistics of one BatchNorm, used on stages "
                f"{', '.join(map(str, tie.names))}; they are updated in one place: put its uses into one stage with split="
            )
    _check_memory(stages)
    _check_hidden(stages)


def _check_memory(stages: Sequence[nn.Module]) -> None:
    spans: dict[int, list[tuple[int, int, int, str, Tensor]]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for name, t in [*_kind(stage, False), *_kind(stage, True)]:
            if t.layout is torch.strided and t.device.type != "meta" and t.numel():
                end = t.data_ptr() + t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())))
                spans[t.untyped_storage().data_ptr()].append((t.data_ptr(), end, s, name, t))
    for found in spans.values():
        found.sort(key=lambda span: span[:3])
        for (_, end, s, one, t), (begin, _, r, other, u) in pairwise(found):
            if t is not u and begin < end and s != r:
                raise PlanError(
                    f"{one} and {other} are two tensors over the same memory, on two stages; stages share a weight that is one object: "
                    "assign the parameter itself (head.weight = embedding.weight), or put both into one stage with split="
                )


def _check_hidden(stages: Sequence[nn.Module]) -> None:
    home = {id(p): (s, name) for s, stage in enumerate(stages) for name, p in stage.named_parameters()}
    for stage in stages:
        own = {id(p) for p in stage.parameters()}
        for path, module in stage.named_modules():
            for attribute, value in vars(module).items():
                for p in () if attribute in ("_parameters", "_buffers", "_modules") else _weights(value, _DEEP):
                    if id(p) not in own and id(p) in home:
                        raise PlanError(
                            f"layer {path!r} uses {home[id(p)][1]} through its attribute {attribute!r}, which is not registered in it, "
                            f"from another stage; a stage knows the weights that its layers register: register it "
                            f"(self.{attribute.strip('_')} = the module or the nn.Parameter), or put both into one stage with split="
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


def _kind(module: nn.Module, buffers: bool, once: bool = False) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=once) if buffers else module.named_parameters(remove_duplicate=once))
