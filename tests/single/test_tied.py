"""Weights that are tied across stages: one owner, gradients summed, copies equal, counted once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe.errors import PlanError
from tests.suites.numbers import plain

CLOSE = 1e-12  # relative, in float64: the order of summation differs from that of one process


class Head(nn.Module):
    """A head that uses the embedding's weight, some levels down."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        linear = nn.Linear(8, 20, bias=False)
        linear.weight = embedding.weight
        self.inner = nn.Sequential(nn.Tanh(), linear)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def language_model(sparse: bool = False) -> nn.Sequential:
    """Embedding, two middle layers that share a bias, and a head that shares the embedding's weight."""
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8, sparse=sparse).double()
    one, two = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    two.bias = one.bias
    return nn.Sequential(embedding, one, nn.Tanh(), two, Head(embedding))


def tokens(steps: int = 5, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(20, (rows, 3), generator=generator), torch.randint(20, (rows, 3), generator=generator)) for _ in range(steps)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def close(got: Tensor | None, want: Tensor | None, relative: float = CLOSE) -> bool:
    assert got is not None
    assert want is not None
    return bool(torch.allclose(got.to_dense(), want.to_dense(), rtol=relative, atol=relative * float(want.to_dense().abs().max())))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CUTS = [[4, 1], [1, 4], [2, 3], [1, 2, 2], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_c44_training_is_that_of_one_process(cut: list[int], make: Callable[[Any], torch.optim.Optimizer], schedule: str) -> None:
    model = language_model()
    reference = copy.deepcopy(model)
    own = make(reference.parameters())
    options: dict[str, Any] = {"stages": len(cut), "split": cut, "micro_batches": 3, "schedule": schedule, "strategy": "pipeline"}
    with pipe.Engine(model, make(model.parameters()), loss, **options) as engine:
        for x, y in tokens():
            want = plain(reference, own, x, y, 3, loss)  # type: ignore[arg-type]
            assert engine.train_step(x, target=y) == pytest.approx(want, rel=CLOSE)
            found = engine.gradients()
            assert list(found) == [name for name, _ in reference.named_parameters()]
            for name, parameter in reference.named_parameters():
                gradient = found[name]
                assert close(gradient, parameter.grad), name
            state = engine.state_dict()
            assert list(state) == list(reference.state_dict())
            assert torch.equal(state["0.weight"], state["4.inner.1.weight"])
            assert torch.equal(state["1.bias"], state["3.bias"])
            assert all(close(state[name], value) for name, value in reference.state_dict().items())
        assert set(engine.optimizer_state_dict()) == {name for name, _ in reference.named_parameters()}
    assert model.get_parameter("0.weight") is model.get_parameter("4.inner.1.weight")
    assert all(close(value, reference.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_tied_weight_counts_once_in_the_norm(norm_type: float) -> None:
    model = language_model()
    reference = copy.deepcopy(model)
    (x, y), *_ = tokens()
    with pipe.Engine(model, sgd(model.parameters()), loss, stages=3, split=[1, 2, 2], micro_batches=2) as engine:
        for _ in range(2):  # accumulated over two passes
            engine.forward_backward(x, target=y)
            for xs, ys in zip(x.chunk(2), y.chunk(2)):
                (loss(reference(xs), ys) * 0.5).backward()
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        assert engine.clip_grad_norm(0.5, norm_type) == pytest.approx(float(want), rel=1e-10)
        found = engine.gradients()
        for name, parameter in reference.named_parameters():
            gradient = found[name]
            assert close(gradient, parameter.grad, 1e-10), name


def test_what_is_looked_at_between_passes_changes_nothing() -> None:
    """gradients() sums the copies' gradients; a later pass adds to the sum, once."""
    (x, y), *_ = tokens()
    found = []
    for look in (False, True):
        model = language_model()
        with pipe.Engine(model, sgd(model.parameters()), loss, stages=3, split=[1, 2, 2], micro_batches=2) as engine:
            for _ in range(3):
                engine.forward_backward(x, target=y)
                if look:
                    engine.gradients()
            engine.optimizer_step()
            found.append(engine.state_dict())
    assert all(close(found[1][name], value) for name, value in found[0].items())


def test_a_sparse_embedding_and_a_dense_head() -> None:
    model = language_model(sparse=True)
    reference = copy.deepcopy(model)
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipe.Engine(model, optimizer, loss, stages=2, split=[2, 3], micro_batches=2, max_grad_norm=1e9) as engine:
        for x, y in tokens(3):
            plain(reference, own, x, y, 2, loss)  # type: ignore[arg-type]
            engine.train_step(x, target=y)
        assert all(close(engine.state_dict()[name], value) for name, value in reference.state_dict().items())


def test_none_stays_none_and_frozen_stays_frozen() -> None:
    model = language_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    with pipe.Engine(
        model, sgd([p for p in model.parameters() if p.requires_grad]), loss, stages=2, split=[2, 3], micro_batches=2
    ) as engine:
        (x, y), *_ = tokens()
        engine.train_step(x, target=y)
        assert engine.gradients()["0.weight"] is None
        assert torch.equal(engine.state_dict()["4.inner.1.weight"], before)
        model[0].weight.requires_grad_(True)  # followed on both stages
        engine.forward_backward(x, target=y)
        assert engine.gradients()["0.weight"] is not None


@pytest.mark.parametrize("key", ["0.weight", "4.inner.1.weight"])
def test_c46_copies_stay_equal_after_loading(key: str) -> None:
    model = language_model()
    (x, y), *_ = tokens()
    with pipe.Engine(model, sgd(model.parameters()), loss, stages=2, split=[2, 3], micro_batches=2) as engine:
        engine.train_step(x, target=y)
        value = torch.full((20, 8), 0.5, dtype=torch.float64)
        engine.load_state_dict({key: value}, strict=False)
        state = engine.state_dict()
        assert torch.equal(state["0.weight"], value)
        assert torch.equal(state["4.inner.1.weight"], value)
        engine.train_step(x, target=y)
        assert torch.equal(engine.state_dict()["0.weight"], engine.state_dict()["4.inner.1.weight"])


def test_a_module_that_works_on_three_stages() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.ReLU(), shared).double()
    reference = copy.deepcopy(model)
    own = sgd(reference.parameters())
    with pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), stages=3, split=[1, 2, 2], micro_batches=2) as engine:
        for seed in range(3):
            x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            plain(reference, own, x, y, 2, nn.MSELoss())
            engine.train_step(x, target=y)
        state = engine.state_dict()
        assert all(close(state[name], value) for name, value in reference.state_dict().items())
        assert torch.equal(state["0.weight"], state["2.weight"])
        assert torch.equal(state["0.weight"], state["4.weight"])


def test_a_failed_step_leaves_the_copies_as_they_were() -> None:
    model = language_model()
    (x, y), *_ = tokens()
    with pipe.Engine(model, sgd(model.parameters()), loss, stages=2, split=[2, 3], micro_batches=2) as engine:
        engine.train_step(x, target=y)
        before = engine.state_dict()
        with pytest.raises(pipe.StageError):
            engine.train_step(x, target=y + 100)
        assert all(torch.equal(value, engine.state_dict()[name]) for name, value in before.items())
        engine.train_step(x, target=y)
        assert torch.equal(engine.state_dict()["0.weight"], engine.state_dict()["4.inner.1.weight"])


class Table(nn.Module):
    def __init__(self, table: Tensor, writes: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.linear = nn.Linear(4, 4).double()
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        assert isinstance(table, Tensor)
        if self.writes:
            table.add_(1)
        out: Tensor = self.linear(x) * table.clone()  # the backward does not mind a write
        return out


def test_a_constant_buffer_may_be_shared_and_a_changing_one_may_not() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    table = torch.rand(4, dtype=torch.float64)
    model = nn.Sequential(Table(table), Table(table))
    reference = copy.deepcopy(model)
    with pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), stages=2, split=[1, 1], micro_batches=2) as engine:
        assert engine.train_step(x, target=x) == plain(reference, sgd(reference.parameters()), x, x, 2, nn.MSELoss())
        engine.load_state_dict(engine.state_dict())
        engine.train_step(x, target=x)
    model = nn.Sequential(Table(table), Table(table, writes=True))
    engine = pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), stages=2, split=[1, 1], micro_batches=2)
    with pytest.raises(pipe.StageError, match=r"1\.table was written to"), engine:
        engine.train_step(x, target=x)


class Hidden(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._embedding[0].weight.T


def test_what_stages_cannot_share_is_refused() -> None:
    norm = nn.BatchNorm1d(8)
    with pytest.raises(PlanError, match="running statistics of one BatchNorm"):
        pipe.Engine(nn.Sequential(norm, nn.ReLU(), norm), None, nn.MSELoss(), stages=2, split=[1, 2])
    embedding = nn.Embedding(20, 8)
    with pytest.raises(PlanError, match=r"'1' uses 0\.weight through its attribute '_embedding'"):
        pipe.Engine(nn.Sequential(embedding, Hidden(embedding)), None, loss, stages=2, split=[1, 1])
    head = nn.Linear(8, 20, bias=False)
    head.weight = nn.Parameter(embedding.weight.data)
    with pytest.raises(PlanError, match=r"two tensors over the same memory"):
        pipe.Engine(nn.Sequential(embedding, head), None, loss, stages=2, split=[1, 1])


class Looks(nn.Module):
    """A buffer, and another that looks into it."""

    def __init__(self, writes: bool, how: str = "row") -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4).double(), writes
        self.table: Tensor
        self.row: Tensor
        self.register_buffer("table", torch.rand(3, 4, dtype=torch.float64))
        self.register_buffer("row", self.table[0] if how == "row" else self.table)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.table.mul_(0.5)
        out: Tensor = self.linear(x) * self.row.clone()
        return out


@pytest.mark.parametrize("stages", [1, 2])
def test_a_buffer_that_looks_into_another_may_not_be_written_to(stages: int) -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    model = nn.Sequential(Looks(writes=False), Looks(writes=False))
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"stages": stages, "micro_batches": 2, "strategy": "pipeline"}
    with pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), **options) as engine:
        for _ in range(2):
            assert engine.train_step(x, target=x) == plain(reference, sgd(reference.parameters()), x, x, 2, nn.MSELoss())
            engine.load_state_dict(reference.state_dict())
    model = nn.Sequential(nn.Identity(), Looks(writes=True))
    engine = pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), **options)
    with (
        pytest.raises(pipe.StageError, match=r"buffer 1\.\w+ was written to, and another buffer looks into its memory.*\.clone\(\)"),
        engine,
    ):
        engine.train_step(x, target=x)


MEMORY = r"two tensors over the same memory; .*use one parameter object"


class Whole(nn.Module):
    """No sequence: captured to be cut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def two_over_one(kind: str) -> nn.Sequential:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    if kind == "parameter":
        two.weight = nn.Parameter(one.weight.data)
    elif kind == "row":
        two.bias = nn.Parameter(one.weight.data[1])
    elif kind == "buffer":
        two.register_buffer("kept", one.weight.detach())
    elif kind == "attribute":
        two.kept = [{"a": one.weight.data.t()}]  # type: ignore[assignment]
    elif kind == "of another type":
        two.register_buffer("bits", one.weight.data.view(torch.int32)[:, 1])
    return nn.Sequential(one, nn.Tanh(), two)


@pytest.mark.parametrize(("stages", "strategy"), [(1, None), (1, "pipeline"), (2, "pipeline"), (1, "ddp")])
@pytest.mark.parametrize("kind", ["parameter", "row", "buffer", "attribute", "of another type"])
def test_what_looks_into_a_parameter_is_refused_on_one_stage_too(kind: str, stages: int, strategy: str | None) -> None:
    """Each stage's copy gives both memory of their own, so a step would move the one and not the other."""
    model, x = two_over_one(kind), torch.randn(4, 4)
    with pytest.raises(PlanError, match=MEMORY):
        pipe.Engine(model, None, nn.MSELoss(), stages=stages, strategy=strategy).forward_backward(x, target=x)
    with pytest.raises(PlanError, match=MEMORY):
        pipe.Engine(Whole(model), None, nn.MSELoss(), stages=stages).forward_backward(x, target=x)


def interleaved() -> nn.Sequential:
    """Columns of one memory, in turn: parameters that have no byte in common."""
    memory = torch.randn(4, 8)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    one.weight, two.weight = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, 1::2])
    return nn.Sequential(one, nn.Tanh(), two)


def spectral() -> nn.Sequential:
    """Before its first forward the old spectral_norm keeps the weight's own memory as an attribute, which forward computes anew."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))


def one_object() -> nn.Sequential:
    """A parameter and a buffer in attributes and containers, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTMCell(4, 4), nn.Linear(4, 4))[:2]
    model[0].again = [model[0].weight]  # type: ignore[assignment]
    model[1].mean = model[1].running_mean
    return model


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("make", [interleaved, spectral, one_object])
def test_what_has_no_byte_in_common_or_is_one_object_trains(make: Callable[[], nn.Sequential], stages: int) -> None:
    x = torch.randn(8, 4)
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    reference = make()
    with pipe.Engine(model, sgd(model.parameters()), nn.MSELoss(), stages=stages, micro_batches=2, strategy="pipeline") as engine:
        assert engine.train_step(x, target=x) == plain(reference, sgd(reference.parameters()), x, x, 2, nn.MSELoss())


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_on_several_stages_are_refused(how: str) -> None:
    """Each stage's copy would give its hook a part of the gradient."""
    model = language_model()
    getattr(model[0].weight, how)(lambda gradient: None)
    with pytest.raises(PlanError, match=r"0\.weight has hooks on its gradient, which is the sum of those of stages 0, 1.*split="):
        pipe.Engine(model, sgd(model.parameters()), loss, stages=2, split=[2, 3], strategy="pipeline")
    with pipe.Engine(model, sgd(model.parameters()), loss, stages=1, strategy="pipeline") as engine:
        (x, y), *_ = tokens()
        assert engine.train_step(x, target=y) > 0


class Decays(nn.Linear):
    """Writes into its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["max_norm", "a write in the head"])
def test_a_weight_on_several_stages_that_forward_writes_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8, max_norm=0.5 if kind == "max_norm" else None).double()
    head = (nn.Linear if kind == "max_norm" else Decays)(8, 20, bias=False).double()
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Tanh(), head)
    text = r"this stage writes in place into a tied weight of shape \(20, 8\), which other stages hold a copy of.*split="
    for use in ("train_step", "predict"):
        engine = pipe.Engine(model, sgd(model.parameters()), loss, stages=2, split=[1, 2], micro_batches=2)
        (x, y), *_ = tokens()
        with pytest.raises(pipe.StageError, match=text), engine:
            engine.train_step(x, target=y) if use == "train_step" else engine.predict(x)


def test_a_weight_on_one_stage_may_be_written_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Tanh(), Decays(8, 20)).double()
    reference = copy.deepcopy(model)
    own = sgd(reference.parameters())
    with pipe.Engine(model, sgd(model.parameters()), loss, stages=2, split=[1, 2], micro_batches=1, strategy="pipeline") as engine:
        for x, y in tokens(3):
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 1, loss)  # type: ignore[arg-type]
            assert all(torch.equal(value, engine.state_dict()[name]) for name, value in reference.state_dict().items())
