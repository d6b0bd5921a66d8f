"""Replicas: the same stages on several workers, whose gradients are summed once a step.

Every gradient is already weighted by its micro-batches' share of the whole mini-batch, so the sum is the gradient of the mini-batch,
also where replicas got different numbers of rows. torch's DistributedDataParallel averages instead, and fills None with zeros
(docs/decisions.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipe.batch_norm import PooledStatistics
from pipe.plan import Plan

Parameters = Mapping[str, nn.Parameter]


class Replicas:
    """The workers that hold the same stages as this one; alone, it does nothing."""

    def __init__(self, plan: Plan, index: int, device: torch.device) -> None:
        """With replicas: collective over all workers of the job, in the same order on each."""
        self._alone = plan.replicas == 1
        self._pending = False  # gradients of this worker are not yet summed
        self._summed = False  # gradients are sums over replicas already
        if self._alone:
            return
        width = plan.workers // plan.replicas
        self._first = index < width
        if not dist.is_initialized():
            shared = len(set(plan.places)) < len(plan.places)
            dist.init_process_group("gloo" if device.type == "cpu" or shared else "cpu:gloo,cuda:nccl", init_method="env://")
        groups = [dist.new_group(list(range(position, plan.workers, width))) for position in range(width)]
        self._group: Any = groups[index % width]

    def begin(self, parameters: Parameters, kind: str) -> None:
        """Before a pass. Sums of an earlier pass stay on the first replica only, so that the next sum counts them once."""
        if self._alone or kind != "train":
            return
        if self._summed and not self._first:
            for parameter in parameters.values():
                parameter.grad = None
        self._pending, self._summed = True, False

    def forget(self) -> None:
        """The gradients are gone."""
        self._pending = self._summed = False

    def reduce(self, parameters: Parameters) -> None:
        """Sums the gradients over the replicas, once: one all-reduce a data type. None everywhere stays None."""
        if self._alone or not self._pending:
            return
        by_type: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters.values():
            by_type[parameter.dtype].append(parameter)
        for same in by_type.values():
            self._reduce(same)
        self._pending, self._summed = False, True

    def sum_moments(self, statistics: PooledStatistics) -> dict[str, Tensor] | None:
        """BatchNorm's sums over all replicas, in one all-reduce; None where the worker's own are all."""
        moments = {} if self._alone else statistics.moments()
        if not moments:
            return None
        flat = torch.cat([value.reshape(-1) for value in moments.values()])
        dist.all_reduce(flat, group=self._group)
        sizes = [value.numel() for value in moments.values()]
        return {name: part.view_as(value) for (name, value), part in zip(moments.items(), torch.split(flat, sizes))}

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
        present = [float(p.grad is not None) for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in dense] + [dense[0].new_tensor(present)])
        dist.all_reduce(flat, group=self._group)
        *sums, found = torch.split(flat, [g.numel() for g in dense] + [len(present)])
        for parameter, total, anywhere in zip(parameters, sums, found.tolist()):
            if anywhere:
                sparse = parameter.grad is not None and parameter.grad.is_sparse
                gradient = total.view(parameter.shape)
                parameter.grad = gradient.to_sparse(1) if sparse else gradient.clone()
