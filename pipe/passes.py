"""A pass over a mini-batch, as the controller is asked for it and as it waits for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipe.micro_batch import Batch
from pipe.stage import Part
from pipe.update import Update


@dataclass(frozen=True)
class Pass:
    """What was asked for."""

    kind: str  # "train", "eval" or "predict"
    args: tuple[Any, ...]
    target: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    zero: bool = False  # the gradients first
    update: Update | None = None  # the optimizer's step at the end

    @property
    def trains(self) -> bool:
        """Whether gradients are made."""
        return self.kind == "train"


@dataclass
class Pending:
    """A training pass whose loss is known and whose backward may still run."""

    ticket: int
    batch: Batch
    step: int
    updates: bool  # the optimizer steps at the end
    loss: float = math.nan


def total_loss(losses: Mapping[int, Mapping[int, Part]]) -> tuple[float, bool]:
    """The loss of the mini-batch, and whether there is one, from what each worker tells of its micro-batches.

    It is the sum in micro-batch order of each one's part, divided by the counts where they were told; these may add up to 0.
    """
    parts = {m: part for each in losses.values() for m, part in each.items()}
    total = sum((parts[m][0] for m in sorted(parts)), 0.0)
    counts = [count for _, count in parts.values() if count is not None]
    if not counts:
        return total, True
    return (total / sum(counts), True) if sum(counts) else (math.nan, False)
