"""What may cross from one stage to the next: any structure, type, layout and view, several outputs of one node, in-place writes.

Each model is a layer that makes a value of `make(linear(x))`, layers that hand it on, and one that gives `linear(take(value))`; the
oracle is the same model in a plain loop, bit for bit.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipe
from pipe.crew import LocalCrew
from pipe.errors import StageError
from tests.single.steps import batches, same_tensor, same_weights, sgd, train_beside
from tests.suites.numbers import plain

HOW = pytest.mark.parametrize(("stages", "schedule"), [(2, "gpipe"), (2, "1f1b"), (3, "1f1b"), (4, "gpipe")], ids=str)
Make = Callable[[Any], Any]


class Makes(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(6, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


class Passes(nn.Module):
    """Gives back its own input, so that an output is an input."""

    def forward(self, value: Any) -> Any:
        return value


class Takes(nn.Module):
    def __init__(self, take: Make) -> None:
        super().__init__()
        self.linear, self.take = nn.Linear(8, 3), take

    def forward(self, value: Any) -> Tensor:
        out: Tensor = self.linear(self.take(value))
        return out


def model(make: Make, take: Make, stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Makes(make), *(Passes() for _ in range(stages - 2)), Takes(take)).double()


def crosses(make: Make, take: Make, stages: int, schedule: str, **options: Any) -> tuple[int, ...]:
    """Trains beside the plain loop; gives the bytes that each worker has sent in the last step."""
    how = {"split": [1] * stages, "schedule": schedule} | options
    with train_beside(model(make, take, stages), batches(steps=2), stages=stages, **how) as engine:
        return engine.trace.sent_bytes


# --- structures ---


@dataclass
class Point:
    h: Tensor
    label: str
    count: int = 3
    nothing: None = None


@dataclass(frozen=True, slots=True)
class Slotted:
    h: Tensor
    scale: float


class Pair(NamedTuple):
    h: Tensor
    flag: bool


class Kind(enum.Enum):
    ONE = "one"


class Bag:
    """A plain object: tensors in attributes, and a private one that is derived from another."""

    def __init__(self, h: Tensor) -> None:
        self.h, self.words, self._half = h, ["a", "b"], h * 0.5


class ModelOutput(OrderedDict[str, Any]):
    """Results as Hugging Face's transformers gives them: fields that are not None are items, too, by name and by number."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        made, _, *rest = reduced
        return (made, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest)  # type: ignore[arg-type]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self.keys())


@dataclass
class Hidden(ModelOutput):
    last: Tensor
    states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def is_hidden(value: Any) -> Tensor:
    assert type(value) is Hidden
    assert value.states is not None
    assert list(value.keys()) == ["last", "states"]
    assert value.attentions is None
    assert value["last"] is value.last
    assert value[1] is value.states
    out: Tensor = value.last + value["states"][1] + value[1][0]
    return out


def is_point(value: Any) -> Tensor:
    assert (type(value), value.label, value.count, value.nothing) == (Point, "a label", 3, None)
    out: Tensor = value.h * value.count
    return out


def is_bag(value: Any) -> Tensor:
    assert (type(value), value.words) == (Bag, ["a", "b"])
    out: Tensor = value.h + value._half
    return out


def is_plain(value: Any) -> Tensor:
    h, *rest = value
    assert rest == ["text", b"bytes", 3, -(10**30), 0.1, 2 + 1j, True, None, ..., slice(1, 2), range(3), frozenset("ab"), {1, 2}]
    assert rest[6] is True
    out: Tensor = h * rest[2]
    return out


def is_torch(value: Any) -> Tensor:
    assert value["shape"] == torch.Size([2, 8])
    assert (value["dtype"], value["device"], value["kind"]) == (torch.float64, torch.device("cpu"), Kind.ONE)
    assert value["kind"] is Kind.ONE
    out: Tensor = value["h"]
    return out


def is_twice(value: Any) -> Tensor:
    a, (b, c) = value
    assert a is b
    assert a is not c
    out: Tensor = a.mul_(2.0) + b * c
    return out


def loop(h: Tensor) -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [h]
    found.append(found)
    return found


def is_loop(value: Any) -> Tensor:
    assert value[1] is value
    out: Tensor = value[1][1][0]
    return out


def is_mapping(value: Any) -> Tensor:
    assert (type(value), list(value), value.default_factory) == (collections.defaultdict, [(1, "b"), None], list)
    assert value["new"] == []
    queue = value[None]
    assert (type(queue), queue.maxlen) == (collections.deque, 5)
    out: Tensor = value[(1, "b")] + queue[0]
    return out


def is_many(value: Any) -> Tensor:
    assert len(value) == 60
    out: Tensor = sum(value[1:], value[0])
    return out


PLAIN = ("text", b"bytes", 3, -(10**30), 0.1, 2 + 1j, True, None, ..., slice(1, 2), range(3), frozenset("ab"), {1, 2})
STRUCTURES: dict[str, tuple[Make, Make]] = {
    "dataclass": (lambda h: Point(h, "a label"), is_point),
    "frozen dataclass with slots": (lambda h: Slotted(h, 0.5), lambda v: v.h * v.scale),
    "named tuple": (lambda h: Pair(h, True), lambda v: v.h if v.flag is True and type(v) is Pair else None),
    "ordered-dict output": (lambda h: Hidden(last=h, states=(h * 2, h.tanh())), is_hidden),
    "plain object": (Bag, is_bag),
    "plain values": (lambda h: (h, *PLAIN), is_plain),
    "torch's own": (lambda h: {"h": h, "shape": h.shape, "dtype": h.dtype, "device": h.device, "kind": Kind.ONE}, is_torch),
    "one tensor twice": (lambda h: (h, [h, h.tanh()]), is_twice),
    "a list in itself": (loop, is_loop),
    "mappings": (lambda h: collections.defaultdict(list, {(1, "b"): h, None: collections.deque([h.exp()], 5)}), is_mapping),
    "sixty tensors": (lambda h: [h * i for i in range(60)], is_many),
    "a partial": (lambda h: functools.partial(torch.mul, h), lambda v: v(2.0)),
    "a closure": (lambda h: lambda factor: h.tanh() * factor, lambda v: v(2.0)),
    "an iterator": (lambda h: iter([h, h.tanh()]), lambda v: sum(v)),
    "a map": (lambda h: map(torch.tanh, (h, h * 2)), lambda v: sum(v)),
    "a set": (lambda h: {h}, lambda v: next(iter(v))),
    "a dict's values": (lambda h: {"a": h, "b": h.tanh()}.values(), lambda v: sum(v)),
    "nothing": (lambda h: None, lambda v: torch.ones(2, 8).double() if v is None else None),
    "only text": (lambda h: "text", lambda v: torch.ones(2, 8).double() * len(v)),
    "an empty structure": (lambda h: {}, lambda v: torch.ones(2, 8).double() if v == {} else None),
    "an empty structure beside": (lambda h: ((), [], {}, h, ""), lambda v: v[3] if v[:3] == ((), [], {}) else None),
}


@HOW
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str, stages: int, schedule: str) -> None:
    crosses(*STRUCTURES[name], stages, schedule)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_generator_is_refused_by_name(stages: int) -> None:
    m = model(lambda h: (t for t in (h, h)), lambda v: sum(v), stages)
    x, y = batches(steps=1)[0]
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=stages, micro_batches=4) as engine:
        with pytest.raises(StageError, match=r"F0@0 .*a generator cannot be sent to another worker.*split=") as caught:
            engine.train_step(x, target=y)
        assert caught.value.stage == 0
        assert set(engine.gradients().values()) == {None}


class Packs(nn.Module):
    """Padded rows to a packed sequence, whose rows are neither those of the batch nor in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        lengths = torch.arange(len(x)) % 4 + 1
        return nn.utils.rnn.pack_padded_sequence(self.linear(x), lengths, batch_first=True, enforce_sorted=False)


class Pads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, value: Any) -> Tensor:
        packed, (h, _) = value
        padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=4)
        out: Tensor = self.linear(padded + h[-1][:, None] * lengths[:, None, None])
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [[1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_packed_sequences(split: list[int], schedule: str) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(Packs(), nn.LSTM(8, 8, batch_first=True), Pads()).double()
    data = [(torch.randn(8, 4, 6).double(), torch.randn(8, 4, 3).double()) for _ in range(2)]
    train_beside(m, data, stages=len(split), split=split, schedule=schedule).close()


# --- types, sizes, views ---

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]


@HOW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, stages: int, schedule: str) -> None:
    """Those that can carry a gradient do."""

    def take(value: tuple[Tensor, Tensor]) -> Tensor:
        h, other = value
        assert other.dtype is dtype
        assert other.requires_grad is (dtype.is_floating_point or dtype.is_complex)
        return h + (other.abs() if dtype.is_complex else other).double()

    def make(h: Tensor) -> tuple[Tensor, Tensor]:
        return h, (h * 3 if dtype.is_complex or dtype.is_floating_point else h.abs() * 3).to(dtype)

    crosses(make, take, stages, schedule)


COMPLEX: dict[str, tuple[Make, Make]] = {
    "view_as_complex": (lambda h: torch.view_as_complex(h.view(-1, 4, 2)), lambda v: torch.view_as_real(v * v).flatten(1)),
    "conjugated lazily": (lambda h: torch.complex(h, h.tanh()).conj(), lambda v: (v * (1 + 2j)).real),
    "negated lazily": (lambda h: torch.complex(h, h.tanh()).conj().imag, lambda v: v * 2),
    "fft": (lambda h: torch.fft.rfft(h), lambda v: torch.fft.irfft(v, 8)),
}


@HOW
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str, stages: int, schedule: str) -> None:
    crosses(*COMPLEX[name], stages, schedule)


SIZES: dict[str, tuple[Make, Make]] = {
    "a 0-dim tensor": (lambda h: (h, h.mean()), lambda v: v[0] * v[1]),
    "only a 0-dim tensor": (lambda h: h.square().sum(), lambda v: v.expand(2, 8)),
    "a 0-dim integer": (lambda h: (h, (h > 0).sum()), lambda v: v[0] * v[1]),
    "no rows": (lambda h: (h, h[:0]), lambda v: v[0] + v[1].sum()),
    "no columns": (lambda h: (h, h[:, :0], torch.empty(0, 3, 0)), lambda v: torch.cat([v[0], v[1]], 1) + v[2].sum()),
    "only no rows": (lambda h: h[:0], lambda v: v.sum(0, keepdim=True).expand(2, 8)),
    "one row more": (lambda h: torch.cat([h, h[:1]]), lambda v: v[1:] + v[:-1]),
    "many dimensions": (lambda h: h.view(-1, 1, 2, 1, 2, 1, 2), lambda v: v.reshape(-1, 8)),
}


@HOW
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, stages: int, schedule: str) -> None:
    crosses(*SIZES[name], stages, schedule)


ROW = 8 * 8  # bytes of eight features
VIEWS: dict[str, tuple[Make, Make, int]] = {
    "whole": (lambda h: h, lambda v: v, 8 * ROW),
    "expanded columns": (lambda h: h[:, :1].expand(-1, 8), lambda v: v * torch.arange(8), 8 * 8),
    "a new dimension": (lambda h: h.unsqueeze(1).expand(-1, 5, -1), lambda v: v.sum(1), 8 * ROW),
    "transposed": (lambda h: h.t(), lambda v: v.t(), 8 * ROW),
    "permuted": (lambda h: h.view(-1, 2, 4).permute(2, 0, 1), lambda v: v.permute(1, 2, 0).reshape(-1, 8), 8 * ROW),
    "two of eight columns": (lambda h: h[:, 2:4], lambda v: v.repeat(1, 4), 8 * 2 * 8),
    "every fourth column": (lambda h: h[:, ::4], lambda v: v.repeat(1, 4), 8 * 2 * 8),
    "the last row": (lambda h: h[1:], lambda v: v.expand(2, -1), 4 * ROW),
    "overlapping windows": (lambda h: h.unfold(1, 4, 2), lambda v: F.pad(v.flatten(1), (0, -4)), 8 * ROW),
    "a diagonal": (lambda h: h.diagonal(), lambda v: v.sum().expand(2, 8), 4 * 2 * 8),
}


@HOW
@pytest.mark.parametrize("name", VIEWS)
def test_only_a_views_own_bytes_travel(name: str, stages: int, schedule: str) -> None:
    make, take, nbytes = VIEWS[name]
    sent = crosses(make, take, stages, schedule)
    assert sent[0] == nbytes  # nothing but the tensor, in four micro-batches of two rows


def test_only_a_rows_own_bytes_travel_of_a_large_table() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1000, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.table[10:12]

    torch.manual_seed(0)
    m = nn.Sequential(Table(), Takes(lambda v: v)).double()
    with train_beside(m, batches(steps=2), stages=2) as engine:
        assert engine.trace.sent_bytes[0] == 4 * 2 * ROW


def test_an_expanded_gradient_travels_as_its_own_bytes() -> None:
    """The gradient of a sum is one number a row, expanded; through the middle stage it comes with its strides, and goes on so."""
    sent = crosses(lambda h: h, lambda v: v.sum(1, keepdim=True).expand(-1, 8), 3, "1f1b")
    assert sent[2] == sent[1] - 8 * ROW == 8 * 8


# --- several outputs of one node ---


class TwoOutputs(torch.autograd.Function):
    """A value, and one that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x * 2, sign

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        out: Tensor = gradients[0] * 2
        return out


def two_outputs(h: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = TwoOutputs.apply(h)  # type: ignore[no-untyped-call]
    return out


NODES: dict[str, tuple[Make, Make]] = {
    "unbind": (lambda h: h.view(-1, 2, 4).unbind(1), lambda v: torch.cat([v[1], v[0] * 2], 1)),
    "unbind, one unused": (lambda h: h.view(-1, 2, 4).unbind(1), lambda v: torch.cat([v[0], v[0] * 2], 1)),
    "unbind of rows": (lambda h: h.unbind(0), lambda v: torch.stack([v[1] * v[0], v[0]])),
    "chunk": (lambda h: h.chunk(2, 1), lambda v: torch.cat([v[1] * v[0], v[0]], 1)),
    "split": (lambda h: h.split([3, 5], 1), lambda v: torch.cat([v[1], v[0].tanh()], 1)),
    "topk": (lambda h: h.topk(4, 1), lambda v: torch.cat([v.values * 2, v.indices.double()], 1)),
    "sort": (lambda h: h.sort(1), lambda v: v[0].scatter(1, v[1], v[0] * 3)),
    "max": (lambda h: h.view(-1, 4, 2).max(2), lambda v: torch.cat([v.values, v.values * v.indices], 1)),
    "max, values unused": (lambda h: (h, h.view(-1, 4, 2).max(2)), lambda v: v[0] * v[1].indices.sum()),
    "median": (lambda h: (h, h.median(1)), lambda v: v[0] * v[1].values[:, None]),
    "max_pool with indices": (
        lambda h: F.max_pool1d(h[:, None], 2, return_indices=True),
        lambda v: F.max_unpool1d(v[0], v[1], [2])[:, 0],
    ),
    "qr": (lambda h: torch.linalg.qr(h.view(-1, 4, 2)), lambda v: (v[0] @ v[1] * 2 + v[0]).flatten(1)),
    "qr, one unused": (lambda h: torch.linalg.qr(h.view(-1, 4, 2)), lambda v: v.Q.flatten(1)),
    "frexp": (lambda h: torch.frexp(h), lambda v: v.mantissa * v.exponent),
    "a function with an output that is not differentiable": (two_outputs, lambda v: v[0] * v[1]),
    "var_mean": (lambda h: (h, torch.var_mean(h, 1, keepdim=True)), lambda v: (v[0] - v[1][1]) / v[1][0].sqrt()),
}


@HOW
@pytest.mark.parametrize("name", NODES)
def test_several_outputs_of_one_node(name: str, stages: int, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # max_unpool is not deterministic on other devices
        crosses(*NODES[name], stages, schedule)


class UsesMany(nn.Module):
    """A graph whose values come from nodes with several outputs, in a forward that is no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        values, order = torch.sort(torch.tanh(self.second(a)), 1)
        top = values.topk(2, 1)
        found = torch.gather(b, 1, order) + values.detach() * b
        found = found.mul_(top.values.repeat(1, 2)).add_(top.indices.repeat(1, 2))
        both = torch.cat([found, a], 1)
        out: Tensor = self.head(both.relu_() + both)
        return out


@HOW
def test_several_outputs_in_a_captured_graph(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    train_beside(UsesMany().double(), batches(), stages=stages, schedule=schedule).close()


# --- outputs that some micro-batches use ---


class Branches(nn.Module):
    """Two heads, and whether the second is wanted: the micro-batch's first number tells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        return self.a(x), self.b(x), bool(x[0, 0] > 0)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, value: tuple[Tensor, Tensor, bool]) -> Tensor:
        a, b, wanted = value
        out: Tensor = self.linear(a + self.gate(b) if wanted else a)
        return out


def wanted_in(micro_batches: str) -> tuple[Tensor, Tensor]:
    """A batch of four micro-batches of two rows; those marked + want the second head."""
    x, y = batches(steps=1)[0]
    x[::2, 0] = torch.tensor([1.0 if mark == "+" else -1.0 for mark in micro_batches], dtype=x.dtype)
    return x, y


@HOW
@pytest.mark.parametrize("steps", [["----"], ["+---"], ["---+"], ["-+-+", "----", "++++"], ["----", "--+-", "----"]], ids=" ".join)
def test_outputs_that_some_micro_batches_use(steps: list[str], stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(Branches(), *(Passes() for _ in range(stages - 2)), Chooses()).double()

    def decayed(module: nn.Module) -> torch.optim.Optimizer:  # moves a weight whose gradient is zero, and not one whose is None
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3)

    data = [wanted_in(step) for step in steps]
    with train_beside(m, data, stages=stages, split=[1] * stages, schedule=schedule, optimizer=decayed) as engine:
        found = engine.gradients()
    last = [n for n in found if n.startswith("0.b.") or ".gate." in n]
    assert len(last) == 4
    assert all((found[name] is None) is (steps[-1] == "----") for name in last)


# --- what changes from micro-batch to micro-batch ---


def number(h: Tensor) -> int:
    """Some number that differs between the micro-batches, and moves with the weights."""
    return int(h.detach().abs().sum() * 1000) % 5


CHANGING: dict[str, tuple[Make, Make]] = {
    "rows": (lambda h: h.repeat(number(h), 1), lambda v: v.sum(0, keepdim=True).expand(2, 8)),
    "rows that are positive": (lambda h: h[h[:, 0] > 0], lambda v: v.sum(0, keepdim=True).expand(2, 8)),
    "dimensions": (lambda h: h.view(-1, *[1] * number(h), 8), lambda v: v.reshape(-1, 8)),
    "structure": (lambda h: [h, (h,), {"h": h}, {"h": None, "g": h}, h * 2][number(h)], lambda v: found_in(v)),
    "type": (lambda h: h.to([torch.float64, torch.float32, torch.bfloat16][number(h) % 3]), lambda v: v.double()),
    "whether it needs a gradient": (lambda h: (h.tanh(), h.detach() if number(h) % 2 else h), lambda v: v[0] + v[1]),
    "which needs a gradient": (lambda h: (h.detach(), h) if number(h) % 2 else (h, h.detach()), lambda v: v[0] + v[1].tanh()),
    "whether anything is used": (lambda h: (number(h), h), lambda v: v[1] if v[0] % 2 else v[1].detach()),
    "whether there is a tensor": (lambda h: h if number(h) % 2 else None, lambda v: torch.ones(2, 8).double() if v is None else v),
    "number of tensors": (lambda h: [h.tanh() for _ in range(number(h) + 1)], lambda v: sum(v)),
    "strides": (lambda h: h.t().contiguous().t() if number(h) % 2 else h, lambda v: v * 2),
}


def found_in(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0] if isinstance(value, tuple) else value["h"] if value["h"] is not None else value["g"]
    return value


def test_the_micro_batches_do_differ() -> None:
    with torch.no_grad():
        linear = model(lambda h: h, lambda v: v, 2)[0].linear
        assert isinstance(linear, nn.Linear)
        numbers = [number(linear(xs)) for x, _ in batches(16, 2) for xs in x.chunk(8)]
    assert len(set(numbers)) > 3


@HOW
@pytest.mark.parametrize("name", CHANGING)
def test_what_crosses_may_change_with_every_micro_batch(name: str, stages: int, schedule: str) -> None:
    m = model(*CHANGING[name], stages)
    train_beside(m, batches(16, 2), micro_batches=8, stages=stages, split=[1] * stages, schedule=schedule).close()


@HOW
def test_shapes_may_change_with_every_step(schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    between = [nn.ReLU(inplace=True), nn.Tanh()][: stages - 2]
    m = nn.Sequential(nn.Conv1d(2, 4, 3), *between, nn.AdaptiveAvgPool1d(3)).double()
    data = [(torch.randn(rows, 2, length).double(), torch.randn(rows, 4, 3).double()) for rows, length in [(8, 5), (3, 9), (7, 5), (1, 4)]]
    train_beside(m, data, stages=stages, schedule=schedule).close()


# --- writing in place, first thing in a stage ---


def written(value: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(value)
    return value


def write_quietly(t: Tensor) -> None:
    with torch.no_grad():
        t.mul_(2.0)


WRITES: dict[str, tuple[Make, Make]] = {
    "one of a tuple": (lambda h: (h, h.tanh()), lambda v: v[0].mul_(2.0) + v[1]),
    "integers": (lambda h: (h, (h > 0).long()), lambda v: v[0] * v[1].add_(1)),
    "a mask": (lambda h: (h, h > 0), lambda v: v[0].masked_fill_(v[1].logical_not_(), 0.5)),
    "what needs no gradient": (lambda h: (h, h.detach() * 2), lambda v: v[0] * v[1].add_(1)),
    "gradients into what needs none": (lambda h: (h, h.detach() * 2), lambda v: v[1].add_(v[0].tanh())),
    "a row": (lambda h: h, lambda v: written(v, lambda t: t[0].zero_())),
    "where a mask is": (lambda h: h, lambda v: written(v, lambda t: t.__setitem__(t.detach() > 0, 1.0))),
    "a copy": (lambda h: (h, h.tanh()), lambda v: v[0].copy_(v[1])),
    "a column of another": (lambda h: (h, h.tanh()), lambda v: written(v[0], lambda t: t[:, 1:3].copy_(v[1][:, 3:5]))),
    "into an expanded input's clone": (lambda h: h[:, :1].expand(-1, 8), lambda v: v.clone().mul_(torch.arange(8))),
    "transposed": (lambda h: h, lambda v: v.t_().t()),
    "unsqueezed": (lambda h: h, lambda v: v.unsqueeze_(0)[0]),
    "without the graph's knowledge": (lambda h: h, lambda v: written(v, write_quietly)),
    "through .data": (lambda h: h, lambda v: written(v, lambda t: t.data.mul_(2.0))),
    "detached": (lambda h: (h, h.tanh()), lambda v: v[0].detach_() + v[1]),
    "into the first of two columns": (lambda h: (h[:, :4].clone(), h[:, 4:]), lambda v: torch.cat([v[0].relu_(), v[1]], 1)),
    "a view of it": (lambda h: h, lambda v: written(v, lambda t: t.view(-1, 2, 4)[:, 0].exp_())),
    "a transposed input": (lambda h: h.t(), lambda v: v.sigmoid_().t()),
    "a complex input": (lambda h: torch.complex(h, h.tanh()), lambda v: v.mul_(1j).real),
}


@HOW
@pytest.mark.parametrize("name", WRITES)
def test_a_stage_may_begin_with_a_write(name: str, stages: int, schedule: str) -> None:
    crosses(*WRITES[name], stages, schedule)


class WritesAndPasses(nn.Module):
    """Writes into what it got, and hands on that and what it made of it."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        value.mul_(2.0)
        return value, value.tanh()


class AddsTo(nn.Module):
    """Writes into what has been written before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.linear(value[0].add_(value[1]))
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [[1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_a_value_that_two_stages_write_into(split: list[int], schedule: str) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(6, 8), WritesAndPasses(), AddsTo()).double()
    train_beside(m, batches(), stages=len(split), split=split, schedule=schedule).close()


ALIASES: dict[str, Make] = {
    "a view and its base": lambda h: (h.view(-1, 8), h),
    "a detached twin": lambda h: (h.detach(), h),
    "a row": lambda h: (h[:1], h),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", ALIASES)
def test_a_write_into_one_of_two_views_is_refused_on_any_later_stage(name: str, stages: int, schedule: str) -> None:
    """Also where a stage between has only handed them on."""
    m = model(ALIASES[name], lambda v: written(v[1], lambda t: v[0].mul_(2.0)), stages)
    x, y = batches(steps=1)[0]
    how: dict[str, Any] = {"stages": stages, "split": [1] * stages, "micro_batches": 4, "schedule": schedule}
    with pipe.Engine(m, sgd(m), nn.MSELoss(), **how) as engine, pytest.raises(StageError, match="writes in place into its input"):
        engine.train_step(x, target=y)


APART: dict[str, tuple[Make, Make]] = {
    "columns": (lambda h: (h[:, :4], h[:, 4:]), lambda v: torch.cat([v[0].mul_(2.0), v[1]], 1)),
    "every second": (lambda h: [h[:, ::2], h[:, 1::2]], lambda v: torch.cat([v[0], v[1].exp_()], 1)),
    "heads": (lambda h: (h.view(-1, 2, 4)[:, 0], h.view(-1, 2, 4)[:, 1]), lambda v: torch.cat([v[0].mul_(2.0), v[1].mul_(3.0)], 1)),
    "heads of one projection": (
        lambda h: h.view(-1, 2, 2, 2).permute(2, 0, 1, 3),
        lambda v: (v[0].mul_(2.0) + v[1]).flatten(1).repeat(1, 2),
    ),
}


@HOW
@pytest.mark.parametrize("name", APART)
def test_a_write_into_one_of_two_that_have_no_element_in_common(name: str, stages: int, schedule: str) -> None:
    crosses(*APART[name], stages, schedule)


class Drops(nn.Module):
    """Hands on the second of two views, and what it made of the first."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return value[0].exp(), value[1]


@pytest.mark.parametrize("stages", [3, 4])
def test_a_write_into_a_view_whose_twin_stayed_behind(stages: int) -> None:
    torch.manual_seed(0)
    between = [Passes() for _ in range(stages - 3)]
    m = nn.Sequential(Makes(lambda h: (h * 1.0, h.view(2, -1, 8).flatten(0, 1))), *between, Drops(), Takes(lambda v: v[0] + v[1].mul_(2.0)))
    train_beside(m.double(), batches(steps=2), stages=stages, split=[1] * stages).close()


class Looks(nn.Module):
    """Hands on views of what it got."""

    def forward(self, value: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"row": value[0][0], "all": value[1].view(-1)}


def test_views_that_a_stage_between_makes_are_known_by_where_they_lie() -> None:
    m = nn.Sequential(Makes(lambda h: (h, h[1:])), Looks(), Takes(lambda v: v["all"].mul_(2.0).view(-1, 8).sum(0) + v["row"])).double()
    x, y = batches(steps=1)[0]
    train_beside(m, [(x, y[:1].expand(8, 3))], micro_batches=2, loss_fn=lambda out, target: F.mse_loss(out, target[0]), stages=3).close()
    m[0].make = lambda h: (h, h[:2])  # the row is in both
    with pipe.Engine(m, sgd(m), lambda out, target: F.mse_loss(out, target[0]), stages=3, split=[1, 1, 1], micro_batches=2) as engine:
        with pytest.raises(StageError, match="writes in place into its input"):
            engine.train_step(x, target=y)


class Owns(nn.Module):
    """Hands on a buffer, or a parameter, of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        if kind == "buffer":
            self.register_buffer("own", torch.ones(8))
        else:
            self.own = nn.Parameter(torch.ones(8), requires_grad=kind == "parameter")

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.linear(x), self.own


def scale_owned(value: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        value[1].mul_(0.9)
    return value[0] + 0.0 * value[1].detach()


@pytest.mark.parametrize("kind", ["buffer", "parameter", "frozen"])
def test_a_buffer_or_parameter_that_crosses_is_read(kind: str) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(Owns(kind), Passes(), Takes(lambda v: v[0] * v[1])).double()
    for split in ([1, 2], [1, 1, 1]):
        train_beside(copy.deepcopy(m), batches(steps=2), stages=len(split), split=split).close()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "frozen"])
def test_a_write_into_another_stages_buffer_is_kept_or_refused(kind: str, stages: int) -> None:
    """In one process the layer that owns it sees the new value at the next micro-batch."""
    torch.manual_seed(0)
    m = nn.Sequential(Owns(kind), *(Passes() for _ in range(stages - 2)), Takes(scale_owned)).double()
    x, y = batches(steps=1)[0]
    reference, loss_fn = copy.deepcopy(m), nn.MSELoss()
    with pipe.Engine(m, sgd(m), loss_fn, stages=stages, split=[1] * stages, micro_batches=4, strategy="pipeline") as engine:
        try:
            found = engine.train_step(x, target=y)
        except StageError as error:
            assert "in place" in str(error)  # noqa: PT017
            return
        assert found == plain(reference, sgd(reference), x, y, 4, loss_fn)
        same_weights(engine, reference)


@pytest.mark.parametrize("use", ["train_step", "predict"])
@pytest.mark.parametrize("name", ["a row", "transposed", "detached", "buffer", "output"])
def test_a_write_into_a_view_of_another_stages_weight_is_refused(name: str, use: str) -> None:
    views: dict[str, Callable[[nn.Linear], Tensor]] = {
        "a row": lambda linear: linear.weight[0],
        "transposed": lambda linear: linear.weight.t(),
        "detached": lambda linear: linear.bias.detach(),
        "buffer": lambda linear: linear.get_buffer("own")[1:],
        "output": lambda linear: linear.weight.data,
    }

    class Gives(Makes):
        def forward(self, x: Tensor) -> Any:
            return self.linear(x), views[name](self.linear)

    def take(v: Any) -> Tensor:
        with torch.no_grad():
            v[1].mul_(0.9)
        out: Tensor = v[0]
        return out

    m = nn.Sequential(Gives(lambda h: h), Passes(), Takes(take)).double()
    m[0].linear.register_buffer("own", torch.ones(4))  # type: ignore[union-attr, operator]
    x, y = batches(steps=1)[0]
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=3, split=[1, 1, 1], micro_batches=4) as engine:
        with pytest.raises(StageError, match="is a parameter or buffer of an earlier stage, which would not see it"):
            engine.train_step(x, target=y) if use == "train_step" else engine.predict(x)


class Masks(nn.Module):
    def __init__(self, width: int, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(width, 4), writes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * mask.clone()
        if self.writes:
            mask.mul_(2.0)
        return out


def masked_beside(stages: int) -> None:
    """A keyword argument that every layer names, and the first two write into."""
    torch.manual_seed(0)
    m = nn.Sequential(Masks(6, True), Masks(4, True), Masks(4, False)).double()
    reference = copy.deepcopy(m)
    x, y, mask = torch.randn(8, 6).double(), torch.randn(8, 4).double(), torch.rand(8, 1).double()
    kept, want = mask.clone(), 0.0
    for xs, ms, ys in zip(x.chunk(4), mask.clone().chunk(4), y.chunk(4)):
        value = xs
        for layer in reference:
            value = layer(value, ms)
        loss = F.mse_loss(value, ys) * 0.25
        loss.backward()  # type: ignore[no-untyped-call]
        want += loss.item()
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=stages, split=[1] * 3 if stages == 3 else [3], micro_batches=4) as engine:
        try:
            assert engine.forward_backward(x, mask=mask, target=y) == want
        except StageError as error:
            assert "in place" in str(error)  # noqa: PT017
            return
        finally:
            assert torch.equal(mask, kept)
        same_weights(engine, reference)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_write_into_a_keyword_argument_reaches_later_stages_or_is_refused(stages: int) -> None:
    masked_beside(stages)


@pytest.fixture
def _processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that get copies of what the controller gives, as those in other processes do."""
    tell = LocalCrew.tell

    def tell_copies(self: LocalCrew, name: str, payloads: Any) -> int:
        return tell(self, name, {w: copy.deepcopy(p) if name == "step" else p for w, p in payloads.items()})

    monkeypatch.setattr(LocalCrew, "tell", tell_copies)


@pytest.mark.usefixtures("_processes")
def test_a_write_into_a_keyword_argument_reaches_later_processes_or_is_refused() -> None:
    masked_beside(3)


class Shares(nn.Module):
    """Takes a mask by keyword, writes into it, or hands a view on it on; the mask may come as the first argument, too."""

    def __init__(self, write: Make | None = None, gives: bool = False) -> None:
        super().__init__()
        self.linear, self.write, self.gives = nn.Linear(6, 6), write, gives

    def forward(self, x: Any, mask: Tensor) -> Any:
        x, given = x if isinstance(x, tuple) else (x, None)
        out: Tensor = self.linear(x) * mask.clone()
        if self.write is not None:
            self.write(mask if given is None else given)
        return (out, mask.view(-1)) if self.gives else out


class Hands(Shares):
    """Takes no mask, and writes into the view that came."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        if self.write is not None:
            self.write(x[1])
        return self.linear(x[0])


MASKED: dict[str, list[nn.Module]] = {
    "a view": [Shares(lambda mask: mask.view(-1)[:1].zero_()), Shares(), Shares()],
    "relu": [Shares(), Shares(lambda mask: F.relu(mask, inplace=True)), Shares()],
    "by .T": [Shares(lambda mask: mask.T.add_(1.0)), nn.Tanh(), Shares()],
    "a view that was handed on": [Shares(gives=True), Hands(lambda view: view.mul_(2.0)), Shares()],
    "a view beside it": [Shares(gives=True), Shares(lambda view: view.mul_(2.0)), nn.Tanh()],
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MASKED)
def test_a_write_into_a_keyword_argument_that_a_later_stage_has(name: str, mode: Any, apart: bool, request: pytest.FixtureRequest) -> None:
    if apart:
        request.getfixturevalue("_processes")
    x, mask = torch.randn(8, 6), torch.rand(8, 1)
    kept = mask.clone()
    with pipe.Engine(MASKED[name], None, nn.MSELoss(), stages=3, split=[1, 1, 1], micro_batches=4) as engine:
        with pytest.raises(StageError, match="writes in place into its input"), mode():
            engine.forward_backward(x, mask=mask, target=x) if mode is torch.enable_grad else engine.predict(x, mask=mask)
        assert torch.equal(mask, kept)


def test_a_tensor_that_is_an_argument_and_a_keyword_argument() -> None:
    """In one process it is one tensor, so a write into the one is one into the other."""

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0)

    x = torch.rand(8, 6)
    with pipe.Engine([First(), Shares()], None, nn.MSELoss(), stages=2, micro_batches=4) as engine:
        with pytest.raises(StageError, match="which a later stage takes, too, as it was"):
            engine.predict(x, mask=x)
        assert engine.predict(x, mask=x.clone()).shape == x.shape


@pytest.mark.parametrize("apart", [False, True])
def test_the_last_stage_that_has_a_keyword_argument_may_write_into_it(apart: bool, request: pytest.FixtureRequest) -> None:
    """Also where the backward of an earlier one needs it: in one process that would be an error of torch's."""
    if apart:
        request.getfixturevalue("_processes")
    torch.manual_seed(0)
    layers: list[nn.Module] = [Shares().double(), Shares(F.relu_).double()]
    reference = copy.deepcopy(nn.ModuleList(layers))
    x, y = torch.randn(2, 8, 6).double()
    mask, want = torch.randn(8, 1).double(), 0.0
    for xs, ms, ys in zip(x.chunk(4), mask.chunk(4), y.chunk(4)):
        loss = F.mse_loss(reference[1](reference[0](xs, ms.clone()), ms.clone()), ys) * 0.25
        loss.backward()  # type: ignore[no-untyped-call]
        want += loss.item()
    with pipe.Engine(layers, None, nn.MSELoss(), stages=2, micro_batches=4) as engine:
        assert engine.forward_backward(x, mask=mask, target=y) == want
        found = engine.gradients()
        assert all(same_tensor(found[name], p.grad) for name, p in reference.named_parameters())


class WritesInput(nn.Module):
    """A graph that writes into its input first, and reads it last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        h = torch.tanh(self.second(torch.tanh(self.first(x.clone()))))
        out: Tensor = self.head(h + x)
        return out


def written_input_beside() -> None:
    torch.manual_seed(0)
    m = WritesInput().double()
    reference = copy.deepcopy(m)
    x, y = batches(steps=1)[0]
    want = plain(reference, sgd(reference), x.clone(), y, 4, nn.MSELoss())
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=3, micro_batches=4, strategy="pipeline") as engine:
        kept = x.clone()
        try:
            assert engine.train_step(x, target=y) == want
        except StageError as error:
            assert "in place" in str(error)  # noqa: PT017
            return
        finally:
            assert torch.equal(x, kept)
        same_weights(engine, reference)


def test_a_write_into_an_input_of_a_captured_graph() -> None:
    written_input_beside()


@pytest.mark.usefixtures("_processes")
def test_a_write_into_an_input_of_a_captured_graph_between_processes() -> None:
    written_input_beside()


# --- autograd inside a stage ---


class Guarded(nn.Module):
    """A layer in a context: without gradients, with a checkpoint, or detached on one of its ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Any:
        if self.how == "no_grad":
            with torch.no_grad():
                return torch.tanh(self.linear(x))
        if self.how == "no_grad beside":
            with torch.no_grad():
                quiet = torch.tanh(self.linear(x))
            return x * quiet
        if self.how == "detached branch":
            return torch.tanh(self.linear(x)) + self.linear(x.detach())
        if self.how == "detached":
            return x + self.linear(x).detach()
        if self.how == "set_grad_enabled":
            with torch.set_grad_enabled(bool(x.detach().sum() > 0)):
                quiet = self.linear(x)
            return x + quiet
        return checkpoint(self._run, x, use_reentrant=self.how == "reentrant")

    def _run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


GUARDS = ["no_grad", "no_grad beside", "detached branch", "detached", "set_grad_enabled", "reentrant", "not reentrant"]


@HOW
@pytest.mark.parametrize("how", GUARDS)
def test_contexts_inside_a_stage(how: str, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(6, 8), Guarded(how), nn.Tanh(), Guarded(how), nn.Linear(8, 3)).double()
    split = {2: [3, 2], 3: [1, 1, 3], 4: [1, 2, 1, 1]}[stages]
    train_beside(m, batches(steps=2), stages=stages, split=split, schedule=schedule).close()


def test_c36_autocast_inside_one_stage() -> None:
    """bfloat16 crosses, its gradient is bfloat16, and those of the weights are as the weights."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Low(nn.Module):
        def __init__(self, entries: int, exits: int) -> None:
            super().__init__()
            self.linear = nn.Linear(entries, exits)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.linear(x)
            return out

    class Sees(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: seen.append((x.dtype, gradient.dtype)))  # type: ignore[no-untyped-call]
            return x * 1.0

    torch.manual_seed(0)
    m = nn.Sequential(Low(6, 8), Sees(), Low(8, 8), Sees(), nn.Linear(8, 3, dtype=torch.bfloat16))
    for split in ([1, 4], [2, 3], [1, 2, 2]):
        seen.clear()

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output.float(), target)

        data = batches(steps=1, dtype=torch.float32)
        with train_beside(copy.deepcopy(m), data, loss_fn, stages=len(split), split=split) as engine:
            dtypes = {name: gradient.dtype for name, gradient in engine.gradients().items() if gradient is not None}
            assert dtypes == {name: parameter.dtype for name, parameter in m.named_parameters()}
        assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


def force(x: Tensor) -> Tensor:
    """Minus the slope of an energy at what the stage got; derivatives of it go on."""
    if not x.requires_grad:
        return x
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return -slope


@HOW
def test_a_derivative_by_what_a_stage_got(stages: int, schedule: str) -> None:
    crosses(lambda h: h.tanh(), lambda v: force(v) + v, stages, schedule)


FUNCTIONALS: dict[str, Make] = {
    "vmap": lambda v: torch.func.vmap(torch.tanh)(v),
    "grad": lambda v: torch.func.grad(lambda t: t.pow(3).sum())(v),
    "jacrev": lambda v: torch.func.vmap(torch.func.jacrev(lambda t: t.pow(3).sum()))(v),
    "vjp": lambda v: torch.func.vjp(torch.sin, v)[1](v)[0],
}


@HOW
@pytest.mark.parametrize("name", FUNCTIONALS)
def test_function_transforms_inside_a_stage(name: str, stages: int, schedule: str) -> None:
    crosses(lambda h: h.tanh(), FUNCTIONALS[name], stages, schedule)


def doubled(t: Tensor) -> Tensor:
    if t.requires_grad:
        t.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return t


def kept(t: Tensor) -> Tensor:
    if t.requires_grad:
        t.retain_grad()
    return t


TENSOR_HOOKS: dict[str, tuple[Make, Make]] = {
    "on what is sent": (lambda h: doubled(h), lambda v: v),
    "on what is sent, beside": (lambda h: (doubled(h), h.tanh()), lambda v: v[0] + v[1]),
    "on what came": (lambda h: h, lambda v: doubled(v)),
    "retain_grad": (lambda h: kept(h), lambda v: kept(v)),
}


@HOW
@pytest.mark.parametrize("name", TENSOR_HOOKS)
def test_hooks_on_tensors(name: str, stages: int, schedule: str) -> None:
    crosses(*TENSOR_HOOKS[name], stages, schedule)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_hook_on_a_tensor_that_came_sees_the_part_of_its_own_stage_and_later_ones(stages: int) -> None:
    """As docs/limits.md has it: where an earlier stage uses the tensor, too, it is as if the hook were on a copy of it."""
    m = model(lambda h: (h, h.tanh()), lambda v: doubled(v[0]) + v[1], stages)
    reference = model(lambda h: (h, h.tanh()), lambda v: doubled(v[0].clone()) + v[1], stages)
    x, y = batches(steps=1)[0]
    with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=stages, split=[1] * stages, micro_batches=4, strategy="pipeline") as engine:
        assert engine.train_step(x, target=y) == plain(reference, sgd(reference), x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


# --- attributes ---


class Tagged(Tensor):
    """A subclass that knows something of its own, as torchvision's boxes do."""

    tag: float


def tagged(t: Any) -> Any:
    t.tag = 3.0
    return t


ATTRIBUTES: dict[str, tuple[Make, Make]] = {
    "of a tensor": (lambda h: tagged(h), lambda v: v * v.tag),
    "of one in a structure": (lambda h: (h, tagged(h.tanh())), lambda v: v[0] + v[1] * v[1].tag),
    "of a subclass": (lambda h: (h, tagged(h.detach().as_subclass(Tagged))), lambda v: v[0] * v[1].as_subclass(Tensor) * v[1].tag),
}


def described(t: Any) -> Any:
    """With a tensor that has attributes, itself, and a class of this file."""
    t.mask, t.itself, t.pair = tagged(t.detach() > 0), t, Pair(t * 2, True)
    return t


def is_described(t: Any) -> Tensor:
    assert type(t.pair) is Pair
    assert t.mask.tag == 3.0
    out: Tensor = torch.where(t.mask, t, t.pair.h)
    return out


ATTRIBUTES["of more tensors"] = described, is_described
ATTRIBUTES["of a tensor that is there twice"] = lambda h: [tagged(h), {"again": h}], lambda v: v[1]["again"] * v[0].tag


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_a_tensor_cross_with_it(name: str, stages: int) -> None:
    crosses(*ATTRIBUTES[name], stages, "1f1b")


# --- layouts ---

LAYOUTS: dict[str, tuple[Make, Make]] = {
    "sparse": (lambda h: h.relu().to_sparse(), lambda v: v.to_dense()),
    "sparse rows": (lambda h: (h, h.detach().relu().to_sparse_csr()), lambda v: v[0] + v[1].to_dense()),
    "uncoalesced": (
        lambda h: torch.sparse_coo_tensor(torch.tensor([[0, 0, 1]]), torch.cat([h, h[:1]]), (2, 8)),
        lambda v: v.to_dense(),
    ),
}


@HOW
@pytest.mark.parametrize("name", LAYOUTS)
def test_sparse_tensors(name: str, stages: int, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the state of sparse CSR is beta
        crosses(*LAYOUTS[name], stages, schedule)


def nested(layout: torch.layout) -> Make:
    return lambda h: torch.nested.as_nested_tensor(list(h.unsqueeze(1).unbind(0)), layout=layout)


REFUSED: dict[str, tuple[Make, Make]] = {
    "jagged": (nested(torch.jagged), lambda v: torch.cat(v.unbind())),
    "nested": (nested(torch.strided), lambda v: torch.cat(v.unbind())),
    "mkldnn": (lambda h: h.detach().float().to_mkldnn(), lambda v: v.to_dense().double()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_cannot_cross_are_refused_by_name(name: str) -> None:
    m = model(*REFUSED[name], 2)
    x, y = batches(steps=1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        with pipe.Engine(m, sgd(m), nn.MSELoss(), stages=2, split=[1, 1], micro_batches=4) as engine:
            with pytest.raises(StageError, match=r"cannot cross to the next stage.*split="):
                engine.train_step(x, target=y)
