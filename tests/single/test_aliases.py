"""Views of one memory that cross a boundary together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe.aliases import overlapping
from tests.single.steps import batches, sgd, train_beside

X = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ([X], ()),
        ([X, X.clone()], ()),
        ([X, X.view(-1)], (0, 1)),
        ([X.clone(), X, X[1]], (1, 2)),
        ([X[:2], X[2:]], ()),
        ([X[2:], X[:2], X[1:3]], (0, 1, 2)),
        ([X[:1], X[3:], X, X[1:2]], (0, 1, 2, 3)),
        ([X[:0], X], ()),
        ([X.to_sparse(), X.to_sparse()], ()),
        ([X, X.detach().expand(2, 4, 6)], (0, 1)),
    ],
)
def test_overlapping(tensors: list[Tensor], found: tuple[int, ...]) -> None:
    assert overlapping(tensors) == found


class Views(nn.Module):
    def __init__(self, make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.make = make

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.make(self.linear(x))


class Adds(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.writes = writes

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        a = a.mul_(2.0) if self.writes else a * 2.0
        out: Tensor = self.linear(a.reshape(-1, 8)) + self.linear(b.reshape(-1, 8))
        return out


def model(make: Callable[[Tensor], tuple[Tensor, Tensor]], writes: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Views(make), Adds(writes)).double()


MAKE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a view and its base": lambda h: (h.view(-1, 2, 4), h),
    "a copy": lambda h: (h.clone(), h),
    "apart": lambda h: (h[:, :8], h.clone()),
}


@pytest.mark.parametrize("name", MAKE)
def test_views_that_are_only_read_are_as_in_one_process(name: str) -> None:
    train_beside(model(MAKE[name], writes=False), batches(), stages=2, split=[1, 1]).close()


@pytest.mark.parametrize("name", ["a copy", "apart"])
def test_a_write_into_memory_of_its_own_is_as_in_one_process(name: str) -> None:
    train_beside(model(MAKE[name], writes=True), batches(), stages=2, split=[1, 1]).close()


def test_a_write_that_another_input_would_see_is_refused() -> None:
    m = model(MAKE["a view and its base"], writes=True)
    (x, y), *_ = batches()
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=2, split=[1, 1], micro_batches=2) as engine:
        with pytest.raises(pipe.StageError, match="writes in place into its input"):
            engine.train_step(x, target=y)
        with pytest.raises(pipe.StageError, match="writes in place into its input"):
            engine.predict(x)
