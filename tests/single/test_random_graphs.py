"""Random models that are no sequence: skips, views and writes into them, shared layers, dropout, BatchNorm, values that nobody uses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from tests.single.steps import same_tensor, sgd

OPERATIONS = ("tanh", "add", "mul", "swap", "cat", "relu_", "write", "drop", "int", "unused", "norm", "same")


class Random(nn.Module):
    """A dozen operations, each on values that any earlier ones made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers, self.norms, self.drop, self.head = nn.ModuleList(), nn.ModuleList(), nn.Dropout(0.2), nn.Linear(8, 3)
        self.program: list[tuple[str, int, int, int]] = []
        for i in range(draw.randint(7, 13)):
            operation, a, b, layer = draw.choice(OPERATIONS), draw.randrange(i + 1), draw.randrange(i + 1), -1
            if i % 3 == 0:
                operation, layer = "linear", len(self.layers)
                if self.layers and draw.random() < 0.2:
                    layer = 0  # once more
                else:
                    self.layers.append(nn.Linear(8, 8).requires_grad_(draw.random() > 0.15))
            elif operation == "norm":
                layer = len(self.norms)
                self.norms.append(nn.BatchNorm1d(8))
            self.program.append((operation, a, b, layer))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for operation, a, b, layer in self.program:
            values.append(self._do(operation, values[a], values[b], layer))
        out: Tensor = self.head(values[-1] + values[len(values) // 2] + values[1])
        return out

    def _do(self, operation: str, p: Tensor, q: Tensor, layer: int) -> Any:
        if operation == "linear":
            return self.layers[layer](p)
        if operation == "norm":
            return self.norms[layer](p)
        if operation == "write":
            h = p * 1.5
            h[:, :3].mul_(2.0)
            return h
        if operation == "unused":
            torch.tanh(q)
            return p + 1
        if operation == "swap":
            first, second = p.chunk(2, 1)
            return torch.cat([second, first], 1)
        simple: dict[str, Any] = {
            "tanh": lambda: torch.tanh(p),
            "add": lambda: p + q,
            "mul": lambda: p * 0.5 * torch.sigmoid(q),
            "cat": lambda: torch.cat([p[:, :4], q[:, 4:]], 1),
            "relu_": lambda: (p + 0).relu_(),
            "drop": lambda: self.drop(p),
            "int": lambda: p * (q > 0).long(),
            "same": lambda: p,
        }
        return simple[operation]()


def train(seed: int, stages: int, schedule: str, micro_batches: int) -> tuple[list[float], dict[str, Any], dict[str, Any], bool]:
    """Losses of three steps and an evaluation, gradients and state, and whether stages share a weight."""
    model = Random(seed).double()
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"strategy": "pipeline"} if stages > 1 else {}
    with pipe.Engine(
        model, sgd(model), nn.MSELoss(), stages=stages, schedule=schedule, micro_batches=micro_batches, seed=3, **options
    ) as engine:
        losses = []
        for rows in (8, 7, 8):
            x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (8, 3))
            losses.append(engine.train_step(x, target=y))
        gradients = engine.gradients()
        losses.append(engine.eval_step(x, target=y))
        return losses, gradients, engine.state_dict(), bool(engine._controller.assembly.ties)


@pytest.mark.parametrize("seed", range(24))
def test_stages_train_as_one(seed: int) -> None:
    stages, schedule, micro_batches = 2 + seed % 3, ("gpipe", "1f1b")[seed % 2], 1 + seed % 3
    losses, gradients, state, _ = train(seed, 1, "gpipe", micro_batches)
    got, got_gradients, got_state, tied = train(seed, stages, schedule, micro_batches)

    def close(one: Any, other: Any) -> bool:
        if not tied or one is None or other is None or not one.is_floating_point():
            return same_tensor(one, other)
        return torch.allclose(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max().clamp_min(1.0)))

    assert got == (pytest.approx(losses, rel=1e-12) if tied else losses)
    assert list(got_state) == list(state)
    assert all(close(got_gradients[name], gradient) for name, gradient in gradients.items())
    assert all(close(got_state[name], value) for name, value in state.items())
