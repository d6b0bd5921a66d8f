"""Tensors over the same memory that cross a boundary together: each arrives with memory of its own.

That is the same as in one process as long as nobody writes into one of them; a stage that does is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipe.errors import PlanError


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of tensors whose memory, from first to last element, reaches into another's."""
    if len(tensors) < 2:
        return ()
    spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, t in enumerate(tensors):
        if t.layout is torch.strided and t.numel():
            elements = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
            spans[t.untyped_storage().data_ptr()].append((t.data_ptr(), t.data_ptr() + t.element_size() * elements, i))
    found: set[int] = set()
    for same in spans.values():
        same.sort()
        reach, last = 0, -1
        for begin, end, i in same:
            if begin < reach:
                found |= {last, i}
            if end > reach:
                reach, last = end, i
    return tuple(sorted(found))


SHARED = (
    "shares memory with another input where both come from, so in one process both would change: return a .clone() there, or keep both in "
    "one stage with split="
)
TAKEN = "a later stage takes, too, as it was: write into a .clone() of it, or keep both in one stage with split="


class Writes:
    """Watches tensors for writes."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int, str]] = []

    def watch(self, tensors: Iterable[Tensor], why: str) -> None:
        """From now on; `why` says what would be lost with a write."""
        self._seen += [(t, t._version, why) for t in tensors]

    def check(self) -> None:
        """Looks again.

        Raises:
            PlanError: one was written to.
        """
        for t, version, why in self._seen:
            if t._version != version:
                raise PlanError(f"this stage writes in place into its input of shape {tuple(t.shape)}, which {why}")
