"""Models that are no sequence: captured, cut anywhere, with the numbers of one process."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import pipe
from pipe.errors import PlanError
from tests.single.steps import batches, same_weights, sgd, train_beside

CUTS = [(stages, schedule) for stages in (2, 3, 4) for schedule in ("gpipe", "1f1b")]


class Residual(nn.Module):
    """Blocks with a residual each, one written in place, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = F.relu(x + block(x), inplace=True)
        out: Tensor = self.head(x)
        return out


class UNet(nn.Module):
    """Values that skip one, two and three layers; one is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.up = nn.ModuleList([nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(16, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.down[0](x))
        b = torch.tanh(self.down[1](a))
        c = torch.tanh(self.down[2](b))
        c = torch.tanh(self.up[0](c))
        c = torch.tanh(self.up[1](torch.cat([c, b], 1)))
        c = torch.tanh(self.up[2](torch.cat([c * a, a], 1)))
        out: Tensor = self.head(c + a)
        return out


class Weights(nn.Module):
    """Weights of its own, used in two places; a module called twice; weights and a buffer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.twice, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.idle = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(8.0) / 8)
        self.register_buffer("unused", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        x = torch.tanh(self.twice(x)) + self.table
        x = torch.tanh(self.twice(x)) + self.table
        out: Tensor = self.head(x * self.scale)
        return out


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize(("stages", "schedule"), CUTS)
@pytest.mark.parametrize("kind", [Residual, UNet], ids=lambda kind: kind.__name__)
def test_training_is_that_of_one_process(kind: Callable[[], nn.Module], stages: int, schedule: str) -> None:
    data = [*batches(8, 2), *batches(7, 1), *batches(2, 1)]
    with train_beside(made(kind), data, stages=stages, schedule=schedule) as engine:
        assert sum(engine.plan.split) > stages
        assert engine.plan.reason.startswith("asked for, cut by measured time")


@pytest.mark.parametrize("at", range(1, 17))
def test_every_place_is_good_to_cut(at: int) -> None:
    """Also inside of a residual, where two values cross."""
    model = made(UNet)
    captured = pipe.Engine(copy.deepcopy(model), None, nn.MSELoss(), stages=2, example=((batches()[0][0],), {}))
    nodes = sum(captured.plan.split)
    captured.close()
    assert nodes == 17
    reference, own_model = copy.deepcopy(model), model
    x, y = batches()[0]
    with pipe.Engine(own_model, sgd(own_model), nn.MSELoss(), stages=2, micro_batches=2, strategy="pipeline") as engine:
        assembly = engine._controller.assembly
        assembly._cheapest = lambda piece: ((at, nodes - at), 0.0)  # type: ignore[method-assign]
        own = sgd(reference)
        own.zero_grad()
        for xs, ys in zip(x.chunk(2), y.chunk(2)):
            (F.mse_loss(reference(xs), ys) * 0.5).backward()
        own.step()
        engine.train_step(x, target=y)
        same_weights(engine, reference)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_shared_weights_of_a_graph(stages: int) -> None:
    model = made(Weights)
    reference = copy.deepcopy(model)
    own = sgd(reference)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, micro_batches=2, strategy="pipeline") as engine:
        for x, y in batches():
            own.zero_grad()
            for xs, ys in zip(x.chunk(2), y.chunk(2)):
                (F.mse_loss(reference(xs), ys) * 0.5).backward()
            own.step()
            engine.train_step(x, target=y)
        state = engine.state_dict()
        assert list(state) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-14), name
        gradients = engine.gradients()
        assert gradients["idle.weight"] is None
        assert list(gradients) == [name for name, _ in reference.named_parameters()]
    assert torch.equal(model.get_parameter("idle.weight"), reference.get_parameter("idle.weight"))


class Modes(nn.Module):
    """Differs between train and eval: dropout as module and as function, BatchNorm, a branch on self.training."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(self.drop(self.norm(self.linear(x))), 0.3, self.training)
            return x + y if self.training else x + 2.0 * y

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts, self.head = nn.Linear(6, 8), nn.Sequential(*(self.Part() for _ in range(4))), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.parts(self.first(x))))
        return out


def test_train_and_eval_are_those_of_one_stage() -> None:
    found = []
    for stages in (1, 2, 4):
        model = made(Modes)
        with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, micro_batches=2, strategy="pipeline", seed=3) as engine:
            losses = []
            for x, y in batches(8, 3):
                losses += [engine.train_step(x, target=y), engine.eval_step(x, target=y)]
            found.append((losses, engine.state_dict(), engine.predict(batches()[0][0][:3])))
    for losses, state, output in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(state[name], value) for name, value in found[0][1].items())
        assert torch.equal(output, found[0][2])


class Masked(nn.Module):
    """Reads the batch's size, takes a mask by keyword late in forward, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False) -> dict[str, Tensor]:
        x = self.first(x).view(x.shape[0], 2, 4).flatten(1)
        x = torch.tanh(self.second(x))
        if double:
            x = x * 2
        if mask is not None:
            x = x * mask
        return {"out": self.head(x)}


def masked_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["out"], target)


@pytest.mark.parametrize("given", [{}, {"mask": True}, {"double": True}, {"mask": True, "double": True}], ids=str)
def test_arguments_go_where_they_are_used(given: dict[str, bool]) -> None:
    model = made(Masked)
    reference = copy.deepcopy(model)
    own = sgd(reference)
    with pipe.Engine(model, sgd(model), masked_loss, stages=3, micro_batches=3, strategy="pipeline") as engine:
        for x, y in [*batches(8, 2), *batches(5, 1)]:
            mask = (torch.arange(len(x))[:, None] % 2).double()
            kwargs = {name: mask if name == "mask" else value for name, value in given.items()}
            own.zero_grad()
            masks = mask.tensor_split(3)
            for xs, ms, ys in zip(x.tensor_split(3), masks, y.tensor_split(3)):
                piece = {**kwargs, "mask": ms} if "mask" in kwargs else kwargs
                (masked_loss(reference(xs, **piece), ys) * (len(xs) / len(x))).backward()
            own.step()
            engine.train_step(x, target=y, **kwargs)
            same_weights(engine, reference)
        other = {} if given else {"double": True}
        with pytest.raises(PlanError, match="a captured graph is for one kind of call"):
            engine.train_step(x, target=y, **other)
        engine.train_step(x, target=y, **kwargs)


def test_a_stage_begins_at_a_name() -> None:
    model = made(Residual)
    with train_beside(model, batches(), stages=3, split=["blocks.1", "head"]) as engine:
        workers = engine._controller.assembly.crew._workers  # type: ignore[attr-defined]
        held = [{name for name, _ in stage.module.named_parameters()} for w in workers for stage in w._stages.values()]
        assert held[2] == {"head.weight", "head.bias"}
        assert "blocks.1.0.weight" in held[1]
        assert "blocks.0.2.bias" in held[0]


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (["nowhere"], "names 'nowhere', which is no module that the model calls"),
        (["head", "blocks.1"], "begin in the model's order"),
        (["head", "blocks.1", "blocks.2"], "there are 3 stages"),
        ([3, 4, 5], 'it is "auto", or names of modules'),
    ],
)
def test_a_split_that_does_not_fit(split: list[Any], text: str) -> None:
    x, y = batches()[0]
    with pipe.Engine(made(Residual), None, nn.MSELoss(), stages=3, split=split) as engine, pytest.raises(PlanError, match=text):
        engine.forward_backward(x, target=y)


class Branches(nn.Module):
    """Its way depends on values; another module around it does not."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) if float(x.detach().sum()) > 0 else x * 2
            return out

    def __init__(self, at_root: bool = False) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(6, 8), self.Gate(), nn.Linear(8, 3)
        self.at_root = at_root

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(torch.tanh(self.first(x)))
        if self.at_root and float(x.detach().sum()) > 0:
            x = x * 2
        out: Tensor = self.head(x)
        return out


def test_a_module_that_cannot_be_traced_is_kept_whole() -> None:
    train_beside(made(Branches), batches(), stages=3).close()


def test_a_model_that_cannot_be_traced_says_why() -> None:
    x, _ = batches()[0]
    model = Branches(at_root=True).double()
    for strategy in (None, "pipeline"):
        with (
            pipe.Engine(model, None, nn.MSELoss(), stages=2, strategy=strategy) as engine,
            pytest.raises(PlanError, match=r"cannot be cut into 2 stages: Branches cannot be traced \(.*\); torch.export refuses it \("),
        ):
            engine.forward_backward(x, target=x[:, :3])
    with pytest.raises(PlanError, match="a graph of 1 node, fewer than the stages"):
        pipe.Engine(OneNode(), None, nn.MSELoss(), stages=2)


class OneNode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Frozen(nn.Module):
    """A part works without gradients, another under autocast: contexts that a graph does not hold."""

    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return torch.tanh(self.linear(x)).float()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.quiet, self.low, self.head = nn.Linear(6, 8), self.Quiet(), self.Low(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head(x + self.quiet(x) + self.low(x))
        return out


def test_contexts_inside_a_module_stay_in_force() -> None:
    torch.manual_seed(0)
    train_beside(Frozen(), batches(dtype=torch.float32), stages=3).close()


def test_hooks_of_a_module_run_and_those_of_the_whole_are_refused() -> None:
    model, calls = made(Residual), []
    model.get_submodule("blocks.1").register_forward_hook(lambda *_: calls.append(1))
    x, y = batches()[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=3, micro_batches=4, strategy="pipeline") as engine:
        engine.train_step(x, target=y)
        calls.clear()
        engine.train_step(x, target=y)
        engine.trace
        assert len(calls) == 4
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(PlanError, match="has hooks on the whole model"):
        pipe.Engine(model, None, nn.MSELoss(), stages=2)


def test_the_users_model_is_as_it_was() -> None:
    model = made(Modes)
    model.parts[1].eval()  # type: ignore[union-attr, operator, index]
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, example=((batches()[0][0],), {})) as engine:
        assert engine.plan.split
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
        assert torch.equal(torch.get_rng_state(), state)


class Wants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        out = self.head(torch.tanh(self.first(x)))
        return out if target is None else (F.mse_loss(out, target), out)


def test_a_model_that_makes_its_own_loss() -> None:
    model = made(Wants)
    reference = copy.deepcopy(model)
    x, y = batches()[0]
    with pipe.Engine(model, sgd(model), stages=2, micro_batches=1, strategy="pipeline") as engine:
        assert engine.train_step(x, target=y) == reference(x, y)[0].item()


def test_a_model_of_torchvision_is_cut_unmodified() -> None:
    from torchvision.models import resnet18

    x, y = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 4, 0])
    found = []
    for stages in (1, 3):
        torch.manual_seed(0)
        model = resnet18(num_classes=5)
        with pipe.Engine(model, sgd(model), nn.CrossEntropyLoss(), stages=stages, micro_batches=3, strategy="pipeline") as engine:
            losses = [engine.train_step(x, target=y) for _ in range(2)]
            found.append((losses, engine.state_dict(), engine.predict(x[:5])))
    assert found[0][0] == found[1][0]
    assert list(found[0][1]) == list(found[1][1])
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())
    assert torch.equal(found[0][2], found[1][2])


class Sized(nn.Module):
    """Makes tensors whose size comes from the batch, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = self.first(x) + torch.zeros(rows, 8, dtype=x.dtype)
        x = x * torch.arange(8, dtype=x.dtype) + torch.tensor(0.5) * torch.ones(rows, 1)
        out: Tensor = self.head(torch.tanh(x))
        return out


def test_tensors_of_the_batchs_size() -> None:
    train_beside(made(Sized), [*batches(8, 2), *batches(5, 1)], stages=3).close()


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how
        self.register_buffer("calls", torch.zeros(1))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "add_":
            self.calls.add_(1)  # type: ignore[operator, union-attr]
        elif self.how == "+=":
            self.calls += 1
        elif self.how == "=":
            self.calls = self.calls + 1
        elif self.how == "number":
            self.number += 1
        out: Tensor = self.head(torch.tanh(self.first(x)))
        return out


def test_a_buffer_that_is_written_in_place_is_counted_on_its_stage() -> None:
    model = made(lambda: Counts("add_"))
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=4, strategy="pipeline") as engine:
        for x, y in batches():
            engine.train_step(x, target=y)
        assert engine.state_dict()["calls"] == 12


@pytest.mark.parametrize("how", ["+=", "=", "number"])
def test_a_forward_that_assigns_to_its_module_is_kept_whole(how: str) -> None:
    """At the root that leaves nothing to cut; the user's model is as it was."""
    model: Any = made(lambda: Counts(how))
    x, y = batches()[0]
    with (
        pipe.Engine(model, None, nn.MSELoss(), stages=2) as engine,
        pytest.raises(PlanError, match=r"Counts (assigns|writes) to "),
    ):
        engine.forward_backward(x, target=y)
    assert (model.calls, model.number) == (torch.zeros(1), 0)
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Counts(how), nn.Tanh()), nn.Linear(3, 3)).double()
    inside.register_parameter("own", nn.Parameter(torch.ones(1)))  # so that it is captured
    with pipe.Engine(inside, sgd(inside), nn.MSELoss(), stages=2, micro_batches=2, strategy="pipeline") as engine:
        engine.train_step(x, target=y)
        assert engine.state_dict()["1.0.calls"] == (0 if how == "number" else 2)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x) + torch.randn_like(x[:, :1]))
        return out


def test_capturing_leaves_torch_as_it_was() -> None:
    before = {name: getattr(torch, name) for name in ("zeros", "arange", "tensor", "randn")}
    for kind in (Sized, Noise):
        example = (batches(dtype=torch.float32)[0][0],), {}
        with contextlib.suppress(PlanError), pipe.Engine(kind(), None, nn.MSELoss(), stages=2, example=example) as engine:
            assert engine.plan.stages == 2
    assert before == {name: getattr(torch, name) for name in before}


# --- what a graph could lose ---


class Inner(nn.Module):
    """A module in the middle whose forward does something that a graph would not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.aux = how, 0.0
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[int] = []

    def forward(self, x: Tensor, size: tuple[int, int] = (2, 4)) -> Tensor:
        if self.how == "wiring":
            a, b = torch.tanh(self.one(x)), torch.tanh(self.other(x))
            return a * 2 if self.training else b * 2
        if self.how == "autocast off":
            with torch.autocast("cpu", enabled=False):
                return self.one(x.float()).to(x.dtype)
        if self.how == "autocast on":
            with torch.autocast("cpu", torch.float16):
                return self.one(x).to(x.dtype)
        if self.how == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "list":
            self.seen.append(len(self.seen))
            return self.one(x) * len(self.seen)  # type: ignore[no-any-return]
        return self.one(x).view(-1, *size).flatten(1)  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last, self.head = nn.Linear(6, 8), Inner(how), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, shape: tuple[int, int] = (8, 1)) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.last(torch.relu(self.inner(torch.relu(self.first(x)))))
        return self.head(h.view(-1, *shape).flatten(1)), {"h": h}


def first_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0].to(target.dtype), target)


@pytest.mark.parametrize(
    ("how", "precision"), [("wiring", "fp32"), ("checkpoint", "fp32"), ("size", "fp32"), ("autocast off", "bf16"), ("autocast on", "bf16")]
)
def test_what_a_graph_would_lose_is_kept_whole(how: str, precision: str) -> None:
    found = []
    for stages in (1, 2, 3):
        model = Around(how)
        options: dict[str, Any] = {"stages": stages, "micro_batches": 2, "precision": precision}
        options |= {"split": ["last"] if stages == 2 else ["inner", "last"]} if stages > 1 else {}
        with pipe.Engine(model, sgd(model), first_of, **options) as engine:
            losses = [engine.train_step(x, target=y) for x, y in batches(dtype=torch.float32)]
            (x, y), *_ = batches(dtype=torch.float32)
            output = engine.predict(x)
            found.append((losses, engine.eval_step(x, target=y), output, engine.state_dict()))
            if stages > 1 and how == "checkpoint":
                kept = [m for part in engine._model.parts(engine.plan.split) for m in part.modules() if type(m) is Inner]
                assert len(kept) == 1
    (losses, loss, output, state), *others = found
    assert type(output) is tuple
    assert list(output[1]) == ["h"]
    for got, got_loss, got_output, got_state in others:
        assert (got, got_loss) == (losses, loss)
        assert torch.equal(got_output[0], output[0])
        assert torch.equal(got_output[1]["h"], output[1]["h"])
        assert all(torch.equal(got_state[name], value) for name, value in state.items())


def test_a_list_that_a_forward_adds_to_is_as_it_was_after_capture() -> None:
    model = Around("list")
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), first_of, stages=2, micro_batches=2, split=["last"]) as engine:
        engine.train_step(x, target=y)
        assert model.inner.seen == []


class Aux(nn.Module):
    """A loss on the side that a module leaves in an attribute, in training only, and that the whole model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 8), Leaves(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.first(x)))
        return out + self.inner.aux


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(8, 8), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.training:
            self.aux = h.square().mean() * 0.1  # type: ignore[assignment]
        return h


def test_an_attribute_that_another_module_reads_is_no_constant() -> None:
    model = Aux()
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, strategy="pipeline") as engine:
        with pytest.raises(PlanError, match="cannot be cut into 2 stages"):
            engine.train_step(x, target=y)
    assert model.inner.aux == 0.0


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x) * random.random())
        return out


def test_numbers_of_pythons_random_module_are_no_constants() -> None:
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(Chance(), None, nn.MSELoss(), stages=2, strategy="pipeline") as engine:
        with pytest.raises(PlanError, match="cannot be cut into 2 stages"):
            engine.forward_backward(x, target=y)


class Extra(nn.Linear):
    """Has a state beside its weights."""

    def get_extra_state(self) -> Tensor:
        return torch.tensor([7.0])

    def set_extra_state(self, state: Tensor) -> None:
        assert state == 7.0


def test_a_module_with_a_state_of_its_own_is_kept_whole() -> None:
    model = Around("size")
    model.last = Extra(8, 8)
    names = list(model.state_dict())
    (x, y), *_ = batches(dtype=torch.float32)
    with pipe.Engine(model, sgd(model), first_of, stages=2, micro_batches=2, split=["last"]) as engine:
        engine.train_step(x, target=y)
        assert list(engine.state_dict()) == names
