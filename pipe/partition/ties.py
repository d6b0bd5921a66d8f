"""Weights that several layers share: which a cut separates, and what cannot be shared over stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipe.errors import PlanError

_DEEP = 3  # levels of attributes searched for tensors
_REGISTERED = ("_parameters", "_buffers", "_modules")


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
    """The parameters, or the buffers, that more than one stage holds; modules of stages have the unsplit model's names.

    A buffer that looks into another one's memory is there, too, be it on one stage: each stage has a copy of each.

    Raises:
        PlanError: there is one stage, which `check` has not seen, and something in it looks into the memory of a parameter.
    """
    if len(stages) == 1:
        _check_memory(whole)
    kept = dict(_kind(whole, buffers, once=True))
    canonical = {id(tensor): name for name, tensor in kept.items()}
    held: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for s, stage in enumerate(stages):
        for name, tensor in _kind(stage, buffers):
            held[id(tensor)][s].append(name)
    looking = {id(t) for pair in _over_one_memory(kept.items()) for _, t in pair} if buffers else set()
    ties = []
    for key, by_stage in held.items():
        if len(by_stage) > 1 or key in looking:
            name = canonical[key]
            names = {s: name if name in found else found[0] for s, found in by_stage.items()}
            ties.append(Tie(name, next(s for s, own in names.items() if own == name), names))
    return tuple(ties)


def check(stages: Sequence[nn.Module], whole: nn.Module) -> None:
    """Refuses a cut after which stages would silently disagree on what they share.

    Raises:
        PlanError: a BatchNorm's statistics would be shared, a shared parameter has hooks, a parameter shares memory with another
            tensor, or a layer keeps another's weights where its own are not registered.
    """
    _check_memory(whole)
    for tie in find(stages, whole, buffers=True):
        norm = whole.get_submodule(tie.name.rpartition(".")[0])
        if isinstance(norm, _BatchNorm) and tie.name.endswith("running_mean") and len(tie.names) > 1:
            raise PlanError(
                f"{' and '.join(dict.fromkeys(tie.names.values()))} are the running statistics of one BatchNorm, used on stages "
                f"{', '.join(map(str, tie.names))}; they are updated in one place: put its uses into one stage with split="
            )
    weights = dict(_kind(whole, False))
    for tie in find(stages, whole):
        if weights[tie.name]._backward_hooks or getattr(weights[tie.name], "_post_accumulate_grad_hooks", None):
            raise PlanError(
                f"{tie.name} has hooks on its gradient, which is the sum of those of stages {', '.join(map(str, tie.names))}: a hook on "
                "a stage would see a part; a weight with hooks lives on one stage: put its uses into one stage with split="
            )
    _check_hidden(stages)


def _check_memory(whole: nn.Module) -> None:
    """Refuses what looks into the memory of a parameter without being it: a step moves the parameter, and a stage's copy of the other
    stays. What a hook computes anew before every forward, as the old spectral_norm its weight, may be anything."""
    named = [*_kind(whole, False, once=True), *_kind(whole, True, once=True)]
    for path, module in whole.named_modules():
        anew = {*_REGISTERED, *(getattr(hook, "name", None) for hook in module._forward_pre_hooks.values())}
        own = [(name, t) for name, value in vars(module).items() if name not in anew for t in _tensors(value, _DEEP)]
        named += [(f"{path}.{name}".removeprefix("."), t) for name, t in own]
    for (one, t), (other, u) in _over_one_memory(named):
        if isinstance(t, nn.Parameter) or isinstance(u, nn.Parameter):
            raise PlanError(
                f"{one} and {other} are two tensors over the same memory; a stage has a copy of each, and a step would move one of them "
                "alone: use one parameter object (head.weight = embedding.weight, not .data), take the view in forward, or make it a "
                ".clone()"
            )


def _over_one_memory(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """The pairs of tensors that have a byte in common and are not one object."""
    by_storage: dict[int, list[tuple[int, int, str, Tensor]]] = defaultdict(list)
    for name, t in {id(t): (name, t) for name, t in reversed(list(named))}.values():
        if has_memory(t):
            end = t.data_ptr() + t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())))
            by_storage[t.untyped_storage().data_ptr()].append((t.data_ptr(), end, name, t))
    for spans in by_storage.values():
        spans.sort(key=lambda span: span[:3])
        for i, (_, end, one, t) in enumerate(spans):
            for _, _, other, u in takewhile(lambda span, end=end: span[0] < end, spans[i + 1 :]):  # type: ignore[misc]
                if _touch(t, u):
                    yield (one, t), (other, u)


def _touch(t: Tensor, u: Tensor) -> bool:
    """Whether they have a byte in common: marks those of the one, and looks at those of the other."""
    begin = min(t.data_ptr(), u.data_ptr())
    marks = torch.zeros(t.untyped_storage().data_ptr() + t.untyped_storage().nbytes() - begin, dtype=torch.bool)

    def own(x: Tensor) -> Tensor:
        width = x.element_size()
        size = [n if step else 1 for n, step in zip(x.shape, x.stride())]  # each byte once
        return marks.as_strided((*size, width), (*(step * width for step in x.stride()), 1), x.data_ptr() - begin)

    own(t).fill_(True)
    return bool(own(u).any())


def has_memory(t: Tensor) -> bool:
    """Whether it has elements, at addresses that its strides tell."""
    has_data = type(t).__torch_dispatch__ is Tensor.__torch_dispatch__ and not t.is_meta and not t.is_nested
    return has_data and t.layout is torch.strided and t.numel() > 0


def _check_hidden(stages: Sequence[nn.Module]) -> None:
    home = {id(p): (s, name) for s, stage in enumerate(stages) for name, p in stage.named_parameters()}
    for stage in stages:
        own = {id(p) for p in stage.parameters()}
        for path, module in stage.named_modules():
            for attribute, value in vars(module).items():
                for p in () if attribute in _REGISTERED else _tensors(value, _DEEP):
                    if id(p) not in own and id(p) in home:
                        raise PlanError(
                            f"layer {path!r} uses {home[id(p)][1]} through its attribute {attribute!r}, which is not registered in it, "
                            f"from another stage; a stage knows the weights that its layers register: register it "
                            f"(self.{attribute.strip('_')} = the module or the nn.Parameter), or put both into one stage with split="
                        )


def _tensors(value: Any, deep: int) -> Iterator[Tensor]:
    """The tensors in an attribute's value, in containers, and the parameters of unregistered modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif deep and isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, deep - 1)
    elif deep and hasattr(value, "__self__"):  # a method of another module
        yield from _tensors(value.__self__, deep - 1)


def _kind(module: nn.Module, buffers: bool, once: bool = False) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=once) if buffers else module.named_parameters(remove_duplicate=once))
