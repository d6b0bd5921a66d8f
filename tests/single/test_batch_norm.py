"""Running statistics are those of the whole mini-batch, moved once; with one micro-batch they are plain BatchNorm's to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipe.batch_norm import PooledStatistics
from pipe.rng import draws

torch.set_num_threads(1)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def close(got: nn.Module, want: nn.Module, atol: float) -> None:
    for (name, a), b in zip(state(got).items(), state(want).values()):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=0, atol=atol), name


def run(module: nn.Module, x: Tensor, sizes: list[int]) -> PooledStatistics:
    statistics = PooledStatistics(module)
    for piece in x.split(sizes):
        module(piece).sum().backward()
    return statistics


@pytest.mark.parametrize("momentum", [0.1, 0.003, 1.0, None, 0.0])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_the_whole_mini_batch(momentum: float | None, affine: bool) -> None:
    torch.manual_seed(0)
    bn = nn.BatchNorm1d(8, momentum=momentum, affine=affine)
    whole = copy.deepcopy(bn)
    statistics = PooledStatistics(bn)
    for _ in range(3):
        x = torch.randn(32, 8) * 3 + 5
        whole(x)
        for piece in x.split([9, 9, 7, 7]):
            bn(piece.requires_grad_())
        statistics.apply()
        close(bn, whole, 1e-5)
    assert int(bn.num_batches_tracked) == 3
    assert bn.momentum == momentum


def test_case_of_the_list() -> None:
    torch.manual_seed(0)
    bn, x = nn.BatchNorm1d(8), torch.randn(32, 8)
    whole = copy.deepcopy(bn)
    whole(x)
    run(bn, x, [8] * 4).apply()
    assert int(bn.num_batches_tracked) == 1
    close(bn, whole, 1e-6)


@pytest.mark.parametrize("momentum", [0.1, 0.37, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_micro_batch_is_plain_batch_norm_to_the_bit(momentum: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)).to(
        dtype
    )
    plain = copy.deepcopy(net)
    statistics = PooledStatistics(net)
    for _ in range(4):
        x = torch.randn(5, 3, 9, 9, dtype=dtype)
        assert torch.equal(net(x), plain(x))
        statistics.apply()
        for a, b in zip(state(net).values(), state(plain).values()):
            assert torch.equal(a, b)


class Twice(nn.Module):
    """A layer that two inputs go through, as in siamese networks."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x) + self.bn(x * 2 + 1)


def test_a_layer_called_twice_moves_twice() -> None:
    torch.manual_seed(0)
    twice, x = Twice(), torch.randn(12, 4)
    plain, pooled = copy.deepcopy(twice), copy.deepcopy(twice)
    plain(x)
    run(twice, x, [12]).apply()
    assert all(map(torch.equal, state(twice).values(), state(plain).values()))
    run(pooled, x, [6, 6]).apply()
    close(pooled, plain, 1e-6)
    assert int(pooled.bn.num_batches_tracked) == 2


def test_moments_of_replicas_add_up() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    whole, replicas = nn.BatchNorm1d(4), [nn.Sequential(nn.BatchNorm1d(4)) for _ in range(2)]
    whole(x)
    statistics = [run(replica, part, [6, 9]) for replica, part in zip(replicas, x.split(15))]
    moments = [each.moments() for each in statistics]
    assert moments[0].keys() == {"0"}
    assert moments[0]["0"].shape == (1, 9)
    assert moments[0]["0"].dtype == torch.float64
    assert float(moments[0]["0"][0, 0]) == 15
    sums = {name: moments[0][name] + moments[1][name] for name in moments[0]}
    for each, replica in zip(statistics, replicas):
        each.apply(sums)
        close(replica[0], whole, 1e-6)
        assert each.moments() == {}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sizes", [[16], [8, 8]])
def test_a_recomputed_forward_does_not_count(reentrant: bool, sizes: list[int]) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    plain, x = copy.deepcopy(inner), torch.randn(16, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    run(Net(), x, sizes).apply()
    plain(x)
    assert int(inner[1].num_batches_tracked) == 1
    close(inner, plain, 0 if len(sizes) == 1 else 1e-6)


def test_evaluation_and_a_dropped_step_leave_no_trace() -> None:
    bn = nn.BatchNorm1d(4)
    before = state(bn)
    statistics = PooledStatistics(bn)
    bn(torch.randn(4, 4))
    statistics.drop()
    statistics.apply()
    bn.eval()
    bn(torch.randn(4, 4))
    assert statistics.moments() == {}
    statistics.apply()
    assert all(map(torch.equal, before.values(), state(bn).values()))


def test_a_forward_that_raises_puts_the_buffers_back() -> None:
    bn = nn.BatchNorm1d(4)
    buffers = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
    statistics = PooledStatistics(bn)
    with pytest.raises(ValueError, match="more than 1 value"):
        bn(torch.randn(1, 4))
    assert (bn.running_mean, bn.running_var, bn.num_batches_tracked) == buffers
    assert statistics.moments() == {}
    bn(torch.randn(4, 4))
    assert bn.running_mean is buffers[0]
    assert bn.momentum == 0.1
    assert torch.equal(bn.running_mean, torch.zeros(4))


def test_without_running_statistics_there_is_nothing_to_do() -> None:
    bn = nn.BatchNorm1d(4, track_running_stats=False)
    run(bn, torch.randn(8, 4), [4, 4]).apply()
    assert state(bn) == {}


def test_its_hooks_draw_no_random_numbers() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    PooledStatistics(net)
    assert not draws(net)
