"""Right numbers, bit for bit: the engine against the plain loop over contiguous micro-batches, in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pipe

STEPS = 3


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Five layers with in-place activations, as first operation of a stage for some cuts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}


@dataclass(frozen=True)
class Case:
    stages: int
    micro_batches: int
    rows: int
    optimizer: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.stages}x{self.micro_batches}-{self.rows}-{self.optimizer}-{self.schedule}"


CASES = [
    Case(s, m, rows, optimizer, schedule)
    for s, m, rows, optimizer, schedule in itertools.product((1, 2, 3, 4), (1, 2, 3, 8), (8, 7), ("sgd", "adamw"), ("gpipe", "1f1b"))
]


def batches(rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 16, generator=generator, dtype=dtype), torch.randn(rows, 4, generator=generator, dtype=dtype))
        for _ in range(STEPS)
    ]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, micro_batches: int, loss_fn: nn.Module) -> float:
    """One step of the loop that everybody writes: gradients accumulated over micro-batches, each loss weighted by its rows."""
    optimizer.zero_grad()
    total = 0.0
    pieces = min(micro_batches, len(x))
    for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces)):
        loss = loss_fn(model(xs.contiguous()), ys.contiguous()) * (len(xs) / len(x))
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Loss, every gradient and every weight of three steps are equal, bit for bit; so are the weights in the model after close."""
    model, loss_fn = mlp(dtype), nn.MSELoss()
    reference = copy.deepcopy(model)
    optimizer, own = OPTIMIZERS[case.optimizer](model.parameters()), OPTIMIZERS[case.optimizer](reference.parameters())
    with pipe.Engine(
        model, optimizer, loss_fn, stages=case.stages, micro_batches=case.micro_batches, schedule=case.schedule, strategy="pipeline"
    ) as engine:
        for x, y in batches(case.rows, dtype):
            want, got = plain(reference, own, x, y, case.micro_batches, loss_fn), engine.train_step(x, target=y)
            assert got == want, (case, got, want)
            gradients = engine.gradients()
            for name, parameter in reference.named_parameters():
                assert torch.equal(gradients[name], parameter.grad), (case, name)
        state = engine.state_dict()
        assert list(state) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value), (case, name)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), (case, name)
