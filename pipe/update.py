"""The end of a step: all workers agree, then all step, or none does.

    worker w --vote (done)--> worker 0 --verdict--> every worker        and once more where gradients are clipped, with norms

In the usual schedules worker 0 ends its backward last, so its verdict waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipe.errors import PlanError
from pipe.optimizer import Groups, norms, scale_gradients, total_norm
from pipe.plan import Plan
from pipe.transport.protocol import Transport

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Update:
    """What the optimizer's step needs from the controller: the front's groups, and the norm to clip to, if any."""

    groups: Groups
    max_norm: float | None = None


@dataclass(frozen=True)
class Vote:
    """What a worker says when it has done its part of a pass: what the sums of its losses are to be divided by, where the loss function
    tells that, and whether its gradients are finite, where that is asked."""

    count: float | None = None
    finite: bool = True


def judge(votes: list[Vote]) -> Vote:
    """All workers' votes in one.

    Raises:
        PlanError: the counts add up to nothing.
    """
    counts = [vote.count for vote in votes if vote.count is not None]
    if counts and not sum(counts) > 0:
        raise PlanError(
            f"the counts of loss_fn add up to {sum(counts):g} over the mini-batch; the loss is the sum divided by them: leave out batches "
            "in which nothing counts"
        )
    return Vote(sum(counts) if counts else None, all(vote.finite for vote in votes))


def agree(transport: Transport, index: int, workers: int, vote: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """The verdict that worker 0 makes of every worker's vote, the same on all workers.

    Raises:
        Aborted: a worker failed before it voted.
    """
    if workers == 1:
        return decide([vote])
    if index:
        transport.send(0, ("vote", index), vote)
        return transport.recv(("verdict", index))
    verdict = decide([vote] + [transport.recv(("vote", w)) for w in range(1, workers)])
    for w in range(1, workers):
        transport.send(w, ("verdict", w), verdict)
    return verdict


def clip(
    transport: Transport, index: int, plan: Plan, parameters: Parameters, names: Sequence[str], max_norm: float, norm_type: float
) -> float:
    """Scales all gradients so that their norm over all stages is at most `max_norm`; gives the norm before.

    Replicas hold equal gradients by now, so the first one's norms count. A NaN anywhere is in the total, and so seen by all.
    """
    if not max_norm >= 0 or math.isnan(norm_type):
        raise PlanError(f"max_norm is {max_norm} and norm_type {norm_type}; both are numbers, max_norm at least 0: use say 1.0 and 2.0")
    own = norms(parameters, norm_type) if index < plan.stages else {}

    def total(votes: list[dict[str, Tensor]]) -> Tensor:
        return total_norm({name: norm for vote in votes for name, norm in vote.items()}, names, norm_type)

    norm = agree(transport, index, plan.workers, own, total)
    scale_gradients(parameters, norm, max_norm)
    return float(norm)


def step(
    transport: Transport,
    index: int,
    plan: Plan,
    parameters: Parameters,
    names: Sequence[str],
    update: Update,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """The optimizer's step on this worker, after all have agreed; gradients are clipped first if the update says so."""
    if update.max_norm is not None:
        clip(transport, index, plan, parameters, names, update.max_norm, 2.0)
    if optimizer is not None:
        optimizer.step()
