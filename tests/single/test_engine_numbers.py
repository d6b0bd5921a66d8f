"""Bit for bit what the plain loop gives, for every cut, number of micro-batches and schedule, on stages that are threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from steps import batches, layers, same_tensor, sgd, train_beside
from torch import Tensor, nn

import pipe
from tests.suites import numbers

CUTS = [[n, m, 5 - n - m] for n, m in itertools.product((1, 2, 3), repeat=2) if n + m < 5]


@pytest.mark.parametrize("case", numbers.CASES, ids=str)
def test_equals_the_plain_loop(case: numbers.Case) -> None:
    numbers.check(case)


@pytest.mark.parametrize("optimizer", numbers.OPTIMIZERS)
def test_equals_the_plain_loop_in_float64(optimizer: str) -> None:
    numbers.check(numbers.Case(3, 4, 7, optimizer, "1f1b"), torch.float64)


@pytest.mark.parametrize("cut", [[1, 4], [2, 3], [3, 2], [4, 1], *CUTS, [1, 1, 1, 1, 1]], ids=str)
def test_every_cut(cut: list[int]) -> None:
    with train_beside(layers(), batches(7), micro_batches=3, stages=len(cut), split=cut) as engine:
        assert engine.plan.split == tuple(cut)


class Turn(nn.Module):
    """Its output is a transposed view, so the next stage gets strides that no contiguous tensor has."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Narrow(nn.Module):
    """Its output is a view with gaps, at an odd address."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1::2]


class Spread(nn.Module):
    """Its output overlaps itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, 8)


def convolutions(channels_last: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3), nn.Flatten()
    )
    return model.to(memory_format=torch.channels_last) if channels_last else model


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("cut", [[1, 5], [2, 4], [4, 2], [2, 2, 2]], ids=str)
def test_images(cut: list[int], channels_last: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, 3, 9, 9, generator=generator), torch.randn(6, 147, generator=generator)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    train_beside(convolutions(channels_last), [(x, y)] * 2, micro_batches=3, stages=len(cut), split=cut).close()


@pytest.mark.parametrize("middle", [Turn(), Narrow(), Spread()], ids=lambda m: type(m).__name__)
def test_strides_of_a_boundary(middle: nn.Module) -> None:
    torch.manual_seed(0)
    width = {"Turn": 5, "Narrow": 8, "Spread": 8}[type(middle).__name__]
    model = nn.Sequential(
        nn.Linear(8, 16 if isinstance(middle, Narrow) else 8), middle, nn.Linear(width, 8), nn.Flatten(), nn.LazyLinear(3)
    )
    x = torch.randn(6, 5, 8) if isinstance(middle, Turn) else torch.randn(6, 8)
    model(x)
    train_beside(model, [(x, torch.randn(6, 3))] * 2, micro_batches=3, stages=2, split=[2, 3]).close()


def test_transformer_layers() -> None:
    torch.manual_seed(0)
    block = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(nn.Embedding(11, 16), *(nn.TransformerEncoderLayer(**block) for _ in range(3)), nn.Linear(16, 11))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    tokens = torch.randint(11, (6, 7))
    train_beside(model, [(tokens, tokens.roll(1, 1))] * 2, loss, micro_batches=3, stages=3, split=[2, 2, 1]).close()


def test_a_recurrent_layer_gives_a_tuple() -> None:
    class Last(nn.Module):
        def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
            return found[0][:, -1] + found[1][-1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(6, 8, batch_first=True), Last(), nn.Linear(8, 3))
    train_beside(model, [(torch.randn(5, 4, 6), torch.randn(5, 3))] * 2, micro_batches=2, stages=2, split=[1, 2]).close()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_schedule_that_is_given(name: str) -> None:
    own = pipe.schedule(name, 2, 3)
    with train_beside(layers(), batches(8), micro_batches=3, stages=2, split=[2, 3], schedule=own) as engine:
        assert engine.plan.schedule == "given"
        assert engine.trace.schedule == own


def test_a_schedule_in_another_order_equals_a_loop_in_that_order() -> None:
    own = pipe.Schedule.parse("F0@0 F1@0 F2@0 B2@0 B0@0 B1@0\nF0@1 F1@1 F2@1 B2@1 B0@1 B1@1")
    assert not own.ascending
    model, (x, y) = layers(), batches(6)[0]
    reference = layers()
    for m in (2, 0, 1):
        (nn.functional.mse_loss(reference(x[2 * m : 2 * m + 2]), y[2 * m : 2 * m + 2]) * (2 / 6)).backward()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 3], schedule=own) as engine:
        engine.forward_backward(x, target=y)
        found = engine.gradients()
    assert all(same_tensor(found[name], p.grad) for name, p in reference.named_parameters())


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()


def trained(stages: int, **options: object) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor | None]]:
    model = noisy()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, micro_batches=4, strategy="pipeline", seed=3, **options) as engine:
        losses = [engine.train_step(x, target=y) for x, y in batches(13)]
        return losses, engine.state_dict(), engine.gradients()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cut", [[4, 4], [2, 6], [3, 2, 3], [2, 1, 3, 2]], ids=str)
def test_dropout_and_batch_norm_do_not_depend_on_the_cut(cut: list[int], schedule: str) -> None:
    losses, state, gradients = trained(len(cut), split=cut, schedule=schedule)
    wanted = trained(1)
    assert losses == wanted[0]
    assert all(same_tensor(state[name], value) for name, value in wanted[1].items())
    assert all(same_tensor(gradients[name], value) for name, value in wanted[2].items())


def test_the_process_generator_is_not_touched() -> None:
    model = noisy()
    before = torch.get_rng_state()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=4) as engine:
        x, y = batches(8)[0]
        engine.train_step(x, target=y)
        engine.predict(x)
    assert torch.equal(torch.get_rng_state(), before)
