"""What the tests of the engine share: small models, batches, and the plain loop beside an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import pipe
from tests.suites.numbers import plain

__all__ = ["Batches", "batches", "layers", "plain", "same_tensor", "same_weights", "sgd", "train_beside"]

Batches = Iterable[tuple[Tensor, Tensor]]


def layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Five layers, 6 features to 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def batches(rows: int = 8, steps: int = 3, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator, dtype=dtype), torch.randn(rows, 3, generator=generator, dtype=dtype))
        for _ in range(steps)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def same_tensor(got: Tensor | None, want: Tensor | None) -> bool:
    """Both None, or equal bit for bit (a NaN is a NaN) and of one type."""
    if got is None or want is None:
        return got is want
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(torch.nan_to_num(got, 7e7), torch.nan_to_num(want, 7e7))


def same_weights(engine: pipe.Engine, reference: nn.Module, *, gradients: bool = True) -> None:
    """Names, weights, buffers and gradients are the reference's, bit for bit."""
    state, wanted = engine.state_dict(), reference.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert same_tensor(state[name], value), name
    if gradients:
        found = engine.gradients()
        assert list(found) == [name for name, _ in reference.named_parameters()]
        for name, parameter in reference.named_parameters():
            assert same_tensor(found[name], parameter.grad), f"gradient of {name}"


def train_beside(
    model: Any,
    data: Batches,
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    *,
    micro_batches: int = 4,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> pipe.Engine:
    """An engine that has trained on the batches, with every loss, gradient and weight equal to the plain loop's."""
    loss_fn = loss_fn or nn.MSELoss()
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    reference = copy.deepcopy(whole)
    own = optimizer(reference)
    engine = pipe.Engine(model, optimizer(whole), loss_fn, micro_batches=micro_batches, strategy="pipeline", **options)
    for x, y in data:
        want = plain(reference, own, x, y, micro_batches, loss_fn)
        assert engine.train_step(x, target=y) == want
        same_weights(engine, reference)
    return engine
