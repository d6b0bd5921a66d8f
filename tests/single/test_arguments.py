"""What a user gets wrong, said at the door: before a worker is made, or before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipe
from pipe.errors import BatchError, PlanError

X, Y = torch.randn(8, 4), torch.randn(8, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss.*loss_fn=MSELoss\(\)"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse'"),
        ({"loss_fn": nn.MSELoss(reduction="sum")}, "loss_reduction is 'mean'.*pass loss_reduction='sum'"),
        ({"loss_weight": 3}, "loss_weight is 3"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": -1}, "timeout is -1"),
        ({"example": X}, "example is a Tensor"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"loss_reduction": "none"}, "loss_reduction is 'none'"),
        ({"recompute": "always"}, "recompute='always' is not in this version"),
        ({"logdir": "/proc/nothing"}, "logdir '/proc/nothing' cannot be written to"),
        ({"split": {1}, "stages": 2}, "neither"),
    ],
)
def test_constructor(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        pipe.Engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), None, **options)


def test_sum_is_a_sum_if_both_say_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pipe.Engine(model, None, nn.MSELoss(reduction="sum"), loss_reduction="sum", stages=2, micro_batches=4) as engine:
        assert engine.eval_step(X, target=Y) == pytest.approx(nn.functional.mse_loss(model(X), Y, reduction="sum").item(), rel=1e-5)


def test_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pipe.Engine(model, None, nn.MSELoss(), stages=2) as engine:
        with pytest.raises(PlanError, match=r"2 positional arguments for a forward that takes 1 \(input\); the target goes by name"):
            engine.forward_backward(X, Y)
        with pytest.raises(BatchError, match="target is None"):
            engine.forward_backward(X)
        assert engine.forward_backward(X, target=Y) > 0
    with pipe.Engine(model, None, stages=2) as engine, pytest.raises(PlanError, match="target was given and loss_fn is None"):
        engine.forward_backward(X, target=Y)
