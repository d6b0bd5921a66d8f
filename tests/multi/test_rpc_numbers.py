"""Right numbers over RPC, bit for bit; the cases are those of the local transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.conftest import Launch

ROOT = str(Path(__file__).parents[2])
ENV = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_case_over_rpc(launch: Launch, stages: int) -> None:
    script = f"""
    from tests.suites.numbers import CASES, check

    cases = [case for case in CASES if case.stages == {stages}]
    for case in cases:
        check(case)
    print(len(cases), "cases are equal")
    """
    ended = launch("--stages", str(stages), "--strategy", "pipeline", script=script, env=ENV)
    assert (ended.code, ended.out) == (0, "32 cases are equal\n"), ended.err


SUMS = """
import copy
import torch
from torch import nn
import pipe

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
reference = copy.deepcopy(model)
optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))
with pipe.Engine(model, optimizer, nn.MSELoss(), max_grad_norm=0.5) as engine:
    plan = None
    for rows in (8, 7, 5, 4):
        x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
        loss = engine.train_step(x, target=y)
        pieces = min(rows, engine.plan.micro_batches * engine.plan.replicas)
        own.zero_grad()
        total = 0.0
        moments = []
        for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces)):
            part = nn.functional.mse_loss(reference(xs), ys) * (len(xs) / rows)
            part.backward()
            total += part.item()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        own.step()
        assert abs(loss - total) <= 1e-12 * abs(total), (loss, total)
        state = engine.state_dict()
        for name, value in reference.named_parameters():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-14), (rows, name)
        assert state["1.num_batches_tracked"] == (8, 7, 5, 4).index(rows) + 1
    print(engine.plan.strategy, engine.plan.replicas, "equal")
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--strategy", "ddp", "--replicas", "2"), "ddp 2 equal\n"),
        (("--stages", "2", "--replicas", "2", "--micro-batches", "1"), "hybrid 2 equal\n"),
    ],
)
def test_replicas_sum_weighted_gradients(launch: Launch, options: tuple[str, ...], says: str) -> None:
    ended = launch(*options, script=SUMS, env=ENV)
    assert (ended.code, ended.out) == (0, says), ended.err


def test_ddp_keeps_none_reduces_once_and_accumulates(launch: Launch) -> None:
    script = """
    import torch, pipe
    import torch.distributed as dist
    from torch import nn

    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Net().double()
    with pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), micro_batches=2) as engine:
        assert engine.plan.strategy == "ddp" and "2 workers became 2 replicas" in engine.plan.reason, engine.plan
        a, b, y = torch.randn(8, 4).double(), torch.randn(5, 4).double(), torch.randn(8, 1).double()
        engine.train_step(a, target=y)
        engine.trace  # the step has ended
        assert len(calls) == 1, calls
        engine.zero_grad()
        state = engine.state_dict()
        engine.forward_backward(a, target=y)
        first = engine.gradients()
        engine.forward_backward(b, target=y[:5])
        both = engine.gradients()
        model.load_state_dict(state)
        nn.functional.mse_loss(model(a), y).backward()
        assert torch.allclose(first["used.weight"], model.used.weight.grad, rtol=1e-12)
        nn.functional.mse_loss(model(b), y[:5]).backward()
        assert torch.allclose(both["used.weight"], model.used.weight.grad, rtol=1e-12)
        assert both["unused.weight"] is None
    print("ok")
    """
    ended = launch("--stages", "2", script=script, env=ENV)
    assert (ended.code, ended.out) == (0, "ok\n"), ended.err
