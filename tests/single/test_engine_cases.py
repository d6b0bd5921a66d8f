"""Cases from people's trouble with other tools (their numbers: docs/decisions.md), on stages that are threads of this process.

Two oracles: the whole batch in one process (1e-12), and the same micro-batches in a plain loop (bit for bit).
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from steps import batches, layers, plain, same_tensor, same_weights, sgd, train_beside
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipe
from pipe.action import Action, Op
from pipe.errors import BatchError, PlanError, StageError

SCHEDULES = ["gpipe", "1f1b"]


def close_to(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def whole_batch(model: nn.Module, data: list[tuple[Any, Tensor]], loss_fn: Any = None, lr: float = 0.1) -> tuple[list[float], nn.Module]:
    """The losses and the model of a plain training on whole batches."""
    reference, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(reference.parameters(), lr=lr)
    for x, y in data:
        optimizer.zero_grad()
        loss = (loss_fn or nn.MSELoss())(reference(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference


def equals_whole_batch(engine: pipe.Engine, reference: nn.Module) -> None:
    found = engine.gradients()
    for name, parameter in reference.named_parameters():
        close_to(found[name], parameter.grad)
    for name, value in engine.state_dict().items():
        close_to(value, reference.state_dict()[name])


# --- micro-batches and the loss ---


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_c01_gradients_do_not_depend_on_the_number_of_micro_batches(micro_batches: int) -> None:
    model, data = layers(), batches(8)
    _, reference = whole_batch(model, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipe.Engine(model, optimizer, nn.MSELoss(), stages=2, micro_batches=micro_batches, strategy="pipeline") as engine:
        for x, y in data:
            engine.train_step(x, target=y)
        equals_whole_batch(engine, reference)


def test_c03_c18_uneven_micro_batches_and_the_loss_of_the_step() -> None:
    model, loss_fn = layers(), nn.CrossEntropyLoss()
    data = [(x, y.argmax(1)) for x, y in batches(8)]
    losses, reference = whole_batch(model, data, loss_fn)
    with pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, stages=2, micro_batches=3, strategy="pipeline") as engine:
        got = [engine.train_step(x, target=y) for x, y in data]
        assert all(isinstance(loss, float) for loss in got)
        close_to(torch.tensor(got), torch.tensor(losses))
        equals_whole_batch(engine, reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_c06_fewer_micro_batches_than_stages(micro_batches: int, schedule: str) -> None:
    train_beside(layers(), batches(6), micro_batches=micro_batches, stages=4, schedule=schedule).close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c07_the_last_partial_batch(schedule: str) -> None:
    model = layers()
    x, y = batches(21, 1)[0]
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    _, reference = whole_batch(model, [*loader, *loader])
    with pipe.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), stages=2, micro_batches=4, schedule=schedule, strategy="pipeline"
    ) as engine:
        results = engine.fit(loader, epochs=2, val_loader=loader, progress=False)
        equals_whole_batch(engine, reference)
    assert [result.samples for result in results] == [21, 21]
    close_to(torch.tensor(results[-1].val_loss), nn.functional.mse_loss(reference(x), y).float())


class Attention(nn.Module):
    """Softmax over (batch, heads, S, S) scores plus a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.transpose(1, 2)).unsqueeze(1).expand(-1, 8, -1, -1) + mask
        return self.mix(torch.softmax(scores, -1).mean(1) @ x)


@pytest.mark.parametrize(("shape", "batch_dim"), [((8, 8), {"mask": None}), ((1, 1, 8, 8), 0), ((8, 1, 8, 8), 0)], ids=str)
def test_c09_masks_with_and_without_a_batch_dimension(shape: tuple[int, ...], batch_dim: Any) -> None:
    torch.manual_seed(0)
    blocks = [Attention().double() for _ in range(3)]
    x, mask = torch.randn(8, 8, 16).double(), torch.randn(shape).double()
    want = x
    for block in blocks:
        want = block(want, mask)
    with pipe.Engine(blocks, None, stages=3, micro_batches=4, batch_dim=batch_dim) as engine:
        close_to(engine.predict(x, mask=mask), want.detach())


def test_c09_a_square_that_is_not_marked_is_refused() -> None:
    with pipe.Engine([Attention(), Attention()], None, stages=2, micro_batches=4) as engine:
        with pytest.raises(BatchError, match=r"'mask' is a square \(8, 8\).*batch_dim"):
            engine.predict(torch.randn(8, 8, 16), mask=torch.zeros(8, 8))


class Keep(nn.Module):
    """Passes the first feature through, so that the loss can tell the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.rest(x[:, 1:])], 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c15_outputs_meet_their_own_labels(schedule: str) -> None:
    seen: list[tuple[float, float]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.extend(zip(output[:, 0].tolist(), target.tolist()))
        return output.square().mean()

    index = torch.arange(24.0, dtype=torch.float64)
    x = torch.cat([index[:, None], torch.ones(24, 5).double()], 1)
    loader = DataLoader(TensorDataset(x, index), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(Keep(), Keep(), Keep())
    with pipe.Engine(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn, stages=3, micro_batches=4, schedule=schedule, strategy="pipeline"
    ) as engine:
        for number, (xs, ys) in enumerate(loader):
            (engine.eval_step if number == 2 else engine.train_step)(xs, target=ys)
    assert len(seen) == 24
    assert {a for a, _ in seen} == set(range(24))
    assert all(a == b for a, b in seen)


@pytest.mark.parametrize("stages", [1, 2])
def test_c17_running_statistics_move_once_a_mini_batch(stages: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x, y = batches(32, 1, torch.float32)[0]
    reference = copy.deepcopy(model)
    reference(x)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, micro_batches=4, strategy="pipeline") as engine:
        engine.train_step(x, target=y)
        engine.eval_step(x, target=y)
        engine.predict(x)
        state = engine.state_dict()
    assert state["1.num_batches_tracked"] == 1
    torch.testing.assert_close(state["1.running_mean"], reference[1].running_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(state["1.running_var"], reference[1].running_var, rtol=0, atol=1e-6)


def test_c17_one_row_says_which_stage() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x, y = batches(8, 1)[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[1, 2], micro_batches=8, strategy="pipeline") as engine:
        with pytest.raises(StageError, match=r"more than 1 value per channel.*\[1, 8\]\); .*use fewer micro-batches") as caught:
            engine.train_step(x, target=y)
        assert (caught.value.stage, caught.value.layer) == (1, "1")
        assert ", layer '1'): ValueError" in str(caught.value)
        assert engine.state_dict()["1.num_batches_tracked"] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c20_steps_of_other_shapes_add_to_the_gradients(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.AdaptiveAvgPool2d((1, 8)), nn.Flatten(), nn.Linear(8, 3)).double()
    a, b = torch.randint(20, (4, 7)), torch.randint(20, (4, 9))
    y, z = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    reference = copy.deepcopy(model)
    optimizer = sgd(reference)
    for x, target in ((a, y), (b, z)):
        for xs, ts in zip(x.split(2), target.split(2)):
            (nn.functional.mse_loss(reference(xs), ts) * 0.5).backward()
    optimizer.step()
    with pipe.Engine(
        model, sgd(model), nn.MSELoss(), stages=2, split=[2, 3], micro_batches=2, schedule=schedule, strategy="pipeline"
    ) as engine:
        engine.forward_backward(a, target=y)
        engine.forward_backward(b, target=z)
        engine.optimizer_step()
        same_weights(engine, reference)
        engine.zero_grad()
        assert set(engine.gradients().values()) == {None}


MEET = threading.Barrier(2)


class Meets(nn.Module):
    """Does not return from a forward, but for those that have no counterpart, until the other stage is in one, too."""

    def __init__(self, alone: int) -> None:
        super().__init__()
        self.alone, self.calls = alone, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % 4 != self.alone:
            MEET.wait(60)
        self.calls += 1
        return x


def test_c21_stages_work_at_the_same_time() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Meets(alone=0), nn.Linear(6, 3), Meets(alone=3)).double()
    x, y = batches(8, 1)[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 2], micro_batches=4, strategy="pipeline") as engine:
        engine.train_step(x, target=y)  # would break the barrier if one stage waited for the other's whole batch
        events = {event.action: event for event in engine.trace.events}
    for m in range(3):
        ahead, behind = events[Action(Op.F, m + 1, 0)], events[Action(Op.F, m, 1)]
        assert ahead.worker != behind.worker
        assert max(ahead.start, behind.start) < min(ahead.end, behind.end)


# --- autograd at the boundary ---


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x[..., 0] > 0, torch.arange(5)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        h, mask, position = found
        assert (mask.dtype, position.dtype) == (torch.bool, torch.int64)
        return self.linear(h) * mask[..., None], mask, position


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(5, 8)
        self.linear = nn.Linear(8, 3)

    def forward(self, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        h, mask, position = found
        assert (mask.dtype, position.dtype) == (torch.bool, torch.int64)
        return self.linear((h + self.position(position)).masked_fill(mask[..., None], 0.0).mean(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3])
def test_c22_tuples_with_integers_and_booleans(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Head(), Middle(), Tail()).double()
    data = [(torch.randn(4, 5, 8).double(), torch.randn(4, 3).double()) for _ in range(2)]
    train_beside(model, data, micro_batches=2, stages=stages, split=[1, 2] if stages == 2 else [1, 1, 1], schedule=schedule).close()


class TwoHeads(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6) if own else self.a

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x).tanh()


class First(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0]


@pytest.mark.parametrize("own", [False, True])
def test_c23_an_output_that_no_later_stage_uses(own: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TwoHeads(own), First(), nn.Linear(6, 3)).double()

    def decayed(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3)

    with train_beside(model, batches(8), stages=2, split=[1, 2], optimizer=decayed) as engine:
        assert engine.gradients()["0.a.weight"] is not None
        if own:
            assert engine.gradients()["0.b.weight"] is None
            assert set(engine.optimizer_state_dict()) == {"0.a.weight", "0.a.bias", "2.weight", "2.bias"}


FROZEN = {"a": (0,), "b": (1,), "c": (2,), "d": (0, 1)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_c25_frozen_stages(frozen: str, schedule: str) -> None:
    model = layers()
    cut = [model[0:2], model[2:4], model[4:5]]
    for s in FROZEN[frozen]:
        cut[s].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)

    with train_beside(model, batches(8), stages=3, split=[2, 2, 1], optimizer=adam, schedule=schedule) as engine:
        state, sent = engine.state_dict(), engine.trace.sent_bytes
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], before[name]) is not parameter.requires_grad, name
    boundary = 8 * 8 * 8  # rows, features, bytes: once forward to the next stage, and once backward where gradients are wanted
    relays = {"a": (1, 1, 1), "b": (1, 2, 1), "c": (1, 2, 1), "d": (1, 1, 0)}[frozen]
    assert sent == tuple(n * boundary for n in relays)


class Features(nn.Module):
    """Extracts features under no_grad; its weights do train elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x)


class NeedsNoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not x.requires_grad
        return x * 2


def test_c26_an_activation_that_requires_no_grad() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Features(), NeedsNoGrad(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with train_beside(model, batches(8), stages=3, split=[1, 2, 2]) as engine:
        assert engine.gradients()["0.linear.weight"] is None
        assert engine.trace.sent_bytes[1] == 8 * 8 * 8  # forward only


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c27_a_stage_without_parameters(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    train_beside(model, batches(8), stages=3, split=[1, 2, 1], schedule=schedule).close()


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class ClearsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return x


IN_PLACE: list[Callable[[], nn.Module]] = [lambda: nn.ReLU(inplace=True), AddsInPlace, ClearsInPlace, lambda: nn.Dropout(0.0, inplace=True)]


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize("make", IN_PLACE, ids=["relu", "add", "clear", "dropout"])
@pytest.mark.parametrize("cut", [[1, 2], [2, 1]], ids=str)
def test_c29_writing_in_place_into_what_was_received_or_sent(cut: list[int], make: Callable[[], nn.Module], order: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), make(), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    own, loss_fn = sgd(reference), nn.MSELoss()
    how = {"strategy": "naive"} if order == "naive" else {"strategy": "pipeline", "schedule": order, "micro_batches": 4}
    with pipe.Engine(model, sgd(model), loss_fn, stages=2, split=cut, **how) as engine:
        for x, y in batches(8):
            kept = x.clone()
            assert engine.train_step(x, target=y) == plain(reference, own, x.clone(), y, 1 if order == "naive" else 4, loss_fn)
            same_weights(engine, reference)
            assert torch.equal(x, kept)


@pytest.mark.parametrize("strategy", ["naive", "pipeline"])
def test_c29_the_sender_keeps_what_its_backward_needs(strategy: str) -> None:
    """Tanh saves its output for its backward; in one process the in-place ReLU after it raises, between stages it must not harm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    reference[2].inplace = False
    own, loss_fn = sgd(reference), nn.MSELoss()
    pieces = 1 if strategy == "naive" else 4
    with pipe.Engine(model, sgd(model), loss_fn, stages=2, split=[2, 2], micro_batches=pieces, strategy=strategy) as engine:
        for x, y in batches(8):
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, pieces, loss_fn)
            same_weights(engine, reference)


def test_c29_a_first_layer_that_writes_into_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(AddsInPlace(), nn.Linear(6, 8), nn.Linear(8, 3)).double()
    x, y = batches(8, 1)[0]
    kept = x.clone()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=1, strategy="pipeline") as engine:
        first = engine.predict(x)
        engine.train_step(x, target=y)
    assert torch.equal(x, kept)
    with torch.no_grad():
        torch.manual_seed(0)
        assert torch.equal(first, nn.Sequential(AddsInPlace(), nn.Linear(6, 8), nn.Linear(8, 3)).double()(x.clone()))


class Query(nn.Module):
    """Its output holds a parameter itself, and a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.query = nn.Parameter(torch.randn(1, 8))
        self.table = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.query, self.table[1:3]


class Asks(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        h, query, table = found
        return torch.cat([h @ query.T, h @ table.T], 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c34_a_parameter_as_output(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Query(), Asks()).double()
    train_beside(model, batches(8), stages=2, schedule=schedule).close()


class OnlyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_c34_a_parameter_as_the_only_output() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OnlyParameter(), nn.Linear(6, 3)).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    train_beside(model, batches(8), loss, stages=2).close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c43_runs_are_the_same_bit_for_bit(schedule: str) -> None:
    x, y = batches(16, 1, torch.float32)[0]
    model = layers(torch.float32)
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, split=[2, 3], micro_batches=8, schedule=schedule, strategy="pipeline") as engine:
        engine.forward_backward(x, target=y)
        first = engine.gradients()
        for _ in range(50):
            engine.zero_grad()
            engine.forward_backward(x, target=y)
            again = engine.gradients()
            assert all(same_tensor(again[name], value) for name, value in first.items())


# --- weights, optimizer, schedulers ---


def test_c48_an_optimizer_from_before_the_engine_trains() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batches(8, 1)[0]
    with pipe.Engine(model, optimizer, nn.MSELoss(), stages=2, micro_batches=4) as engine:
        assert engine.optimizer is optimizer
        first = engine.train_step(x, target=y)
        assert engine.train_step(x, target=y) < first
        assert engine.eval_step(x, target=y) < first


def test_c49_the_model_is_trained_after_the_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    names, parameter = list(model.state_dict()), model[0].weight
    data = batches(8)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=4) as engine:
        for x, y in data:
            engine.train_step(x, target=y)
        want = engine.predict(data[0][0])
    assert model[0].weight is parameter
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    again.load_state_dict(torch.load(file, weights_only=False))
    assert list(model.state_dict()) == names
    close_to(again.eval()(data[0][0]).detach(), want)
    assert again[1].num_batches_tracked == 3


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10)


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    factor = 0.7
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)


def on_plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)


@pytest.mark.parametrize("before", [False, True], ids=["after the engine", "before the engine"])
@pytest.mark.parametrize("make", [one_cycle, by_lambda, on_plateau])
def test_c51_schedulers_reach_the_stages(make: Callable[[torch.optim.Optimizer], Any], before: bool) -> None:
    model, data, loss_fn = layers(), batches(8, 10), nn.MSELoss()
    reference = copy.deepcopy(model)
    optimizer, own = sgd(model), sgd(reference)
    wanted = make(own)
    scheduler = make(optimizer) if before else None
    rates = set()
    with pipe.Engine(model, optimizer, loss_fn, stages=2, micro_batches=4, strategy="pipeline") as engine:
        scheduler = scheduler or make(engine.optimizer)
        for x, y in data:
            loss = engine.train_step(x, target=y)
            assert loss == plain(reference, own, x, y, 4, loss_fn)
            arguments = (loss,) if make is on_plateau else ()
            scheduler.step(*arguments)
            wanted.step(*arguments)
            rates.add(optimizer.param_groups[0]["lr"])
        same_weights(engine, reference)
    assert len(rates) > 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c52_one_norm_over_all_stages(norm_type: float, frozen: bool, dtype: torch.dtype) -> None:
    model, (x, y) = layers(dtype), batches(8, 1, dtype)[0]
    if frozen:
        model[2].requires_grad_(False)
    reference = copy.deepcopy(model)
    y = y * 40
    for xs, ys in zip(x.split(2), y.split(2)):
        (nn.functional.mse_loss(reference(xs), ys) * 0.25).backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    assert want > 1
    with pipe.Engine(model, None, nn.MSELoss(), stages=3, split=[2, 2, 1], micro_batches=4, strategy="pipeline") as engine:
        engine.forward_backward(x, target=y)
        assert engine.clip_grad_norm(0.5, norm_type) == want.item()
        same_weights(engine, reference)


class Spoils(nn.Module):
    """Adds nothing; the gradient of its own weight is 0 * inf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sqrt() * 0


def test_c52_a_nan_in_one_stage_is_seen_by_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Spoils(), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    x, y = batches(8, 1)[0]
    with pipe.Engine(model, None, nn.MSELoss(), stages=3, split=[2, 1, 1], micro_batches=4, strategy="pipeline") as engine:
        engine.forward_backward(x, target=y)
        found = engine.gradients()
        assert found["1.weight"].isnan()
        assert not any(found[name].isnan().any() for name in found if name != "1.weight")
        norm = engine.clip_grad_norm(0.5)
        assert norm != norm
        assert all(gradient.isnan().all() for gradient in engine.gradients().values())


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("specs", [False, True])
def test_c54_equal_layers_start_unequal_and_as_in_one_process(specs: bool, stages: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    torch.manual_seed(0)
    model = [pipe.LayerSpec(nn.Linear, 8, 8) if specs else nn.Linear(8, 8) for _ in range(4)]
    with pipe.Engine(model, None, stages=stages) as engine:
        engine.predict(torch.zeros(4, 8))
        state = engine.state_dict()
    assert all(same_tensor(state[name], value) for name, value in reference.state_dict().items())
    assert not any(torch.equal(state[f"{a}.weight"], state[f"{b}.weight"]) for a, b in itertools.combinations(range(4), 2))


# --- model forms ---


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return h, None, (h * 2, h.tanh()), {"flag": True, "scale": 0.5}, [h[:, :3], h[:, 3:]]


class Takes(nn.Module):
    def forward(self, found: Any) -> Any:
        h, nothing, (k, v), options, (t1, t2) = found
        assert nothing is None
        assert options == {"flag": True, "scale": 0.5}
        assert isinstance(found, tuple)
        return (h + k * options["scale"], (v, None)), torch.cat([t2, t1], 1)


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, found: Any) -> Tensor:
        (a, (b, nothing)), c = found
        assert nothing is None
        return self.linear(a + b * c)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c63_any_structure_crosses(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gives(), Takes(), Joins()).double()
    train_beside(model, batches(8), stages=3, schedule=schedule).close()


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("stages", range(1, 5))
def test_c66_every_layer_has_its_stage(count: int, stages: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    if count < stages:
        with pytest.raises(PlanError, match=f"{stages} stages.*{count} layer"):
            pipe.Engine(model, None, stages=stages)
        return
    x = torch.randn(4, 4)
    with pipe.Engine(model, None, stages=stages) as engine:
        found = engine.predict(x)
        assert len(engine.plan.split) == stages
        assert min(engine.plan.split) >= 1
        assert sum(engine.plan.split) == count
        assert list(engine.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(found, model(x).detach())


def test_c71_modes_reach_every_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = batches(8, 1)[0]
    quiet = copy.deepcopy(model).eval()
    losses = [(nn.functional.mse_loss(quiet(xs), ys) * 0.25).item() for xs, ys in zip(x.split(2), y.split(2))]
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, split=[2, 3], micro_batches=4, strategy="pipeline") as engine:
        assert engine.eval() is engine
        assert engine.forward_backward(x, target=y) == sum(losses)
        assert engine.forward_backward(x, target=y) == sum(losses)  # stays
        assert engine.eval_step(x, target=y) == sum(losses)
        close_to(engine.predict(x), quiet(x).detach())
        assert engine.train() is engine
        assert engine.eval_step(x, target=y) == sum(losses)
        random_losses = {engine.forward_backward(x, target=y) for _ in range(3)}
        assert len(random_losses) == 3
        assert sum(losses) not in random_losses


# --- failures and memory ---


class Trips(nn.Module):
    """Raises what the test armed, in the forward of the third micro-batch from then on."""

    armed: list[BaseException | None] = []

    def forward(self, x: Tensor) -> Tensor:
        if Trips.armed:
            error = Trips.armed.pop(0)
            if error is not None:
                raise error  # the line that the traceback shows
        return x


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    Trips.armed = []
    MEET.reset()


class MyErr(Exception):
    def __init__(self, code: int, msg: str) -> None:
        super().__init__(f"{code}: {msg}")


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, BaseException] = {
    "two arguments": MyErr(7, "seven"),
    "a lock": Locked(),
    "no text": Unspeakable(),
    "ctrl-c": KeyboardInterrupt("from forward"),
    "exit": SystemExit(3),
    "stop": StopIteration(),
    "not ascii": ValueError("größer"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ERRORS)
def test_c80_an_exception_says_where_and_leaves_nothing_behind(name: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Trips(), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    own, loss_fn, error = sgd(reference), nn.MSELoss(), ERRORS[name]
    (x, y), (bad, worse), (x3, y3) = batches(8)
    with pipe.Engine(model, sgd(model), loss_fn, stages=2, split=[2, 2], micro_batches=4, schedule=schedule, strategy="pipeline") as engine:
        assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)
        Trips.armed = [None, None, error]
        with pytest.raises(StageError) as caught:
            engine.train_step(bad, target=worse)
        found = caught.value
        assert (found.stage, found.worker, found.micro_batch) == (1, 1, 2)
        assert found.remote_type.endswith(type(error).__qualname__)
        assert "raise error  # the line that the traceback shows" in found.remote_traceback
        assert "F2@1 on worker 1" in str(found)
        assert set(engine.gradients().values()) == {None}
        assert engine.train_step(x3, target=y3) == plain(reference, own, x3, y3, 4, loss_fn)
        same_weights(engine, reference)


def test_c80_the_first_of_two_failures_is_shown() -> None:
    """Stage 0 never raises; it is stopped while it waits, and that is not what the user reads."""
    model = nn.Sequential(nn.Linear(6, 8), Trips(), nn.Linear(8, 3), nn.Tanh()).double()
    x, y = batches(8, 1)[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=4, micro_batches=4, strategy="pipeline") as engine:
        for _ in range(10):
            Trips.armed = [None, MyErr(1, "first")]
            with pytest.raises(StageError, match="1: first") as caught:
                engine.train_step(x, target=y)
            assert caught.value.stage == 1


HELD = threading.Event()


class Hangs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        HELD.wait(60)
        return x


@pytest.mark.parametrize("stage", [0, 1])
def test_c76_a_stage_that_takes_too_long_is_named(stage: int) -> None:
    HELD.clear()
    model = nn.Sequential(nn.Linear(6, 6), Hangs(), nn.Linear(6, 3)).double()
    x, y = batches(8, 1)[0]
    engine = pipe.Engine(
        model, sgd(model), nn.MSELoss(), stages=2, split=[2, 1] if stage == 0 else [1, 2], micro_batches=4, strategy="pipeline", timeout=0.3
    )
    try:
        with pytest.raises(StageError, match=rf"stage {stage} has been in F0@{stage} .*time-out is 0.3 s.*--timeout") as caught:
            engine.train_step(x, target=y)
        assert (caught.value.stage, caught.value.micro_batch, caught.value.remote_type) == (stage, 0, "TimeoutError")
    finally:
        HELD.set()
    engine.train_step(x, target=y)
    engine.close()


class Counts(nn.Module):
    """How many micro-batches' graphs are alive as a forward of this stage begins, itself included."""

    most: dict[int, int] = {}
    alive: dict[int, weakref.WeakSet[Any]] = {}

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Alive.apply(x, self.stage)
        Counts.most[self.stage] = max(Counts.most.get(self.stage, 0), len(Counts.alive[self.stage]))
        return y


class Token:
    pass


class Alive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: int) -> Tensor:
        ctx.token = Token()
        Counts.alive[stage].add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", (2, 1)), ("gpipe", (16, 16))])
def test_c85_activations_are_let_go_as_soon_as_their_backward_ends(schedule: str, most: tuple[int, int]) -> None:
    Counts.most, Counts.alive = {}, {0: weakref.WeakSet(), 1: weakref.WeakSet()}
    model = nn.Sequential(nn.Linear(6, 8), Counts(0), nn.Linear(8, 8), nn.Tanh(), Counts(1), nn.Linear(8, 3)).double()
    x, y = batches(32, 1)[0]
    gc.collect()
    with pipe.Engine(
        model, sgd(model), nn.MSELoss(), stages=2, split=[2, 4], micro_batches=16, schedule=schedule, strategy="pipeline"
    ) as engine:
        loss = engine.train_step(x, target=y)
        assert engine.trace.peak_in_flight == most
        assert (Counts.most[0], Counts.most[1]) == most
        assert isinstance(loss, float)
        workers = engine._controller.assembly.crew._workers  # type: ignore[attr-defined]
        assert [stage.saved for worker in workers for stage in worker._stages.values()] == [0, 0]
        engine.predict(x)
        engine.eval_step(x, target=y)
        assert [stage.saved for worker in workers for stage in worker._stages.values()] == [0, 0]
    assert not Counts.alive[0]
    assert not Counts.alive[1]


def test_c35_nothing_is_kept_without_gradients() -> None:
    Counts.most, Counts.alive = {}, {0: weakref.WeakSet(), 1: weakref.WeakSet()}
    model = nn.Sequential(nn.Linear(6, 8), Counts(0), nn.Linear(8, 8), Counts(1)).double()
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, split=[2, 2], micro_batches=4) as engine:
        for _ in range(10):
            assert not engine.predict(torch.randn(8, 6).double()).requires_grad
        with torch.inference_mode():
            engine.predict(torch.randn(8, 6).double())
        x = torch.randn(8, 6).double()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(PlanError, match="it needs gradients"):
                engine.forward_backward(x, target=torch.zeros(8, 8).double())
        assert set(engine.gradients().values()) == {None}
        engine.forward_backward(x, target=torch.zeros(8, 8).double())
        assert None not in engine.gradients().values()
    assert Counts.most[0] <= 4


def test_c64_labels_inside_the_model() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, h: Tensor, labels: Tensor | None = None) -> Any:
            scores = self.head(h)
            return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores} if labels is not None else scores

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Tanh(), Scores()).double()
    ids, labels = torch.randint(20, (8,)), torch.randint(3, (8,))
    reference = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(reference[2].head(reference[1](reference[0](ids))), labels)
    loss.backward()
    with pipe.Engine(model, sgd(model), stages=2, micro_batches=4, strategy="pipeline") as engine:
        assert engine.forward_backward(ids, labels=labels) == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in reference.named_parameters():
            close_to(engine.gradients()[name], parameter.grad)
        assert engine.predict(ids).shape == (8, 3)
        assert set(engine.predict(ids, labels=labels)) == {"loss", "scores"}


def test_c57_weight_norm_and_spectral_norm_after_a_forward() -> None:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    model = nn.Sequential(first, nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))).double()
    model(torch.randn(2, 6).double()).sum()
    train_beside(model, batches(8), stages=2).close()


def test_c80_random_failures_never_change_what_follows() -> None:
    chance = random.Random(0)
    model = nn.Sequential(nn.Linear(6, 8), Trips(), nn.Tanh(), nn.Linear(8, 3), Trips()).double()
    reference = copy.deepcopy(model)
    own, loss_fn = sgd(reference), nn.MSELoss()
    with pipe.Engine(model, sgd(model), loss_fn, stages=2, split=[2, 3], micro_batches=4, schedule="1f1b", strategy="pipeline") as engine:
        for x, y in batches(8, 20):
            if chance.random() < 0.5:
                Trips.armed = [None] * chance.randrange(8) + [MyErr(0, "now and then")]
                with pytest.raises(StageError, match="now and then"):
                    engine.train_step(x, target=y)
                Trips.armed = []
            else:
                assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)
        same_weights(engine, reference, gradients=False)
