"""Calls in any order: an engine of three stages gives at each what the engine of one stage gives, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

import pipe
from tests.single.steps import same_tensor

ROWS = st.integers(4, 9)
STEPS = 8


def model() -> nn.Sequential:
    """What depends on the mode (dropout, BatchNorm), on what came before (running statistics) and on neither."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()


class Modes(RuleBasedStateMachine):
    """Each call goes to both engines; what they give is compared at once, what they hold after each call."""

    @initialize(schedule=st.sampled_from(["gpipe", "1f1b"]), split=st.sampled_from([[2, 3, 3], [1, 6, 1], [4, 2, 2]]))
    def make(self, schedule: str, split: list[int]) -> None:
        self.engines, self.kept = [], None
        self.stepped = False
        for stages in (1, 3):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            options: dict[str, Any] = {"stages": stages, "micro_batches": 2, "schedule": schedule, "seed": 5, "strategy": "pipeline"}
            self.engines.append(pipe.Engine(net, optimizer, nn.MSELoss(), split=split if stages > 1 else "auto", **options))

    def both(self, name: str, *args: Any, **kwargs: Any) -> None:
        one, three = (getattr(engine, name)(*args, **kwargs) for engine in self.engines)
        if isinstance(one, Tensor):
            assert same_tensor(three, one)
        elif isinstance(one, float):
            assert three == one

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)

    @rule(rows=ROWS)
    def train_step(self, rows: int) -> None:
        x, y = self.batch(rows)
        self.both("train_step", x, target=y)

    @rule(rows=ROWS)
    def forward_backward(self, rows: int) -> None:
        x, y = self.batch(rows)
        self.both("forward_backward", x, target=y)

    @rule(rows=ROWS)
    def predict(self, rows: int) -> None:
        self.both("predict", self.batch(rows)[0])

    @rule(rows=ROWS)
    def eval_step(self, rows: int) -> None:
        x, y = self.batch(rows)
        self.both("eval_step", x, target=y)

    @rule()
    def train(self) -> None:
        self.both("train")

    @rule()
    def eval(self) -> None:
        self.both("eval")

    @rule()
    def zero_grad(self) -> None:
        self.both("zero_grad")

    @rule(rows=ROWS)
    def step(self, rows: int) -> None:
        x, y = self.batch(rows)
        self.both("forward_backward", x, target=y)
        self.both("clip_grad_norm", 0.5)
        self.both("optimizer_step")

    @rule()
    def keep(self) -> None:
        self.kept = copy.deepcopy(self.engines[0].state_dict())

    @precondition(lambda self: self.kept is not None)
    @rule()
    def load(self) -> None:
        self.both("load_state_dict", self.kept)

    @rule()
    def sync_model(self) -> None:
        self.both("sync_model")

    @rule(rows=ROWS)
    def a_step_that_fails(self, rows: int) -> None:
        """The target has too few features, which the loss notices on the last stage; gradients are dropped, weights stay."""
        x, y = self.batch(rows)
        for engine in self.engines:
            try:
                engine.train_step(x, target=y[:, :2])
                engine.state_dict()
            except pipe.StageError:
                continue
            raise AssertionError("a loss of unequal shapes was not refused")

    @invariant()
    def hold_the_same(self) -> None:
        if not getattr(self, "engines", None):
            return
        states, gradients = [engine.state_dict() for engine in self.engines], [engine.gradients() for engine in self.engines]
        assert list(states[0]) == list(states[1])
        assert all(same_tensor(states[1][name], value) for name, value in states[0].items())
        assert all(same_tensor(gradients[1][name], value) for name, value in gradients[0].items())

    def teardown(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.close()


TestModes = Modes.TestCase
TestModes.settings = settings(max_examples=25, stateful_step_count=STEPS, deadline=None)
