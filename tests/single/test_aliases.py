"""Views of one memory that cross a boundary together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pipe
from pipe.aliases import Region, overlaps, region, taken_later
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
        ([X[:, :3], X[:, 3:]], ()),
        ([X[:, :4], X[:, 3:]], (0, 1)),
        ([X[:, ::2], X[:, 1::2], X.clone()], ()),
        ([X[::2], X[1::2], X[:, 5]], (0, 1, 2)),
        ([X[:2, 3:], X[2:, :3], X.t()[0]], (1, 2)),
        ([*X.unbind(1)], ()),
        ([X[:, :3].view(torch.int32), X[:, 3:]], ()),
        ([X[:, :3].view(torch.int32), X[:, 2:]], (0, 1)),
        ([X.view(2, 2, 6)[:, 0], X.view(2, 2, 6)[:, 1]], ()),
    ],
)
def test_overlaps(tensors: list[Tensor], found: tuple[int, ...]) -> None:
    def where(t: Tensor) -> Region | None:
        return region(t, (0, t.untyped_storage().data_ptr())) if t.layout is torch.strided and t.numel() else None

    assert tuple(sorted({i for pair in overlaps([where(t) for t in tensors]) for i in pair})) == found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_overlaps_are_those_of_the_elements(data: st.DataObject) -> None:
    """Of any two tensors over one memory, unless that would take long to tell: then they may be none."""
    base = torch.zeros(400, dtype=torch.int16)

    def any_tensor() -> Tensor:
        size = data.draw(st.lists(st.integers(1, 4), max_size=3))
        strides = [data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12, 20])) for _ in size]
        return base.as_strided(size, strides, data.draw(st.integers(0, 30)))

    one, other = any_tensor(), any_tensor()
    found = list(overlaps([region(one, (0, 0)), region(other, (0, 0))]))
    base.index_fill_(0, _elements(one, base), 1)
    really = bool(other.any())
    assert found or not really
    dense = all(own == tuple(sorted(own, reverse=True)) for own in (one.stride(), other.stride()))
    if one.stride() == other.stride() and dense and _is_nested(one) and _is_nested(other):
        assert bool(found) is really


def _elements(t: Tensor, base: Tensor) -> Tensor:
    return torch.arange(len(base)).as_strided(t.shape, t.stride(), t.storage_offset()).flatten()


def _is_nested(t: Tensor) -> bool:
    """Whether each dimension steps over all of the next one, as in a view of a contiguous tensor."""
    return all(outer >= n * inner > 0 for outer, n, inner in zip(t.stride(), t.shape[1:], t.stride()[1:]))


def test_which_tensors_later_stages_take_too() -> None:
    a, b, c = torch.zeros(3, 1)
    own = ((a, b), {"mask": [c, 3], "again": a})
    assert taken_later(own, []) == ()
    found = taken_later(own, [({"x": a}, 2), ([c, a], 1)])
    assert [(id(t), s) for t, s in found] == [(id(a), 2), (id(c), 1), (id(a), 2)]


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


def _apart(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, :8], h[:, 8:]


MAKE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a view and its base": lambda h: (h.view(-1, 2, 4), h),
    "a copy": lambda h: (h.clone(), h),
    "apart": lambda h: (h[:, :8], h.clone()),
    "interleaved": lambda h: _apart(torch.cat([h, h.tanh()], 1)),
}


@pytest.mark.parametrize("name", MAKE)
def test_views_that_are_only_read_are_as_in_one_process(name: str) -> None:
    train_beside(model(MAKE[name], writes=False), batches(), stages=2, split=[1, 1]).close()


@pytest.mark.parametrize("name", ["a copy", "apart", "interleaved"])
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
