"""Values that skip stages: straight to each stage that takes them, and their gradients back as a running sum through these."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe.errors import PlanError, StageError
from tests.single.steps import batches, same_tensor, same_weights, sgd, train_beside

SCHEDULES = ["gpipe", "1f1b"]


class Skipping(nn.Module):
    """`a` is used by every layer that follows, `b` by the one after next; float32, so that the order of a sum shows in its bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d, self.e = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.a(x))
        b = torch.tanh(self.b(a * 0.3))
        c = torch.tanh(self.c(b) + a * 1.7)
        d = torch.tanh(self.d(c * a) + b * 0.9)
        out: Tensor = self.e(d + a * 1.1)
        return out


CUTS = [(2, ["c"]), (3, ["b", "d"]), (4, ["b", "c", "d"]), (5, ["b", "c", "d", "e"])]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "split"), CUTS)
def test_sums_of_gradients_have_the_bits_of_one_process(stages: int, split: list[str], schedule: str) -> None:
    with train_beside(Skipping(), batches(dtype=torch.float32), stages=stages, split=split, schedule=schedule) as engine:
        assert engine.plan.stages == stages


def test_a_value_goes_past_the_stages_that_do_not_use_it() -> None:
    class Far(nn.Module):
        """`a` is wide and used at the end only; between, all is narrow."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            wide = a.repeat(1, 1000)
            out: Tensor = self.d(self.c(self.b(a))) + wide.mean(1, keepdim=True)
            return out

    with train_beside(Far(), batches(dtype=torch.float32), stages=4, split=["b", "c", "d"]) as engine:
        assert (0, 3) in engine.plan.routes
        wide = 8 * 4000 * 4  # bytes of the value
        first, second, third, last = engine.trace.sent_bytes
        assert wide <= first < 1.1 * wide
        assert second < 0.1 * wide
        assert third < 0.1 * wide
        assert wide <= last < 1.1 * wide  # its gradient, straight back


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_branches_side_by_side_need_not_feed_the_next_stage(schedule: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head, self.gate = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            left = torch.tanh(self.left(x))
            right = torch.tanh(self.right(x))
            out: Tensor = self.head(left) * self.gate(right)
            return out

    with train_beside(Branches().double(), batches(), stages=3, split=["right", "head"], schedule=schedule) as engine:
        assert engine.plan.routes == ((0, 2), (1, 2))


class Written(nn.Module):
    """`a` skips a stage in which it is written to in place, by a view, and goes on from there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a + 1)
        a[:, :4].mul_(2)
        c = self.c(b + a)
        out: Tensor = self.d(c * 2 + a)
        return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "split"), [(2, ["b"]), (3, ["b", "c"]), (3, ["c", "d"]), (4, ["b", "c", "d"])])
def test_what_is_written_in_place_goes_on_from_its_last_writer(stages: int, split: list[str], schedule: str) -> None:
    train_beside(Written().double(), batches(), stages=stages, split=split, schedule=schedule).close()


def test_a_write_that_did_not_show_at_capture_is_refused() -> None:
    class Hides(nn.Module):
        """Writes into its input where there are rows enough: not in the example."""

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if len(x) > 1 else x * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.hides, self.c = nn.Linear(6, 3), Hides(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            h = self.hides(a)
            out: Tensor = self.c(h) + a
            return out

    model, (x, y) = Model().double(), batches()[0]
    options: dict[str, Any] = {"stages": 3, "split": ["hides", "c"], "micro_batches": 2, "example": ((x[:1],), {})}
    with pipe.Engine(model, sgd(model), nn.MSELoss(), **options) as engine:
        with pytest.raises(StageError, match=r"which a later stage takes, too, as it was: write into a \.clone\(\)"):
            engine.train_step(x, target=y)


class Views(nn.Module):
    """A view, made on one stage, of what is made on another, and both are used after a write on a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a + 1)
        view = a[:, :4]
        c = self.c(b * 2)
        a.mul_(2)
        out: Tensor = self.d(c + a + torch.cat([view, view], 1))
        return out


@pytest.mark.parametrize(("stages", "split"), [(2, ["b"]), (2, ["d"])])
def test_views_and_their_base_that_are_written_on_the_stage_that_makes_the_view(stages: int, split: list[str]) -> None:
    train_beside(Views().double(), batches(), stages=stages, split=split).close()


@pytest.mark.parametrize(("stages", "split"), [(2, ["c"]), (3, ["b", "c"])])
def test_a_cut_between_a_view_and_a_write_is_refused(stages: int, split: list[str]) -> None:
    model, (x, y) = Views().double(), batches()[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, split=split, strategy="pipeline") as engine:
        with pytest.raises(PlanError, match=r"writes in place into a and getitem, which share memory .*: \.clone\(\) one of them"):
            engine.train_step(x, target=y)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_an_automatic_cut_does_not_go_there(stages: int) -> None:
    class Writes(nn.Module):
        """Nothing but views and writes into them, so that a cut by size alone would fall between."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for i in range(6):
                h = h * 1.5
                view = h[:, i : i + 3]
                view.mul_(0.5)
                h = h + view.sum()
            out: Tensor = self.head(h)
            return out

    train_beside(Writes().double(), batches(), stages=stages).close()


class Dropping(nn.Module):
    """One dropout for all layers, as many models have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x))) + x
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "split"), [(2, ["layers.2"]), (3, ["layers.1", "layers.3"]), (4, ["layers.1", "layers.2", "head"])])
def test_a_dropout_that_several_stages_call_draws_as_in_one(stages: int, split: list[str], schedule: str) -> None:
    found = []
    for count, begins in ((1, "auto"), (stages, split)):
        model = Dropping()
        with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=count, split=begins, micro_batches=3, schedule=schedule, seed=3) as engine:
            losses = [engine.train_step(x, target=y) for x, y in batches(dtype=torch.float32)]
            found.append((losses, engine.gradients(), engine.state_dict()))
    (losses, gradients, state), (got, got_gradients, got_state) = found
    assert got == losses
    assert all(same_tensor(got_gradients[name], want) for name, want in gradients.items())
    assert all(same_tensor(got_state[name], want) for name, want in state.items())


def test_masks_reach_every_stage() -> None:
    """An integer value of the first stage that all others take: it needs no gradient."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 0).long()
            for layer in self.layers:
                x = torch.tanh(layer(x)) * mask
            out: Tensor = self.head(x)
            return out

    with train_beside(Masked().double(), batches(), stages=4, split=["layers.1", "layers.2", "layers.3"]) as engine:
        assert (0, 1, 2, 3) in engine.plan.routes
        model = copy.deepcopy(engine.state_dict())
        assert set(model) == set(Masked().state_dict())


def test_evaluation_takes_the_same_routes() -> None:
    model = Skipping().double()
    reference = copy.deepcopy(model).eval()
    (x, y), *_ = batches()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=4, split=["b", "c", "d"], micro_batches=1, strategy="pipeline") as engine:
        with torch.no_grad():
            assert torch.equal(engine.predict(x), reference(x))
            assert engine.eval_step(x, target=y) == float(nn.MSELoss()(reference(x), y))
        same_weights(engine, reference, gradients=False)
