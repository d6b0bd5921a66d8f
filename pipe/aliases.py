"""Tensors over one memory that cross a boundary: each arrives with memory of its own.

That is the same as in one process as long as nobody writes into one of them; a stage that does is told.

    in one process                        here
    stage 0 makes h                       h --------------> copy of h             last taken by stage 2: stage 1 must not write to it
    stage 1 gives a view on h             Region(h, 0, ...) --message--> a copy   a write would be lost up to stage 2 [1]
    stage 2 takes both                    two copies

A parameter or buffer that is given away stays with its stage, so a write into the copy is lost for ever [2].
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipe.action import Route
from pipe.errors import PlanError
from pipe.partition.ties import has_memory

if TYPE_CHECKING:
    from pipe.bundle import Bundle

ALWAYS = 1 << 30  # beyond every stage
_TRIES = 4  # places in one dimension, beyond which two tensors count as overlapping where their ends do

_INPUT = "this stage writes in place into its input of shape "
_WEIGHT = "this stage writes in place into a tied weight of shape "
_SHARED = (
    "shares memory with another input where both come from, so in one process both would change: return a .clone() there, or keep both in "
    "one stage with split="
)
_TAKEN = "a later stage takes, too, as it was: write into a .clone() of it, or keep both in one stage with split="
_OWNED = (
    "is a parameter or buffer of an earlier stage, which would not see it: return a .clone() there, or keep both layers in one stage "
    "with split="
)
_TIED = (
    "other stages hold a copy of, which would not see it: weights that forward writes (max_norm, say) live on one stage: put the layers "
    "that share it into one stage with split="
)


@dataclass(frozen=True, slots=True)
class Region:
    """Where a tensor lies in the memory of one process, however many stages it has passed. All but `size` in bytes."""

    memory: tuple[int, int]  # the stage that gave it its name, and a number there
    begin: int
    width: int  # of an element
    size: tuple[int, ...]
    steps: tuple[int, ...]
    until: int = -1  # the last stage that takes this memory as it is, by another way

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.begin + self.width + sum((n - 1) * step for n, step in zip(self.size, self.steps))


def region(t: Tensor, memory: tuple[int, int], shift: int = 0, until: int = -1) -> Region:
    """Where the tensor lies; `shift` leads from addresses here to those that gave the memory its name."""
    width = t.element_size()
    return Region(memory, t.data_ptr() + shift, width, tuple(t.shape), tuple(step * width for step in t.stride()), until)


def overlaps(regions: Sequence[Region | None]) -> Iterator[tuple[int, int]]:
    """The pairs of positions whose regions have a byte in common."""
    by_memory: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for i, one in enumerate(regions):
        if one is not None:
            by_memory[one.memory].append((one.begin, one.end, i))
    for spans in by_memory.values():
        reaching: list[tuple[int, int]] = []
        for begin, end, i in sorted(spans):
            reaching = [(reach, j) for reach, j in reaching if reach > begin]
            yield from ((j, i) for _, j in reaching if _touch(regions[j], regions[i]))
            reaching.append((end, i))


def _touch(one: Region | None, other: Region | None) -> bool:
    """Whether two regions of one memory have a byte in common; True where that would take long to tell.

    A byte of either is begin + sum(step * index) + byte of the element; equal ones make the two sums differ by the distance of the begins.
    """
    assert one is not None
    assert other is not None
    ranges: dict[int, tuple[int, int]] = {1: (1 - other.width, one.width - 1)}  # by step: of the index of one minus that of the other
    for sign, each in ((1, one), (-1, other)):
        for n, step in zip(each.size, each.steps):
            low, high = ranges.get(step, (0, 0))
            ranges[step] = (low, high + n - 1) if sign > 0 else (low - n + 1, high)
    ranges.pop(0, None)
    return _reaches([(step, *ranges[step]) for step in sorted(ranges, reverse=True)], other.begin - one.begin)


def _reaches(ranges: Sequence[tuple[int, int, int]], distance: int) -> bool:
    """Whether some numbers n between the low and high of each (step, low, high) make sum(step * n) the distance."""
    if not ranges:
        return distance == 0
    (step, low, high), rest = ranges[0], ranges[1:]
    least, most = sum(s * n for s, n, _ in rest), sum(s * n for s, _, n in rest)
    first, last = max(low, -((most - distance) // step)), min(high, (distance - least) // step)
    return last - first >= _TRIES or any(_reaches(rest, distance - step * n) for n in range(first, last + 1))


Shared = tuple[tuple[Tensor, int], ...]  # tensors that a stage is given, each with the last stage that is given it, too


def taken_later(given: Any, later: Sequence[tuple[Any, int]]) -> Shared:
    """The tensors in what a stage is given that later stages are given, too.

    Args:
        later: values that later stages take, each with the last one.
    """
    last: dict[int, int] = {}
    for value, s in later:
        last |= {id(leaf): max(s, last.get(id(leaf), s)) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    return tuple((leaf, last[id(leaf)]) for leaf in pytree.tree_leaves(given) if id(leaf) in last) if last else ()


def copied(value: Any) -> Any:
    """The value with tensors of its own; one that is there twice is one again."""
    return _mapped(value, Tensor.clone)


def moved(value: Any, device: torch.device) -> Any:
    """The value on `device`; a tensor that is there twice is one again."""
    return _mapped(value, lambda t: t.to(device))


def _mapped(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    made: dict[int, Tensor] = {}

    def of(t: Tensor) -> Tensor:
        if id(t) not in made:
            made[id(t)] = make(t)
        return made[id(t)]

    return pytree.tree_map_only(Tensor, of, value)


@dataclass(frozen=True, slots=True)
class _Memory:
    """A storage of this stage as the others know it."""

    name: tuple[int, int]
    shift: int = 0
    until: int = -1


class Writes:
    """What one forward must not write to: it watches that, and tells later stages of it."""

    def __init__(self, stage: int = 0, module: nn.Module | None = None) -> None:
        """`module`: the stage's own, whose parameters and buffers may be given away."""
        self._stage = stage
        self._module = module
        self._seen: list[tuple[Tensor, int, str, str]] = []
        self._memories: dict[int, _Memory] = {}  # by the address of the storage
        self._numbers = itertools.count()

    def enter(self, tensors: Sequence[Tensor], aliases: Iterable[tuple[int, Region]] = (), last: int = -1) -> None:
        """From now on watches those of the tensors that came which others have, too.

        Args:
            aliases: as the message says: by position, where it lies.
            last: the last stage that takes these tensors.
        """
        known, taken = dict(aliases), last > self._stage
        for i, t in enumerate(tensors) if known or taken else ():
            at = known.get(i)
            if at is not None and at.until >= self._stage:
                self._watch(t, _INPUT, _OWNED if at.until == ALWAYS else _SHARED)
            elif taken:
                self._watch(t, _INPUT, _TAKEN)
            if (at is not None or taken) and has_memory(t):
                until = max(at.until if at is not None else -1, last if taken else -1)
                name, shift = ((self._stage, next(self._numbers)), 0) if at is None else (at.memory, at.begin - t.data_ptr())
                self._memories[t.untyped_storage().data_ptr()] = _Memory(name, shift, until)

    def tied(self, weights: Iterable[Tensor]) -> None:
        """From now on watches the stage's weights that other stages hold copies of."""
        for weight in weights:
            self._watch(weight, _WEIGHT, _TIED)

    def check(self) -> None:
        """Looks again.

        Raises:
            PlanError: one was written to.
        """
        for t, version, what, why in self._seen:
            if _version(t) != version:
                raise PlanError(f"{what}{tuple(t.shape)}, which {why}")

    def marked(self, bundles: Mapping[int, Bundle], routes: Sequence[Route], given: Sequence[Sequence[Tensor]]) -> Mapping[int, Bundle]:
        """The bundles, in whose messages it says where tensors lie that others have, too.

        Args:
            given: for each route from this stage, the tensors that go there.
        """
        tensors = [t for own in given for t in own]
        weights = self._weights(tensors)
        if len(tensors) < 2 and not weights and not self._memories:  # the fast path
            return bundles
        found = iter(self._given(tensors, [route[-1] for route, own in zip(routes, given) for _ in own], weights))
        aliases = [tuple((i, at) for i, at in enumerate(itertools.islice(found, len(ts))) if at is not None) for ts in given]
        if not any(aliases):
            return bundles
        of_stage = {s: [own for route, own in zip(routes, aliases) if s in route] for s in bundles}
        return {
            s: replace(bundle, messages=tuple(replace(message, aliases=own) for message, own in zip(bundle.messages, of_stage[s])))
            for s, bundle in bundles.items()
        }

    def _given(self, tensors: Sequence[Tensor], last: Sequence[int], weights: set[int]) -> list[Region | None]:
        """Where each tensor lies that must not be written to up to some later stage; `last`: the last stage that takes it."""
        found = [self._region(t, weights) for t in tensors]
        until = [-1 if at is None else at.until for at in found]
        for i, j in overlaps(found):
            until[i], until[j] = max(until[i], last[j]), max(until[j], last[i])  # [1]
        return [replace(at, until=end) if at is not None and end > self._stage else None for at, end in zip(found, until)]

    def _region(self, t: Tensor, weights: set[int]) -> Region | None:
        if not has_memory(t):
            return None
        storage = t.untyped_storage().data_ptr()
        memory = self._memories.get(storage)
        if memory is None:
            until = ALWAYS if storage in weights else -1  # [2]
            memory = self._memories[storage] = _Memory((self._stage, next(self._numbers)), until=until)
        return region(t, memory.name, memory.shift, memory.until)

    def _weights(self, tensors: Sequence[Tensor]) -> set[int]:
        """The addresses of the module's buffers, and of its parameters where a tensor may look into one."""
        if self._module is None:
            return set()
        found = itertools.chain(self._module.buffers(), self._module.parameters() if any(map(_may_be_weight, tensors)) else ())
        return {t.untyped_storage().data_ptr() for t in found if has_memory(t)}

    def _watch(self, t: Tensor, what: str, why: str) -> None:
        self._seen.append((t, _version(t), what, why))


def _may_be_weight(t: Tensor) -> bool:
    return t.grad_fn is None or t._is_view()


def _version(t: Tensor) -> int:
    """How often it has been written to; torch does not count that for tensors made in inference mode."""
    return 0 if t.is_inference() else t._version
