"""How an engine cuts batches and weights losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipe.errors import BatchError
from pipe.micro_batch import Batch, BatchDim


@dataclass(frozen=True)
class Settings:
    """How batches are cut and losses weighted, and what keys the random streams."""

    batch_dim: BatchDim = 0
    mean: bool = True  # else losses are summed
    loss_weight: Callable[[Any], float] | None = None
    precision: str = "fp32"
    seed: int = 0
    auto: bool = True  # the strategy may change with the batch
    target_is_argument: bool = False  # of forward, since the model makes its loss
    needs_target: bool = False  # the loss cannot do without
    least_rows: int = 1  # of a micro-batch, where their number was not asked for

    @property
    def reduction(self) -> str:
        """How micro-batches' losses make that of the mini-batch, as a stage is told."""
        return "sum" if not self.mean else "mean" if self.loss_weight is None else "weight"

    def shares(self, batch: Batch) -> list[float]:
        """Each micro-batch's share of the loss: n_m / n by rows, or by `loss_weight`; 1 where losses are summed."""
        if not self.mean:
            return [1.0] * len(batch.pieces)
        if self.loss_weight is None:
            return [n / batch.size for n in batch.sizes] if batch.size else [1.0]
        found = [self.loss_weight(piece.target) for piece in batch.pieces]
        try:
            weights = [float(weight) for weight in found]
        except (TypeError, ValueError):
            raise BatchError(f"loss_weight gave {found}; it gives a number for a target: count what the loss is a mean over") from None
        total = sum(weights)
        if not total > 0 or min(weights) < 0:
            raise BatchError(
                f"loss_weight gave {weights}; weights are not negative and not all 0: count what the loss is a mean over, say valid tokens"
            )
        return [weight / total for weight in weights]
