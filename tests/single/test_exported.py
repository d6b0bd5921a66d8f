"""Models that torch.fx cannot trace: exported, cut anywhere, with the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipe
from pipe.captured import Captured
from pipe.copying import dump_module, load_module
from pipe.errors import PlanError
from pipe.partition.exported import ByMode, Constant, place
from tests.single.steps import batches, same_tensor, sgd

CUTS = [(2, "gpipe"), (3, "1f1b"), (4, "gpipe")]


def untraceable(x: Any) -> None:
    """What torch.fx cannot do: look at a value's type, and at its shape in a branch."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] > 100:
        raise ValueError(f"{type(x)}")


class Block(nn.Module):
    """Attention over the rows' features, dropout in three ways, and a norm."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.p = nn.Dropout(drop), drop

    def forward(self, x: Tensor, *, scale: float = 1.0, **ignored: Any) -> dict[str, Tensor]:
        untraceable(x)
        q, k, v = self.qkv(self.norm(x)).view(x.shape[0], 3, 2, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0).flatten(1)
        mixed = F.dropout(self.drop(mixed), self.p, self.training)
        return {"hidden": x + self.out(mixed) * scale}


class Net(nn.Module):
    """Blocks, a weight that is used twice, constants, sizes of the batch, and an output in a dict."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.back, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        untraceable(x)
        h = self.first(x) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], dtype=x.dtype) * self.shift
        h = h + torch.arange(x.shape[0], dtype=x.dtype)[:, None] * 0.01
        for block in self.blocks:
            h = block(h, scale=0.5)["hidden"]
        h = F.linear(h, self.first.weight.t()) + self.back(h)
        return {"scores": self.head(h if bias is None else h + bias)}


class Normed(nn.Module):
    """BatchNorm between what cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.middle, self.other = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        untraceable(x)
        out: Tensor = self.head(torch.relu(self.other(self.middle(torch.tanh(self.norm(self.first(x)))))))
        return out


def loss_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["scores"] if isinstance(output, dict) else output, target)


def train(model: nn.Module, stages: int, schedule: str = "gpipe", **options: Any) -> list[Any]:
    """Losses of three steps of different sizes, an evaluation, a prediction, and all that is held at the end."""
    options = {"strategy": "pipeline"} | options if stages > 1 else {"micro_batches": 2}
    with pipe.Engine(model, sgd(model), loss_of, stages=stages, schedule=schedule, seed=3, **{"micro_batches": 2, **options}) as engine:
        found: list[Any] = [engine.train_step(x[:rows], target=y[:rows]) for (x, y), rows in zip(batches(), (8, 5, 7))]
        first = engine.gradients()
        (x, y), *_ = batches()
        found += [engine.eval_step(x, target=y), engine.predict(x[:3]), first, engine.state_dict()]
        assert stages == 1 or type(engine._model.captured.layers._root) is nn.Module  # type: ignore[union-attr]  # exported
    return found


def same(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            same(one, other)
    elif isinstance(want, Tensor):
        assert same_tensor(got, want)
    else:
        assert got == want


@pytest.mark.parametrize(("stages", "schedule"), CUTS)
def test_dropout_in_any_form_is_that_of_one_stage(stages: int, schedule: str) -> None:
    model = Net(0.3).double()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].eval()  # a part that stays in eval mode
    want = train(copy.deepcopy(model), 1)
    got = train(model, stages, schedule)
    assert got[0] == want[0]
    assert got[1:4] == pytest.approx(want[1:4], rel=1e-12)
    for name, gradient in want[5].items():  # a weight that two stages share: its gradients are summed in another order
        assert (got[5][name] is None) == (gradient is None)
        assert gradient is None or torch.allclose(got[5][name], gradient, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize(("stages", "schedule"), CUTS)
def test_batch_norms_are_modules_again(stages: int, schedule: str) -> None:
    model = Normed().double()
    same(train(copy.deepcopy(model), stages, schedule, split="auto"), train(model, 1))


def test_the_numbers_are_those_of_pytorch() -> None:
    model = Net().double()
    reference = copy.deepcopy(model)
    (x, y), *_ = batches()
    with pipe.Engine(model, sgd(model), loss_of, stages=3, micro_batches=1, split=["blocks.0", "blocks.2"], strategy="pipeline") as engine:
        loss = loss_of(reference(x), y)
        loss.backward()
        assert engine.forward_backward(x, target=y) == loss.item()
        assert list(engine.state_dict()) == list(reference.state_dict())
        for name, gradient in engine.gradients().items():
            assert torch.allclose(gradient, reference.get_parameter(name).grad, rtol=1e-12, atol=1e-14), name  # type: ignore[arg-type]
        with torch.no_grad():
            same(engine.predict(x), reference.eval()(x))
    assert [part.layers.split(" ")[0] for part in engine.plan.parts] == ["of_the_graph.lifted_tensor_0", "blocks.0.norm", "blocks.2.norm"]


class Noise(nn.Module):
    """Draws random numbers in the forward of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.head(h + torch.randn_like(h) * 0.1) + torch.rand(x.shape[0], 1, dtype=x.dtype)
        return out


@pytest.mark.parametrize("split", [["head"], "auto"])
def test_random_numbers_of_the_whole_models_forward(split: Any) -> None:
    same(train(Noise().double(), 2, split=split), train(Noise().double(), 1))


def test_stages_cross_to_another_process_as_they_are() -> None:
    model = Net(0.3).double()
    ((x, _),) = batches(steps=1)
    layers = Captured(model, {"x": x}).layers
    counts = (len(layers) // 2, len(layers) - len(layers) // 2)
    for part in layers.parts(counts):
        assert isinstance(part, torch.fx.GraphModule)
        (back,) = load_module(dump_module((part,), ()))
        assert back.code == part.code
        same(back.state_dict(), part.state_dict())
        modes = {name: module.training for name, module in part.named_modules()}
        assert {name: module.training for name, module in back.named_modules()} == modes


def test_what_is_made_out_of_numbers_is_made_on_the_stages_device() -> None:
    model = Noise().double()
    ((x, _),) = batches(steps=1)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            untraceable(x)
            return x + torch.arange(6) + torch.tensor([1.0]) + torch.rand(1)

    layers = Captured(Net(), {"x": x.float()}).layers
    part = layers.parts((len(layers),))[0].to("meta")
    place(part, torch.device("meta"))
    assert part(x=x.float().to("meta")).device.type == "meta"
    assert {type(m) for m in part.modules()} >= {ByMode, Constant}
    assert model.state_dict().keys() == Noise().state_dict().keys()


class Differs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        untraceable(x)
        h = self.inner(x)
        out: Tensor = self.head(torch.relu(h) if self.training else torch.tanh(h))
        return out


class Keeps(Differs):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        untraceable(x)
        self.seen.add_(1)
        out: Tensor = self.head(self.inner(x))
        return out


class Numbers(Differs):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        untraceable(x)
        self.calls += 1
        out: Tensor = self.head(self.inner(x)) * self.calls
        return out


class Values(Differs):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        out: Tensor = self.head(h) if h.sum() > 0 else self.head(-h)
        return out


def hooked() -> nn.Module:
    model = Differs()
    model.inner.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Differs, "Differs does another thing in eval than in train"),
        (Keeps, "Keeps writes to a buffer in its forward"),
        (Numbers, "Numbers assigns to attributes in its forward"),
        (Values, "torch.export refuses it"),
        (hooked, "inner has hooks, which torch.export does not keep"),
    ],
)
def test_what_cannot_be_exported_says_both_reasons(make: Any, says: str) -> None:
    (x, y), *_ = batches()
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, strategy="pipeline") as engine:
        with pytest.raises(PlanError, match=rf"cannot be cut into 2 stages: .*(cannot be traced|Numbers\.forward).*; .*{says}"):
            engine.train_step(x, target=y)
    same(model.state_dict(), before)
    assert model.training


def test_a_branch_on_a_size_is_no_constant() -> None:
    """Captured with micro-batches of 4 rows; one row is like four, three are not even."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            untraceable(x)
            h = self.first(x)
            out: Tensor = self.head(h * 2 if x.shape[0] % 2 == 0 else h)
            return out

    (x, y), *_ = batches()
    model = Branch().double()
    reference = copy.deepcopy(model)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=2, strategy="pipeline") as engine:
        for rows in (8, 4):
            want = sum(
                nn.functional.mse_loss(reference(part), wanted).item() / 2 for part, wanted in zip(x[:rows].chunk(2), y[:rows].chunk(2))
            )
            assert engine.eval_step(x[:rows], target=y[:rows]) == pytest.approx(want, rel=1e-12)
        with pytest.raises(PlanError, match=r"goes another way than at capture \(Guard failed: .*keep to sizes like the first"):
            engine.eval_step(x[:6], target=y[:6])


def test_a_size_that_is_fixed_is_said() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            untraceable(x)
            out: Tensor = self.head(self.first(x).view(4, 8))
            return out

    (x, y), *_ = batches()
    model = Fixed().double()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=2, strategy="pipeline") as engine:
        engine.train_step(x, target=y)
        with pytest.raises(PlanError, match=r"argument 'x' of a micro-batch has the shape \(3, 6\).* captured with 4 in dimension 0"):
            engine.train_step(x[:6], target=y[:6])
