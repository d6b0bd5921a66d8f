"""Random models, cuts, batches: each step is the plain loop's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import pipe
from tests.single.steps import batches, sgd
from tests.suites.random_models import Case, cases, check

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=450, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases())
def test_bit_for_bit(case: Case) -> None:
    check(case)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(ties=True))
def test_with_tied_weights(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("stages", [1, 3])
def test_fifty_repetitions_of_a_step_are_the_same(stages: int) -> None:
    found: list[dict[str, Any]] = []
    (x, y), *_ = batches(dtype=torch.float32)
    for _ in range(50):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        with pipe.Engine(copy.deepcopy(model), None, nn.MSELoss(), stages=stages, micro_batches=4, seed=5, strategy="pipeline") as engine:
            engine.forward_backward(x, target=y)
            found.append(engine.gradients())
    assert all(torch.equal(other[name], value) for other in found[1:] for name, value in found[0].items())


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Fails(nn.Module):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self).fails:
            raise ValueError("as it was told to")
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_memory_is_flat_over_500_steps_also_after_failures(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), Fails(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=3, split=[2, 2, 2], micro_batches=4, schedule=schedule) as engine:
        for step in range(500):
            Fails.fails = step % 10 == 9
            try:
                engine.train_step(x, target=y)
            except pipe.StageError:
                assert Fails.fails
            if step == 50:
                before = resident()
        Fails.fails = False
        with torch.no_grad():
            for _ in range(100):
                engine.predict(x)
        grown = resident() - before
    assert grown < 5 * 2**20, f"{grown / 2**20:.1f} MiB"
