"""Parameters and buffers of any kind on stages: sparse, frozen, parametrized, hooked, compiled, written in forward, oddly named.

The oracle is the same model in a plain loop, bit for bit.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import pipe
from pipe import silent
from pipe.errors import PlanError, StageError
from tests.single.steps import batches, layers, plain, same_tensor, same_weights, sgd, train_beside

HOW = pytest.mark.parametrize(("stages", "schedule"), [(2, "gpipe"), (2, "1f1b"), (3, "1f1b"), (4, "gpipe")], ids=str)
SPLITS = {2: [2, 3], 3: [1, 2, 2], 4: [1, 1, 2, 1]}  # of five layers


def seeded(*made: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in made)).double()


def home(engine: pipe.Engine, model: nn.Module, reference: nn.Module) -> None:
    """After close, the user's own model holds what was trained, buffers too, also those that no checkpoint has."""
    engine.close()
    for name, value in [*reference.named_parameters(), *reference.named_buffers()]:
        found = dict(model.named_parameters()) | dict(model.named_buffers())
        assert same_tensor(found[name].detach(), value.detach()), name


def trains(model: nn.Sequential, data: Sequence[tuple[Any, Tensor]] | None = None, **options: Any) -> None:
    """Beside the plain loop for two steps, and home."""
    reference = copy.deepcopy(model)
    own = sgd(reference)
    data = batches(steps=2) if data is None else data
    engine = train_beside(model, data, **options)
    for x, y in data:
        plain(reference, own, x, y, options.get("micro_batches", 4), nn.MSELoss())
    home(engine, model, reference)


# --- sparse gradients ---


class Adds(nn.Module):
    """Adds an embedding of the row's number to what it gets."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8, sparse=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.embedding(torch.arange(len(x)) % 5)
        return out


def sparse_model() -> nn.Sequential:
    """Sparse gradients on the first stage, and on a later one."""
    return seeded(
        lambda: nn.Embedding(50, 8, sparse=True), lambda: nn.Flatten(), lambda: nn.Linear(24, 8), lambda: Adds(), lambda: nn.Linear(8, 3)
    )


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([p for n, p in model.named_parameters() if "bias" not in n and p.shape in ((50, 8), (5, 8))], lr=0.01)


def tokens(rows: int = 8, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(50, (rows, 3), generator=generator), torch.randn(rows, 3, generator=generator).double() * 10) for _ in range(steps)
    ]


@HOW
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_c41_sparse_gradients_clipped_and_stepped(micro_batches: int, stages: int, schedule: str) -> None:
    """The other weights are no optimizer's; they count in the norm."""
    model = sparse_model()
    reference, loss_fn = copy.deepcopy(model), nn.MSELoss()
    own = sparse_adam(reference)
    how: dict[str, Any] = {"stages": stages, "split": SPLITS[stages], "schedule": schedule, "micro_batches": micro_batches}
    with pipe.Engine(model, sparse_adam(model), loss_fn, max_grad_norm=1.0, strategy="pipeline", **how) as engine:
        for x, y in tokens():
            reference.zero_grad()
            want = 0.0
            for xs, ys in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches)):
                loss = loss_fn(reference(xs), ys) * (len(xs) / len(x))
                loss.backward()
                want += loss.item()
            assert nn.utils.clip_grad_norm_(reference.parameters(), 1.0) > 1.0
            own.step()
            assert engine.train_step(x, target=y) == want
            found = engine.gradients()
            for name, parameter in reference.named_parameters():
                gradient = found[name]
                assert gradient is not None
                assert parameter.grad is not None
                assert gradient.is_sparse is parameter.grad.is_sparse is ("embedding" in name or name == "0.weight")
                assert torch.equal(gradient.to_dense(), parameter.grad.to_dense()), name
            same_weights(engine, reference, gradients=False)
        assert set(engine.optimizer_state_dict()) == {"0.weight", "3.embedding.weight"}


@HOW
def test_c41_sparse_gradients_add_up_over_passes(stages: int, schedule: str) -> None:
    model = sparse_model()
    reference, loss_fn = copy.deepcopy(model), nn.MSELoss()
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    how: dict[str, Any] = {"stages": stages, "split": SPLITS[stages], "schedule": schedule, "micro_batches": 3}
    with pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, strategy="pipeline", **how) as engine:
        for x, y in tokens(steps=2):
            for xs, ys in zip(x.tensor_split(3), y.tensor_split(3)):
                (loss_fn(reference(xs), ys) * (len(xs) / len(x))).backward()
            engine.forward_backward(x, target=y)
        own.step()
        engine.optimizer_step()
        same_weights(engine, reference, gradients=False)


def test_a_bag_of_embeddings_and_a_padding_index() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", padding_idx=3), nn.Tanh(), nn.Linear(8, 3)).double()
    trains(model, [(x % 6, y) for x, y in tokens(steps=2)], stages=3)


# --- parametrizations ---


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Gained(nn.Module):
    """A parametrization with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8, 1))
        self.mask: Tensor
        self.register_buffer("mask", (torch.arange(8) % 3 > 0).float())

    def forward(self, x: Tensor) -> Any:
        return x * self.gain * self.mask


def parametrized(*parts: Callable[[], nn.Module]) -> nn.Module:
    linear = nn.Linear(8, 8)
    for part in parts:
        parametrize.register_parametrization(linear, "weight", part())
    return linear


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in use
        made: nn.Module = nn.utils.weight_norm(nn.Linear(8, 8))
    return made


NORMS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "old weight_norm": old_weight_norm,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "symmetric": lambda: parametrized(Symmetric),
    "with its own parameter": lambda: parametrized(Gained),
    "one after another": lambda: parametrized(Symmetric, Gained, Symmetric),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.3),  # type: ignore[no-untyped-call]
    "of a bias, too": lambda: parametrizations.weight_norm(parametrizations.weight_norm(nn.Linear(8, 8)), "bias"),
    "nested": lambda: nn.Sequential(parametrized(Gained), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, 8))),
}


@HOW
@pytest.mark.parametrize("name", NORMS)
def test_c57_norms_and_parametrizations_after_a_forward(name: str, stages: int, schedule: str) -> None:
    """On two stages; the computed weight has a graph when the engine is built. Power iterations run once a forward, as in one process."""
    made, data, loss_fn = NORMS[name], batches(steps=2), nn.MSELoss()

    def used() -> nn.Sequential:
        model = seeded(lambda: nn.Linear(6, 8), made, lambda: nn.Tanh(), made, lambda: nn.Linear(8, 3))
        model(data[0][0]).sum().backward()
        model.zero_grad()
        return model

    model, reference = used(), used()  # the old norms' weights cannot be copied after a forward
    own = sgd(reference)
    how: dict[str, Any] = {"stages": stages, "split": SPLITS[stages], "schedule": schedule, "micro_batches": 4}
    engine = pipe.Engine(model, sgd(model), loss_fn, strategy="pipeline", **how)
    for x, y in data:
        assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)
        same_weights(engine, reference)
    home(engine, model, reference)


@pytest.mark.parametrize("name", ["spectral_norm", "old spectral_norm"])
def test_c57_evaluation_leaves_power_iterations_alone(name: str) -> None:
    model = seeded(lambda: nn.Linear(6, 8), NORMS[name], lambda: nn.Linear(8, 3))
    x, y = batches(steps=1)[0]
    model(x).sum().backward()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[1, 2], micro_batches=4, strategy="pipeline") as engine:
        before = engine.state_dict()
        engine.predict(x)
        engine.eval_step(x, target=y)
        assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())


# --- frozen ---


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2), (1, 2, 3)], ids=str)
def test_c25_whole_stages_frozen_of_four(frozen: tuple[int, ...], schedule: str) -> None:
    """Buffers of frozen stages move on; weight decay does not touch what has no gradient."""
    model = seeded(
        lambda: nn.Linear(6, 8), lambda: Counts("in place"), lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 3)
    )
    stages = [[0], [1, 2], [3], [4]]
    for s in frozen:
        for i in stages[s]:
            model[i].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())

    def decayed(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3)

    with train_beside(model, batches(), stages=4, split=[1, 2, 1, 1], schedule=schedule, optimizer=decayed) as engine:
        state = engine.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], before[name]) is not parameter.requires_grad, name
    assert state["1.calls"] == before["1.calls"] + 12


@HOW
def test_single_parameters_frozen_and_unused(stages: int, schedule: str) -> None:
    model = seeded(lambda: nn.Linear(6, 8), lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8), lambda: nn.Tanh(), lambda: nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    model[4].register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)


def test_everything_frozen_but_what_the_loss_needs() -> None:
    model = layers()
    model.requires_grad_(False)
    x, y = batches(steps=1)[0]
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, micro_batches=4) as engine:
        with pytest.raises(StageError, match="the loss has no graph, so nothing would be trained"):
            engine.forward_backward(x, target=y)
        assert engine.eval_step(x, target=y) > 0


# --- parameters of any kind ---


class Kinds(nn.Module):
    """Without elements, without dimensions, complex, a column of a larger one, in lists and dicts, and used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.column = nn.Parameter(torch.randn(8, 4).double()[:, 1])
        self.listed = nn.ParameterList([torch.randn(8), torch.randn(1)])
        self.named = nn.ParameterDict({"a": torch.randn(8), "unused": torch.randn(8)})

    def forward(self, x: Tensor) -> Any:
        x = (x * self.number * self.turn).abs() * self.number + self.nothing.sum() + self.column
        return x * self.listed[0] + self.named["a"] * self.listed[1] * self.number


@HOW
def test_parameters_of_any_kind(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Kinds(), nn.Tanh(), Kinds(), nn.Linear(8, 3))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)


@HOW
def test_every_stage_in_a_type_of_its_own(stages: int, schedule: str) -> None:
    class To(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.to(self.linear.weight.dtype))
            return out

    torch.manual_seed(0)
    model = nn.Sequential(*(To(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float16, torch.float64)))
    data = [(x, x) for x, _ in batches(steps=2)]
    trains(model, data, stages=stages, split=SPLITS[stages], schedule=schedule)


class Anything(nn.Module):
    """A forward without names, and a parameter that is an attribute of no module."""

    def __init__(self, entries: int, exits: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(exits, entries)), torch.tensor(0.5)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert not kwargs
        (x,) = args
        return F.linear(x, self.weight) * self.scale


@HOW
def test_a_forward_of_anything(stages: int, schedule: str) -> None:
    sizes = [(6, 8), (8, 8), (8, 8), (8, 8), (8, 3)]
    model = seeded(*(lambda size=size: Anything(*size) for size in sizes))  # type: ignore[misc]
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)


NAMES = ["forward_", "T", "0", "weight", "a layer", "keywords", "dtype", "größe", "at", "_at", "current", "_takes", "surround", "_set"]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_be_called_anything(name: str, stages: int) -> None:
    torch.manual_seed(0)
    named = [("first", nn.Linear(6, 8)), (name, nn.Sequential(nn.Tanh())), ("last", nn.Linear(8, 3))]
    trains(nn.Sequential(OrderedDict(named)).double(), stages=stages)


# --- buffers ---


class Counts(nn.Module):
    """Writes buffers in forward: a number of calls, and a running mean that the output does not need."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls: Tensor
        self.mean: Tensor
        self.late: Tensor | None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8), persistent=how != "not in the state")
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.how == "assigned":
            self.calls, self.mean = self.calls + 1, self.mean * 0.9 + now * 0.1
        elif self.how == "through .data":
            self.calls.data += 1
            self.mean.data.copy_(self.mean * 0.9 + now * 0.1)
        elif self.how == "made late":
            self.late = now if self.late is None else self.late + now
        else:
            self.calls += 1
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        return x * 1.0


@HOW
@pytest.mark.parametrize("how", ["in place", "assigned", "through .data", "not in the state", "made late"])
def test_buffers_that_forward_writes(how: str, stages: int, schedule: str) -> None:
    model = seeded(lambda: nn.Linear(6, 8), lambda: Counts(how), lambda: nn.Linear(8, 8), lambda: Counts(how), lambda: nn.Linear(8, 3))
    if how == "made late":  # train_beside compares the buffers by their names, which it has from the first step on
        model(batches(steps=1)[0][0])
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)


class Codes(nn.Module):
    """An output that needs a buffer which forward has just moved."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        moved = self.mean * 0.9 + x.detach().mean(0) * 0.1
        if self.how == "assigned":
            self.mean = moved
        else:
            self.mean.copy_(moved)
        return x * (self.mean.clone() if self.how == "cloned" else self.mean)


@HOW
@pytest.mark.parametrize("how", ["assigned", "cloned"])
def test_an_output_that_needs_a_buffer_which_moves(how: str, stages: int, schedule: str) -> None:
    model = seeded(lambda: nn.Linear(6, 8), lambda: Codes(how), lambda: nn.Tanh(), lambda: Codes(how), lambda: nn.Linear(8, 3))
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_moves_under_the_graph_is_refused_with_the_remedy(schedule: str) -> None:
    """In one process each backward comes before the next forward writes."""
    model = seeded(lambda: nn.Linear(6, 8), lambda: Codes("in place"), lambda: nn.Tanh(), lambda: nn.Linear(8, 3))
    x, y = batches(steps=1)[0]

    def script() -> None:
        with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 2], micro_batches=4, schedule=schedule) as engine:
            engine.train_step(x, target=y)

    with pytest.raises(
        StageError, match=r"; micro-batches interleave, .*a later micro-batch has moved it: use a \.clone\(\) of the buffer"
    ):
        script()


class Rotates(nn.Module):
    """Reads a table that all layers have."""

    def __init__(self, table: Tensor, entries: int, exits: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(entries, exits)
        self.table: Tensor
        if how == "attribute":
            self.table = table
        else:
            self.register_buffer("table", table, persistent=how == "persistent")

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        return torch.tanh(out) * self.table[: out.shape[1]]


@HOW
@pytest.mark.parametrize("how", ["persistent", "not persistent", "attribute"])
def test_a_constant_table_that_all_stages_share(how: str, stages: int, schedule: str) -> None:
    table = torch.rand(8).double()
    sizes = [(6, 8), (8, 8), (8, 8), (8, 8), (8, 3)]
    model = seeded(*(lambda size=size: Rotates(table, *size, how) for size in sizes))  # type: ignore[misc, call-arg]
    if how != "attribute":
        for layer in model:
            layer.register_buffer("table", table, persistent=how == "persistent")  # double() gave each one of its own
        assert len({id(layer.table) for layer in model}) == 1
    kept = table.clone()
    trains(model, stages=stages, split=SPLITS[stages], schedule=schedule)
    assert torch.equal(table, kept)


# --- hooks ---

Hook = Callable[[nn.Sequential], None]


def pre(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[2].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)


def post(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_hook(lambda module, args, output: output + 1, prepend=True)
    model[3].register_forward_hook(lambda module, args, kwargs, output: output - args[0], with_kwargs=True)


def backward(model: nn.Sequential) -> None:
    """On the first and the last layer of some stage: they change what crosses."""
    for layer in (model[1], model[2], model[3]):
        layer.register_full_backward_hook(lambda module, entered, left: (entered[0] * 2,))  # type: ignore[index]
        layer.register_full_backward_pre_hook(lambda module, left: (left[0] + 0.5,))  # type: ignore[index]


def parameter(model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[operator, union-attr]
    model[0].weight.register_hook(lambda gradient: gradient + 1)  # type: ignore[operator, union-attr]
    model[4].bias.register_hook(lambda gradient: None)  # type: ignore[operator, union-attr]


def accumulated(model: nn.Sequential) -> None:
    """Clips each gradient after each micro-batch."""

    def clip(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-0.01, 0.01)

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(clip)  # type: ignore[no-untyped-call]


def nested(model: nn.Sequential) -> None:
    for module in model.modules():
        if module is not model:
            module.register_forward_hook(lambda module, args, output: output * 1.5)


def replaced(model: nn.Sequential) -> None:
    """Hooks that were taken off again, and put on anew."""
    handle = model[1].register_forward_hook(lambda module, args, output: output * 100)
    model[1].register_forward_hook(lambda module, args, output: output * 3)
    handle.remove()
    removed = model[0].weight.register_hook(lambda gradient: gradient * 100)  # type: ignore[operator, union-attr]
    removed.remove()


def by_state(model: nn.Sequential) -> None:
    """Hooks with a state of their own, a number of calls that the output depends on."""

    class Grows:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            self.calls += 1
            return output * (1.0 + 0.1 * self.calls)

    model[3].register_forward_hook(Grows())


HOOKS: dict[str, Hook] = {hook.__name__: hook for hook in (pre, post, backward, parameter, accumulated, nested, replaced, by_state)}


@HOW
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_set_before_the_engine(name: str, stages: int, schedule: str) -> None:
    kinds = (lambda: nn.Linear(6, 8), lambda: nn.Tanh(), lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), lambda: nn.Linear(8, 8))
    model, reference = (seeded(*kinds, lambda: nn.Linear(8, 3)) for _ in range(2))
    for each in (model, reference):
        HOOKS[name](each)
    own, loss_fn = sgd(reference), nn.MSELoss()
    how: dict[str, Any] = {"stages": stages, "split": SPLITS[stages], "schedule": schedule, "micro_batches": 4}
    with pipe.Engine(model, sgd(model), loss_fn, strategy="pipeline", **how) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)
            same_weights(engine, reference)


@HOW
def test_hooks_see_their_calls(stages: int, schedule: str) -> None:
    """One call a micro-batch, with the layer's own copy, on the layer's own stage."""
    model, seen = layers(), dict.fromkeys(("forward", "backward", "parameter", "accumulated"), 0)

    def count(kind: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            seen[kind] += 1

        return hook

    model[2].register_forward_hook(count("forward"))
    model[2].register_full_backward_hook(count("backward"))
    model[2].weight.register_hook(count("parameter"))  # type: ignore[operator]
    model[2].weight.register_post_accumulate_grad_hook(count("accumulated"))  # type: ignore[operator]
    x, y = batches(steps=1)[0]
    how: dict[str, Any] = {"stages": stages, "split": SPLITS[stages], "schedule": schedule, "micro_batches": 4}
    with pipe.Engine(model, sgd(model), nn.MSELoss(), strategy="pipeline", **how) as engine:
        engine.train_step(x, target=y)
        engine.gradients()  # the tail of the step is over
        assert seen == dict.fromkeys(seen, 4)


def test_a_hook_on_the_whole_model_is_refused() -> None:
    model = layers()
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(PlanError, match="hooks on the whole model"):
        pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2)
    train_beside(model, batches(steps=1), stages=1).close()


def test_hooks_of_state_dict_and_of_loading() -> None:
    """A layer that saves its weight under another name, and takes it back."""

    class Renames(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_state_dict_post_hook(self._save)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(self._load)  # type: ignore[no-untyped-call]

        @staticmethod
        def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[prefix + "kernel"] = state.pop(prefix + "weight")

        @staticmethod
        def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if prefix + "kernel" in state:
                state[prefix + "weight"] = state.pop(prefix + "kernel")

    model = seeded(lambda: nn.Linear(6, 8), lambda: Renames(), lambda: nn.Linear(8, 3))
    reference = copy.deepcopy(model)
    x, y = batches(steps=1)[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[1, 2], micro_batches=4, strategy="pipeline") as engine:
        assert engine.train_step(x, target=y) == plain(reference, sgd(reference), x, y, 4, nn.MSELoss())
        state = engine.state_dict()
        assert list(state) == list(reference.state_dict())
        assert "1.kernel" in state
        engine.load_state_dict({name: torch.ones_like(value) for name, value in state.items()})
        assert all(torch.equal(value, torch.ones_like(value)) for value in engine.state_dict().values())


# --- names of weights ---


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_c62_missing_and_unexpected_keys_over_all_stages(strict: bool, built: bool) -> None:
    model = layers()
    x, y = batches(steps=1)[0]
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=3, split=[2, 2, 1], micro_batches=4, strategy="pipeline") as engine:
        if built:
            engine.train_step(x, target=y)
        before = engine.state_dict()
        state = {name: torch.full_like(value, 0.25) for name, value in before.items()}
        for name in ("0.bias", "4.weight"):
            del state[name]
        state |= {"2.extra": torch.zeros(1), "module.0.weight": torch.zeros(8, 6)}
        if strict:
            with pytest.raises(RuntimeError) as caught:
                engine.load_state_dict(state)
            assert all(name in str(caught.value) for name in ("0.bias", "4.weight", "2.extra", "module.0.weight"))
            if built:  # before that it is torch's own loading, which keeps what fits
                assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        else:
            found = engine.load_state_dict(state, strict=False)
            assert sorted(found.missing_keys) == ["0.bias", "4.weight"]
            assert sorted(found.unexpected_keys) == ["2.extra", "module.0.weight"]
            after = engine.state_dict()
            assert all(torch.equal(after[name], state.get(name, before[name])) for name in before)
        with pytest.raises(RuntimeError, match=r"(?s)size mismatch.*2\.weight.*size mismatch.*4\.bias"):
            engine.load_state_dict({**before, "2.weight": torch.zeros(1), "4.bias": torch.zeros(1)}, strict=strict)


# --- memory that parameters share with other tensors ---


class Aliased(nn.Module):
    """A second tensor over the memory of a weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.row: Any
        if kind == "parameter":
            self.second.weight = nn.Parameter(self.first.weight.data)
        if kind == "buffer":
            self.register_buffer("row", self.first.weight.data[0])
        else:
            self.row = self.first.weight.data[0] if kind == "attribute" else 1.0

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x))) * self.row


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_tensors_over_one_memory_in_one_stage_stay_so_or_are_refused(kind: str, stages: int) -> None:
    """Between stages that is refused; in one, a step must move what looks into the weight, as in one process."""
    model, reference = (seeded(lambda: Aliased(kind), lambda: nn.Linear(6, 3)) for _ in range(2))
    for each in (model, reference):  # double() has kept the weights and copied nothing
        first = each[0].first
        assert isinstance(first, nn.Linear)
        assert any(t.data_ptr() == first.weight.data_ptr() for t in [each[0].row, each[0].second.weight] if isinstance(t, Tensor))  # type: ignore[union-attr]
    own, loss_fn = sgd(reference), nn.MSELoss()
    try:
        engine = pipe.Engine(model, sgd(model), loss_fn, stages=stages, micro_batches=4, strategy="pipeline")
    except PlanError as error:
        assert "memory" in str(error)  # noqa: PT017
        return
    with engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)


# --- compiled and scripted layers ---


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_scripted_layer_trains_or_is_refused(stages: int) -> None:
    def made() -> nn.Sequential:
        model = seeded(lambda: nn.Linear(6, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), lambda: nn.Linear(8, 3))
        model[1] = torch.jit.script(model[1])
        return model

    model, reference = made(), made()
    own, loss_fn = sgd(reference), nn.MSELoss()
    try:
        with pipe.Engine(model, sgd(model), loss_fn, stages=stages, micro_batches=4, strategy="pipeline") as engine:
            for x, y in batches():
                want = plain(reference, own, x, y, 4, loss_fn)
                assert engine.train_step(x, target=y) == pytest.approx(want, rel=1e-12)
                assert None not in engine.gradients().values()
    except PlanError as error:
        assert "script" in str(error)  # noqa: PT017


@pytest.mark.parametrize("split", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_c72_compiled_layers_are_compiled_at_most_twice(split: list[int]) -> None:
    """Micro-batches of 3, 3 and 2 rows, over three steps."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    trains_compiled(split, backend)
    assert 2 <= len(graphs) <= 4  # of two layers


@pytest.mark.parametrize("split", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_c72_compiled_layers_keep_their_names_and_numbers(split: list[int]) -> None:
    torch._dynamo.reset()
    trains_compiled(split, "eager")


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_compiled_layers_beside_one_that_may_draw_are_not_compiled_and_a_line_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    silent._say.cache_clear()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    in_place = nn.Linear(8, 3)
    in_place.compile(backend=backend)
    compiled: Any = torch.compile(nn.Linear(6, 8), backend=backend)
    model = nn.Sequential(compiled, Custom(), Custom(), in_place).float()
    x, y = batches(steps=1, dtype=torch.float32)[0]
    with caplog.at_level("WARNING", "pipe"), pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 2]) as engine:
        engine.train_step(x, target=y)
    assert [record.getMessage().partition(" where")[0] for record in caplog.records] == ["compiled layers of a stage run as they are"]
    assert "(Custom)" in caplog.text
    assert not graphs


def test_what_is_in_a_compiled_module_counts() -> None:
    for made, draws in [(nn.Linear(2, 2), False), (nn.Dropout(0.0), False), (nn.Dropout(0.5), True), (Custom(), True)]:
        assert silent.draws(torch.compile(nn.Sequential(nn.ReLU(), made))) is draws  # type: ignore[arg-type]
        made.compile()
        assert silent.draws(made) is draws


def trains_compiled(split: list[int], backend: Any) -> None:
    eager = seeded(lambda: nn.Linear(6, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), lambda: nn.Linear(8, 3))
    reference, loss_fn = copy.deepcopy(eager), nn.MSELoss()
    compiled: list[Any] = [torch.compile(layer, backend=backend) for layer in list(eager)[1:]]
    model = nn.Sequential(eager[0], *compiled)
    own, names = sgd(reference), list(model.state_dict())
    assert "1._orig_mod.0.weight" in names
    how: dict[str, Any] = {"stages": len(split), "split": split, "micro_batches": 3, "strategy": "pipeline"}
    with pipe.Engine(model, sgd(model), loss_fn, **how) as engine:
        for x, y in batches(8, 3):
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 3, loss_fn)
            found = engine.gradients()
            assert list(found) == [name for name, _ in model.named_parameters()]
            for (name, gradient), parameter in zip(found.items(), reference.parameters()):
                assert same_tensor(gradient, parameter.grad), name
        assert list(engine.state_dict()) == names
    for (name, value), wanted in zip(eager.state_dict().items(), reference.state_dict().values()):
        assert torch.equal(value, wanted), name
