"""Gradients that get their scale at the end of a pass: losses as (sum, count), and float16."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe.errors import PlanError, StageError
from pipe.scaling import LossScale
from tests.single.steps import batches, layers, sgd

IGNORED = -100
CLOSE = 1e-12


def words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 12)).double()


def tokens(kept: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of 10 tokens of which so many count."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(12, (2, len(kept), 10), generator=generator)
    for row, count in zip(y, kept):
        row[count:] = IGNORED
    return x, y


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def whole(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """R1: one process, the whole batch at once."""
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def close(got: Tensor | None, want: Tensor | None) -> bool:
    assert got is not None
    assert want is not None
    return bool(torch.allclose(got, want, rtol=CLOSE, atol=CLOSE * float(want.abs().max())))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_c04_token_means_are_exact(stages: int, micro_batches: int, schedule: str) -> None:
    model = words()
    reference = copy.deepcopy(model)
    own = sgd(reference)
    options: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule, "strategy": "pipeline"}
    with pipe.Engine(model, sgd(model), sum_and_count, **options) as engine:
        for seed, kept in enumerate(([1, 1, 9, 9], [10, 0, 3, 5], [0, 0, 0, 2])):
            x, y = tokens(kept, seed)
            own.zero_grad()
            loss = whole(reference, x, y)
            loss.backward()
            assert engine.eval_step(x, target=y) == pytest.approx(loss.item(), rel=CLOSE)
            assert engine.train_step(x, target=y) == pytest.approx(loss.item(), rel=CLOSE)
            found = engine.gradients()
            assert all(close(found[name], p.grad) for name, p in reference.named_parameters())
            own.step()
        assert all(close(engine.state_dict()[name], value) for name, value in reference.state_dict().items())


def test_passes_accumulate_each_divided_by_its_own_count() -> None:
    model = words()
    reference = copy.deepcopy(model)
    with pipe.Engine(model, sgd(model), sum_and_count, stages=2, micro_batches=2) as engine:
        for seed, kept in enumerate(([1, 1, 9, 9], [10, 0, 3, 5], [4, 4, 4, 4])):
            x, y = tokens(kept, seed)
            whole(reference, x, y).backward()
            engine.forward_backward(x, target=y)
        found = engine.gradients()
        assert all(close(found[name], p.grad) for name, p in reference.named_parameters())
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert engine.clip_grad_norm(0.1) == pytest.approx(float(want), rel=1e-10)


def test_a_count_may_be_a_number_and_sums_need_none() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), output.numel()

    ((x, y),) = batches(steps=1)
    want = nn.functional.mse_loss(layers()(x), y).item()
    with pipe.Engine(layers(), None, loss_fn, stages=2, micro_batches=3) as engine:
        assert engine.forward_backward(x, target=y) == pytest.approx(want, rel=CLOSE)
    with pipe.Engine(layers(), None, loss_fn, stages=2, micro_batches=3, loss_reduction="sum") as engine:
        assert engine.forward_backward(x, target=y) == pytest.approx(want * y.numel(), rel=CLOSE)


class Counted:
    """The sum of the output, over a count of its own."""

    def __init__(self, count: object) -> None:
        self.count = count

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, object]:
        return (output - target).sum(), self.count


def test_counts_that_make_no_mean_are_refused() -> None:
    x, y = tokens([0, 0, 0, 0])
    model = words()
    with pipe.Engine(model, sgd(model), sum_and_count, stages=2, micro_batches=2) as engine:
        before = engine.state_dict()
        with pytest.raises(StageError, match="counts of loss_fn add up to 0"):
            engine.train_step(x, target=y)
        assert all(torch.equal(value, engine.state_dict()[name]) for name, value in before.items())
        engine.train_step(*tokens([1, 2, 3, 4])[:1], target=tokens([1, 2, 3, 4])[1])
    ((x, y),) = batches(steps=1)
    for count in ("many", -1, float("nan"), torch.ones(2)):
        engine = pipe.Engine(layers(), None, Counted(count), stages=2)
        with pytest.raises(StageError, match="the second is how many the sum is over"):
            engine.forward_backward(x, target=y)
        engine.close()
    engine = pipe.Engine(layers(), None, lambda o, t: ((o - t).sum(), 1), stages=2, loss_weight=len)
    with pytest.raises(StageError, match="leave loss_weight out"):
        engine.forward_backward(x, target=y)
    engine.close()


def test_the_scale_follows_torch() -> None:
    own, scaler = LossScale(), torch.amp.GradScaler("cpu", enabled=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4100):
        finite = step not in (3, 4, 2100)
        loss = scaler.scale(model(torch.ones(1, 1)).sum() * (1.0 if finite else float("inf")))
        assert own.value == scaler.get_scale()
        optimizer.zero_grad()
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        own.zeroed()
        own.passed(finite)
        assert own.stepped() is finite
    assert own.value == scaler.get_scale()


class Spike(nn.Module):
    """Its input; now and then, on its stage, the gradient overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor
        assert isinstance(factor, Tensor)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * factor)
        return x


def spiky() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Spike(), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("split", [[6], [1, 5], [2, 2, 2]], ids=str)
def test_fp16_is_that_of_a_grad_scaler(split: list[int], clip: float | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipe")
    data = batches(steps=6, dtype=torch.float32)
    model = spiky()
    reference = copy.deepcopy(model)
    own, scaler = sgd(reference), torch.amp.GradScaler("cpu")
    options: dict[str, Any] = {"stages": len(split), "split": split, "micro_batches": 2, "strategy": "pipeline"}
    with pipe.Engine(model, sgd(model), nn.MSELoss(), precision="fp16", max_grad_norm=clip, **options) as engine:
        for step, (x, y) in enumerate(data):
            factor = torch.tensor(float("inf") if step in (1, 3) else 1.0)
            reference[1].factor.copy_(factor)
            engine.load_state_dict({"1.factor": factor}, strict=False)
            own.zero_grad()
            total = 0.0
            for xs, ys in zip(x.chunk(2), y.chunk(2)):
                with torch.autocast("cpu", torch.float16):
                    part = nn.functional.mse_loss(reference(xs), ys) * 0.5
                scaler.scale(part).backward()
                total += part.item()
            scaler.unscale_(own)
            if clip is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), clip)
            scaler.step(own)
            scaler.update()
            assert engine.train_step(x, target=y) == total
            state = engine.state_dict()
            assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items()), step
            found = engine.gradients()
            if step not in (1, 3):
                assert all(torch.equal(found[name], p.grad) for name, p in reference.named_parameters()), step  # type: ignore[arg-type]
    assert sum("a gradient was not finite" in record.message for record in caplog.records) == 2


def test_an_overflow_in_one_of_several_passes_leaves_the_step_out_until_gradients_are_forgotten() -> None:
    model = spiky()
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), precision="fp16", stages=3, split=[2, 2, 2], micro_batches=2) as engine:
        before = copy.deepcopy(engine.state_dict())
        engine.load_state_dict({"1.factor": torch.tensor(float("inf"))}, strict=False)
        engine.forward_backward(x, target=y)
        engine.load_state_dict({"1.factor": torch.tensor(1.0)}, strict=False)
        engine.forward_backward(x, target=y)
        engine.optimizer_step()
        assert all(torch.equal(value, engine.state_dict()[name]) for name, value in before.items())
        engine.zero_grad()
        engine.forward_backward(x, target=y)
        engine.optimizer_step()
        assert not torch.equal(before["0.weight"], engine.state_dict()["0.weight"])


def test_an_overflow_that_meets_no_step_lowers_the_scale_once(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that looks at the norm and leaves the step out by itself."""
    caplog.set_level(logging.INFO, "pipe")
    model = spiky()
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), precision="fp16", stages=3, split=[2, 2, 2], micro_batches=2) as engine:
        engine.load_state_dict({"1.factor": torch.tensor(float("inf"))}, strict=False)
        for _ in range(2):
            engine.zero_grad()
            engine.forward_backward(x, target=y)
            engine.forward_backward(x, target=y)
            assert not torch.tensor(engine.clip_grad_norm(1.0)).isfinite()
        engine.zero_grad()
        engine.zero_grad()
        assert [record.message for record in caplog.records if "not finite" in record.message] == [
            f"a gradient was not finite: the loss is scaled by {LossScale.START / k:g} from now on" for k in (2, 4)
        ]


def test_passes_that_are_added_up_have_one_form_of_loss() -> None:
    form = {"sums": False}

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        squares = (output - target) ** 2
        return (squares.sum(), squares.numel()) if form["sums"] else squares.mean()

    (x, y), *_ = batches()
    with pipe.Engine(layers(), None, loss_fn, stages=2, micro_batches=2) as engine:

        def again() -> None:  # it is raised with the loss, or by the next call
            engine.forward_backward(x, target=y)
            engine.gradients()

        engine.forward_backward(x, target=y)
        single = engine.gradients()
        form["sums"] = True
        with pytest.raises(StageError, match=r"a loss alone in an earlier pass.*zero_grad\(\) between"):
            again()
        engine.zero_grad()
        for kind in (True, True, False):  # a loss alone adds to sums that were divided
            form["sums"] = kind
            engine.forward_backward(x, target=y)
        for name, gradient in engine.gradients().items():
            assert gradient is not None
            assert torch.allclose(gradient, 3 * single[name], rtol=CLOSE, atol=CLOSE)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(PlanError, match="'fp32', 'bf16' or 'fp16'"):
        pipe.Engine(layers(), None, nn.MSELoss(), precision="fp8")
