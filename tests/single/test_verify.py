"""--verify N: the first steps again in one process, compared."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe import options as options_module
from pipe.errors import PipeError
from tests.single.steps import batches, layers, sgd


@pytest.fixture(autouse=True)
def verify(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As under `pipe-launch --verify 3`."""
    merge = options_module.merge
    monkeypatch.setattr("pipe.engine.merge", lambda job, arguments: replace(merge(job, arguments), verify=3))
    caplog.set_level(logging.INFO, "pipe")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("verify: ")]


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_equal_steps_are_reported(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    model = noisy()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=3, split=[1, 2, 2], precision=precision, max_grad_norm=1.0) as engine:
        for x, y in batches(steps=5, dtype=torch.float32):
            engine.train_step(x, target=y)
        assert said(caplog) == ["verify: 3 steps: loss, gradients and weights are equal to one process, bit for bit"]


def test_a_captured_model_is_compared_with_itself_uncut(caplog: pytest.LogCaptureFixture) -> None:
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    model = mobilenet_v3_small(num_classes=3)
    with pipe.Engine(model, sgd(model), nn.CrossEntropyLoss(), stages=3, micro_batches=2) as engine:
        for _ in range(3):
            engine.train_step(torch.randn(4, 3, 32, 32), target=torch.tensor([0, 1, 2, 0]))
    assert said(caplog) == ["verify: 3 steps: loss, gradients and weights are equal to one process, bit for bit"]


def test_every_way_of_training_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    model = noisy()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[3, 2], micro_batches=2) as engine:
        (a, x), (b, y), (c, z) = batches(steps=3, dtype=torch.float32)
        engine.forward_backward(a, target=x)
        engine.predict(a)
        engine.load_state_dict(engine.state_dict())
        engine.forward_backward(b, target=y)
        engine.clip_grad_norm(0.1)
        engine.optimizer_step()
        engine.zero_grad()
        model[0].bias.requires_grad_(False)
        engine.eval()
        engine.forward_backward(c, target=z)
    assert said(caplog) == ["verify: 3 steps: loss, gradients and weights are equal to one process, bit for bit"]


def test_tied_weights_are_equal_but_for_the_order_of_sums(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    model[2].weight = model[0].weight
    with pipe.Engine(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), stages=2, split=[2, 2], micro_batches=3) as engine:
        for x, y in batches(steps=3):
            engine.train_step(x, target=y)
    (line,) = said(caplog)
    assert line.endswith("of one process, relative, since tied weights sum their gradients at the end")


class Drifts(nn.Module):
    """Knows how many threads have called it: what depends on more than its input."""

    calls = 0

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        out: Tensor = self.linear(x) * (1.5 if type(self).calls == self.at else 1.0)
        return out


def test_the_first_difference_is_named_with_its_stage(caplog: pytest.LogCaptureFixture) -> None:
    Drifts.calls = 0
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Drifts(5), nn.Linear(8, 3))
    engine = pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 2], micro_batches=2)
    (a, x), (b, y), _ = batches(steps=3, dtype=torch.float32)
    engine.train_step(a, target=x)  # two calls on the stage, two in one process
    with pytest.raises(PipeError, match=r"verify: step 2: gradient of '0\.weight' on stage 0 differs by \S+ \(relative \S+\)"):
        engine.train_step(b, target=y)
    engine.train_step(a, target=x)  # goes on, if it is caught
    engine.close()


def test_a_short_run_says_how_far_it_came(caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2) as engine:
        x, y = batches(steps=1)[0]
        engine.train_step(x, target=y)
    assert said(caplog) == ["verify: the end came after 1 of 3 steps, which were equal to one process"]
