import copy
import random
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pipe.errors import PlanError
from pipe.partition import measure as measuring
from pipe.partition.balance import balance
from pipe.partition.measure import FLOOR, LayerCost, measure
from pipe.partition.spec import LayerSpec

torch.set_num_threads(1)


@dataclass
class Box:
    value: Tensor


class Wrap(nn.Module):
    def forward(self, x):
        return Box(x * 2)


class Unwrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, box):
        return box.value.mul_(1.0) * self.scale


def tick(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """Makes the clock advance by one of these at each reading, over and over."""
    now, at = 0.0, 0

    def perf_counter() -> float:
        nonlocal now, at
        now += seconds[at % len(seconds)]
        at += 1
        return now

    monkeypatch.setattr(time, "perf_counter", perf_counter)


def test_bytes_and_where_gradients_pass() -> None:
    layers = [nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2, dtype=torch.float32).requires_grad_(False)]
    costs = measure(layers, (torch.randn(5, 2, 3),))
    assert [c.parameter_bytes for c in costs] == [0, 4 * (24 + 4), 0, 4 * (8 + 2)]
    assert [c.output_bytes for c in costs] == [4 * 30, 4 * 20, 4 * 20, 4 * 10]
    assert [c.backward > 0 for c in costs] == [False, True, True, True]
    assert all(c.forward > 0 for c in costs)


def test_no_gradient_passes_a_layer_before_the_first_trained_one_or_through_integers() -> None:
    class Pick(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    costs = measure([nn.Tanh(), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), Pick(), nn.Embedding(3, 2)], (torch.randn(4, 3),))
    assert [c.backward > 0 for c in costs] == [False, False, True, False, True]


def test_the_model_its_inputs_and_the_generators_stay_as_they_are() -> None:
    layers = [
        nn.Linear(3, 3),
        nn.BatchNorm1d(3),
        nn.Dropout(),
        nn.ReLU(inplace=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ]
    layers[0].weight.grad = torch.ones(3, 3)
    before = [{key: value.clone() for key, value in layer.state_dict().items()} for layer in layers]
    x = torch.randn(4, 3)
    kept, state, python = x.clone(), torch.get_rng_state(), random.getstate()
    measure([*layers, LayerSpec(nn.Linear, 3, 3)], (x,))
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert layers[0].weight.grad.tolist() == [[1.0] * 3] * 3
    assert [p.grad for layer in layers[1:] for p in layer.parameters()] == [None] * 4 + [None]
    for layer, held in zip(layers, before):
        assert all(torch.equal(value, held[key]) for key, value in layer.state_dict().items())


def test_users_hooks_do_not_run_and_those_of_torch_do() -> None:
    calls: list[str] = []
    layer = torch.nn.utils.spectral_norm(nn.Linear(3, 3))
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.bias.register_hook(lambda grad: calls.append("bias"))
    copies: list[nn.Module] = []

    def keep(module: nn.Module) -> nn.Module:
        copies.append(copy.deepcopy(module))
        copies[-1].bias.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
        return copies[-1]

    measure([layer], (torch.randn(2, 3),), copy=keep)
    assert calls == []
    assert len(copies) == 1
    assert not torch.equal(copies[0].weight_u, layer.weight_u)  # its power iteration went on
    assert copies[0].bias.grad is not None
    layer(torch.randn(2, 3))
    assert calls == ["pre", "forward"]


def test_a_first_layer_may_take_several_arguments_and_later_ones_keywords() -> None:
    class Add(nn.Module):
        def forward(self, a, b, mask):
            return (a + b) * mask

    class Mask(nn.Module):
        def forward(self, x, mask):
            return x * mask

    costs = measure([Add(), nn.Tanh(), Mask()], (torch.ones(2, 3), torch.ones(2, 3)), {"mask": torch.ones(3)})
    assert [c.output_bytes for c in costs] == [24] * 3


def test_values_may_be_any_structure_and_be_written_in_place() -> None:
    class Pair(nn.Module):
        def forward(self, x):
            y = x.mul_(2)
            return {"a": y, "again": y, "b": (x + 1, None)}

    class Join(nn.Module):
        def forward(self, d):
            return d["a"].add_(d["b"][0])

    costs = measure([nn.Linear(2, 2), Pair(), Join(), Wrap(), Unwrap()], (torch.randn(3, 2),))
    assert [c.output_bytes for c in costs] == [24, 48, 24, 0, 24]  # a tensor that stands twice counts once; an unknown object not
    assert costs[4].backward > 0


def test_one_slow_run_is_enough_and_fast_ones_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    class Counts(nn.Module):
        def forward(self, x):
            ran.append(1)
            return x

    for seconds, runs in [(2.0, 1 + 1), (0.04, 1 + 2), (0.001, 1 + 5)]:
        ran.clear()
        tick(monkeypatch, [seconds])
        assert measure([Counts()], (torch.ones(1),)) == [LayerCost(pytest.approx(seconds), 0.0, 0, 4)]
        assert len(ran) == runs


def test_the_figure_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch, [0.0, 9.0, 0.0, 0.001, 0.0, 0.009, 0.0, 0.002, 0.0, 0.001, 0.0, 0.003])  # the warm-up does not count
    assert measure([nn.Identity()], (torch.ones(1),))[0].forward == pytest.approx(0.002)


def test_equal_layers_share_their_figures() -> None:
    layers = [nn.Linear(8, 8), *(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU()))]
    costs = measure(layers, (torch.randn(4, 8),))
    assert costs[1] == costs[3] == costs[5]
    assert costs[2] == costs[4] == costs[6]


def timing(shape: str, settings: str, *seconds: float) -> measuring._Timing:
    return measuring._Timing(shape, settings, list(seconds), [0.0] * len(seconds), 0, 0)


def test_layers_of_one_shape_are_equal_only_where_times_or_settings_are() -> None:
    close = [timing("block", "number=0", 0.010), timing("block", "number=1", 0.012), timing("block", "number=2", 0.014)]
    assert [c.forward for c in measuring._shared(close)] == [0.012] * 3
    apart = [timing("pool", "size=1", 0.010), timing("pool", "size=8", 0.080), timing("pool", "size=1", 0.020)]
    assert [c.forward for c in measuring._shared(apart)] == [pytest.approx(0.015), 0.080, pytest.approx(0.015)]


def test_a_setting_tells_layers_of_one_shape_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Works(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x):
            clock.append(clock[-1] + self.seconds)
            return x + 1

    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    costs = measure([Works(0.125), Works(0.5), Works(0.125)], (torch.ones(1),))
    assert [c.forward for c in costs] == [0.125, 0.5, 0.125]


def test_measured_costs_put_layers_beside_a_large_embedding_and_parameters_do_not() -> None:  # C67
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(8)]
    costs = measure([nn.Embedding(5000, 64), *blocks, nn.Linear(64, 10)], (torch.randint(5000, (8, 32)),))
    assert balance([c.parameter_bytes for c in costs], 3)[0] == 1
    assert balance([c.total for c in costs], 3)[0] > 1


def test_an_empty_layer_is_not_free() -> None:
    assert LayerCost(1e-6, 2e-6, 0, 0).total == FLOOR == 20e-6
    assert LayerCost(1.0, 2.0, 0, 0).total == 3.0


def test_a_layer_that_raises_is_named() -> None:
    with pytest.raises(PlanError, match=r"layer 'head' \(Linear.*raised RuntimeError.*give split as numbers") as caught:
        measure([nn.ReLU(), nn.Linear(3, 3)], (torch.ones(2, 4),), names=["act", "head"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_it_measures_gradients_also_under_no_grad() -> None:
    with torch.no_grad():
        assert measure([nn.Linear(3, 3)], (torch.ones(2, 3),))[0].backward > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_model_stays_where_it_is() -> None:
    layer = nn.Linear(512, 512)
    cost = measure([layer, nn.Dropout()], (torch.randn(64, 512),), device="cuda")[0]
    assert layer.weight.device.type == "cpu"
    assert cost.forward > 0
    assert cost.backward > 0
