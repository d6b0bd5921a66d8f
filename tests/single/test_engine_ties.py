"""What ties the user's own objects, model and optimizer, to the stages once these exist."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import pipe
from pipe.errors import PlanError, StageError

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)


def engine_over(m: nn.Module, optimizer: torch.optim.Optimizer) -> pipe.Engine:
    return pipe.Engine(m, optimizer, nn.MSELoss(), stages=2, split=[1, 2], micro_batches=2)


def plain_step(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for xs, ys in zip(X.chunk(2), Y.chunk(2)):
        (nn.functional.mse_loss(m(xs), ys) * 0.5).backward()
    optimizer.step()


def same(m: nn.Module, reference: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(m.state_dict().values(), reference.state_dict().values()))


def test_an_optimizer_that_keeps_its_parameters_itself() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.own, self.by_index = list(parameters), dict(enumerate(parameters))

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for parameter in self.own:
                assert any(parameter is held for held in self.by_index.values())
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])

    m, reference = model(), model()
    own = Own(list(reference.parameters()), 0.1)
    with engine_over(m, Own(list(m.parameters()), 0.1)) as engine:
        for _ in range(3):
            engine.train_step(X, target=Y)
            plain_step(reference, own)
    assert same(m, reference)


def test_a_closed_engine_leaves_the_optimizer_to_the_other() -> None:
    m = model()
    optimizer = sgd(m)
    for order in (0, 1):
        first, second = engine_over(m, optimizer), engine_over(m, optimizer)
        (first, second)[order].close()
        left = (second, first)[order]
        left.forward_backward(X, target=Y)
        optimizer.zero_grad()
        assert set(left.gradients().values()) == {None}
        left.close()
    m[0].weight.grad = torch.ones(4, 4)
    optimizer.zero_grad()
    assert m[0].weight.grad is None


def test_optimizer_state_goes_both_ways() -> None:
    m, reference = model(), model()
    optimizer, own = sgd(m), sgd(reference)
    with engine_over(m, optimizer) as engine:
        engine.train_step(X, target=Y)
        plain_step(reference, own)
        saved = copy.deepcopy(optimizer.state_dict())
        assert str(saved["state"]) == str(own.state_dict()["state"])
        engine.train_step(X, target=Y)
        optimizer.load_state_dict(saved)
        plain_step(reference, own)
        own.load_state_dict(saved)
        for _ in range(2):
            engine.train_step(X, target=Y)
            plain_step(reference, own)
    assert same(m, reference)
    with engine_over(m, optimizer) as again:  # a second engine goes on where the first ended
        again.train_step(X, target=Y)
    plain_step(reference, own)
    assert same(m, reference)


def test_weights_loaded_into_the_model_reach_the_stages() -> None:
    m, reference = model(), model()
    optimizer, own = sgd(m), sgd(reference)
    start = copy.deepcopy(m.state_dict())
    with engine_over(m, optimizer) as engine:
        for step in range(3):
            if step == 2:
                m.load_state_dict(start)
                reference.load_state_dict(start)
            engine.train_step(X, target=Y)
            plain_step(reference, own)
    assert same(m, reference)


def test_a_removed_group_is_not_stepped_and_zero_may_mean_zero() -> None:
    m, reference = model(), model()
    groups = [[{"params": q[0].parameters()}, {"params": q[2].parameters()}] for q in (m, reference)]
    optimizer, own = (torch.optim.AdamW(group, lr=0.1, weight_decay=0.5) for group in groups)
    with engine_over(m, optimizer) as engine:
        engine.train_step(X, target=Y)
        plain_step(reference, own)
        for o in (optimizer, own):
            o.param_groups.pop()
        engine.train_step(X, target=Y)
        plain_step(reference, own)
        for o in (optimizer, own):
            o.zero_grad(set_to_none=False)
            o.step()
    assert same(m, reference)


def test_two_engines_over_one_model_are_both_cut() -> None:
    m = model()
    with engine_over(m, sgd(m)) as first:
        first.predict(X)
        with engine_over(m, sgd(m)) as second:
            assert torch.equal(second.predict(X), first.predict(X))
            assert second.plan.strategy == "pipeline"


def test_a_first_call_in_inference_mode_does_not_spoil_training() -> None:
    m, reference = model(), model()
    own = sgd(reference)
    with engine_over(m, sgd(m)) as engine:
        with torch.inference_mode():
            engine.predict(X)
        engine.train_step(X, target=Y)
        plain_step(reference, own)
    assert same(m, reference)


def test_a_loss_without_a_graph_is_refused() -> None:
    m = model()
    with pipe.Engine(m, sgd(m), lambda o, t: nn.functional.mse_loss(o, t).detach(), stages=2, split=[1, 2]) as engine:
        with pytest.raises(StageError, match="the loss has no graph"):
            engine.train_step(X, target=Y)


def test_names_in_batch_dim_are_checked() -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x @ table

    layers = [Table(), nn.Linear(4, 2)]
    with pytest.raises(PlanError, match="batch_dim has 'tabel', which is no argument of the model; it has x, table, target"):
        pipe.Engine(layers, None, batch_dim={"tabel": None})
    pipe.Engine(layers, None, batch_dim={"table": None, "target": 0}).close()


def test_a_buffer_that_forward_makes_comes_home() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.ones(2)
            return x

    layers = [Counts(), nn.Linear(4, 2)]
    with pipe.Engine(layers, sgd(layers[1]), nn.MSELoss(), stages=2) as engine:
        engine.train_step(X, target=Y)
    assert torch.equal(layers[0].seen, torch.ones(2))


def test_what_cannot_be_sent_is_no_hang() -> None:
    m = model()
    with engine_over(m, sgd(m)) as engine:
        with pytest.raises(pipe.PipeError):
            engine.train_step(X, target=[Y, threading.Lock()])
        assert engine.train_step(X, target=Y) > 0


def test_a_write_into_the_model_is_not_seen_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipe")
    m = model()

    def said() -> list[str]:
        return [record.message for record in caplog.records if "was written to in place" in record.message]

    with engine_over(m, sgd(m)) as engine:
        engine.train_step(X, target=Y)
        engine.sync_model()
        m.load_state_dict(m.state_dict())
        engine.train_step(X, target=Y)
        assert said() == []
        with torch.no_grad():
            m[2].weight.mul_(2.0)
        for _ in range(2):
            engine.train_step(X, target=Y)
        (line,) = said()
        assert line.startswith("2.weight of the model was written to in place")
