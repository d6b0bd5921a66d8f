"""Over RPC: tied weights, losses as (sum, count), float16, and --verify; alone and with replicas."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Launch
from tests.multi.test_rpc_numbers import ENV

TIED = """
import copy
import torch
from torch import nn
import pipe

IGNORED = -100

def loss_fn(output, target):
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()

def close(got, want):
    return torch.allclose(got, want, rtol=1e-12, atol=1e-12 * float(want.abs().max()))

torch.manual_seed(0)
embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
head.weight = embedding.weight
model = nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), head).double()
head.weight = embedding.weight
reference = copy.deepcopy(model)
optimizer, own = (torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, reference))
with pipe.Engine(model, optimizer, loss_fn, max_grad_norm=0.05, micro_batches=2) as engine:
    for kept in ([1, 1, 9, 9, 3], [10, 0, 3, 5, 2], [4, 4, 4, 4, 4]):
        x, y = torch.randint(12, (2, 5, 10))
        for row, count in zip(y, kept):
            row[count:] = IGNORED
        own.zero_grad()
        loss = nn.functional.cross_entropy(reference(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        own.step()
        assert abs(engine.train_step(x, target=y) - loss.item()) < 1e-12
        state, gradients = engine.state_dict(), engine.gradients()
        assert torch.equal(state["0.weight"], state["4.weight"])
        assert all(close(state[name], value) for name, value in reference.state_dict().items())
        assert all(close(gradients[name], p.grad) for name, p in reference.named_parameters())
    assert set(engine.optimizer_state_dict()) == {name for name, _ in reference.named_parameters()}
    print(engine.plan.strategy, "equal")
assert model[0].weight is model[4].weight
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--stages", "3"), "pipeline equal\n"), (("--stages", "2", "--replicas", "2"), "hybrid equal\n")],
)
def test_tied_weights_and_token_means(launch: Launch, options: tuple[str, ...], says: str) -> None:
    ended = launch(*options, script=TIED, env=ENV)
    assert (ended.code, ended.out) == (0, says), ended.err


VERIFIED = """
import sys
import torch
from torch import nn
import pipe

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with pipe.Engine(model, optimizer, nn.MSELoss(), precision=sys.argv[1], schedule=sys.argv[2]) as engine:
    for rows in (8, 7, 5):
        engine.train_step(torch.randn(rows, 6), target=torch.randn(rows, 3))
"""


@pytest.mark.parametrize("arguments", [("fp16", "gpipe"), ("bf16", "1f1b")])
def test_verify_over_rpc(launch: Launch, arguments: tuple[str, str]) -> None:
    ended = launch("--stages", "3", "--verify", "3", script=VERIFIED, arguments=arguments, env=ENV)
    assert ended.code == 0, ended.err
    assert "verify: 3 steps: loss, gradients and weights are equal to one process, bit for bit" in ended.err


DIFFERS = """
import os

class Differs(nn.Module):
    def forward(self, x):
        return x * (2.0 if os.environ["RANK"] == "1" else 1.0)

torch.manual_seed(0)
"""


def test_a_step_that_differs_ends_the_script(launch: Launch) -> None:
    script = VERIFIED.replace("nn.Tanh()", "Differs()").replace("torch.manual_seed(0)", DIFFERS)
    ended = launch("--stages", "2", "--verify", "1", script=script, arguments=("fp32", "gpipe"), env=ENV)
    assert ended.code == 1
    assert "verify: step 1: gradient of '0.weight' on stage 0 differs by" in ended.err
