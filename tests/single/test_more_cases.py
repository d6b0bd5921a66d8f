"""Cases of people's trouble that the other files do not hold: C10, C12, C14, C31, C32, C72."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe.errors import BatchError
from tests.single.steps import sgd, train_beside
from tests.suites.numbers import plain


@dataclass
class Lengths:
    lens: Tensor


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, info: Lengths | None = None) -> Tensor:
        assert info is not None
        out: Tensor = self.linear(x) * (torch.arange(6) < info.lens[:, None])
        return out


def test_c10_an_object_made_for_the_whole_batch_is_named() -> None:
    x, info = torch.randn(8, 6), Lengths(torch.arange(8) % 6)
    model = nn.Sequential(ByLength(), nn.Linear(6, 3))
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, micro_batches=4) as engine:
        with pytest.raises(BatchError, match=r"'info' \(Lengths\) holds tensors, and cannot be cut"):
            engine.predict(x, info=info)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 20, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> Tensor:
        out: Tensor = self.lstm(x, (h0.contiguous(), c0.contiguous()))[0]
        return out


def test_c12_states_have_the_batch_in_dimension_1() -> None:
    torch.manual_seed(0)
    x, h, c, y = torch.randn(6, 5, 10), torch.randn(2, 6, 20), torch.randn(2, 6, 20), torch.randn(6, 5, 4)
    model = nn.Sequential(Recurrent(), nn.Tanh(), nn.Linear(20, 4))
    reference = copy.deepcopy(model)
    with (
        pytest.raises(BatchError, match=r"batch_dim=\{'h0': 1\}"),
        pipe.Engine(model, None, nn.MSELoss(), stages=2, micro_batches=3) as bad,
    ):
        bad.predict(x, h, c)
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, micro_batches=3, batch_dim={"h0": 1, "c0": 1}) as engine:
        engine.forward_backward(x, h, c, target=y)
        for rows in range(0, 6, 2):
            cut = slice(rows, rows + 2)
            value = reference[0](x[cut], h[:, cut], c[:, cut])
            (nn.functional.mse_loss(reference[2](reference[1](value)), y[cut]) * (2 / 6)).backward()
        found = engine.gradients()
        for name, parameter in reference.named_parameters():
            assert torch.equal(found[name], parameter.grad), name  # type: ignore[arg-type]


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(x)) * mask
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_c14_a_mask_reaches_all_four_stages(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Masking() for _ in range(4))).double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    mask = (torch.arange(48).view(8, 6) % 3 > 0).double()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=4, micro_batches=4, schedule=schedule) as engine:
        engine.forward_backward(x, mask=mask, target=y)
        for xs, ms, ys in zip(x.chunk(4), mask.chunk(4), y.chunk(4)):
            value = xs
            for layer in reference:
                value = layer(value, ms)
            (nn.functional.mse_loss(value, ys) * 0.25).backward()
        found = engine.gradients()
        for name, parameter in reference.named_parameters():
            assert torch.equal(found[name], parameter.grad), name  # type: ignore[arg-type]


class Down(nn.Module):
    """Integers or their embedding as a value that skips; the second use is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = self.embedding(ids)
        return self.linear(e), ids, e


class Middle(nn.Module):
    def __init__(self, uses: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(6, 6), uses

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        h, ids, e = value
        return torch.tanh(self.linear(self.uses(h, ids, e))), ids, e


class Up(nn.Module):
    def __init__(self, uses: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(6, 3), uses

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out: Tensor = self.linear(self.uses(*value))
        return out


USES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "used in the last": (lambda h, i, e: h, lambda h, i, e: h, lambda h, i, e: h + e),
    "used in all": (lambda h, i, e: h * e, lambda h, i, e: h + e, lambda h, i, e: h + e * e),
    "only detached": (lambda h, i, e: h, lambda h, i, e: h + e.detach(), lambda h, i, e: h * e.detach()),
    "the integers": (lambda h, i, e: h + i[:, None], lambda h, i, e: h, lambda h, i, e: h * i[:, None]),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", USES)
def test_c31_c32_values_skip_over_stages(name: str, schedule: str) -> None:
    torch.manual_seed(0)
    first, second, last = USES[name]
    model = nn.Sequential(Down(), Middle(first), Middle(second), Up(last)).double()
    data = [(torch.arange(8) % 9, torch.randn(8, 3, dtype=torch.float64)) for _ in range(3)]
    train_beside(model, data, stages=4, schedule=schedule).close()


def test_c72_compiled_stages_with_uneven_micro_batches() -> None:
    torch.manual_seed(0)
    plain_layers = [nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)]
    reference = nn.Sequential(*copy.deepcopy(plain_layers))
    layers: list[Any] = [plain_layers[0], torch.compile(plain_layers[1], backend="aot_eager"), plain_layers[2]]
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    own = sgd(reference)
    optimizer = sgd(nn.Sequential(*plain_layers))
    with pipe.Engine(layers, optimizer, nn.MSELoss(), stages=2, split=[1, 2], micro_batches=3) as engine:
        for _ in range(2):
            want = plain(reference, own, x, y, 3, nn.MSELoss())
            assert engine.train_step(x, target=y) == pytest.approx(want, rel=1e-6)


def test_c39_a_second_backward_is_refused_with_its_remedy() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=2) as engine:
        loss = engine.forward_backward(x, target=y)
        assert isinstance(loss, float)
        assert loss.item() == loss  # type: ignore[attr-defined]
        with pytest.raises(pipe.PipeError, match="keep no graph for a second one: remove the call"):
            loss.backward()  # type: ignore[attr-defined]
        for name in ("retain_graph", "create_graph"):
            with pytest.raises(pipe.PlanError, match=f"{name} was given, and the graph of a step is on its stages"):
                engine.forward_backward(x, target=y, **{name: True})


def test_c39_a_gradient_penalty_inside_the_last_stage() -> None:
    """Derivatives of derivatives work within a stage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        plain_loss = nn.functional.mse_loss(output, target)
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return plain_loss + slope.square().mean()

    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    train_beside(model, [(x, y)], loss_fn, stages=2).close()
