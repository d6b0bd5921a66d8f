"""Batches of any size and shape, cut for stages: where each argument has its rows, what goes whole, and what is refused by name.

The oracle is the same model in a plain loop over contiguous micro-batches, weighted by rows, bit for bit.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipe
from pipe.action import Op
from pipe.errors import BatchError, PlanError
from tests.single.steps import batches, layers, plain, same_tensor, same_weights, sgd, train_beside

HOW = pytest.mark.parametrize(("stages", "schedule"), [(2, "gpipe"), (2, "1f1b"), (3, "1f1b"), (4, "gpipe")], ids=str)


@dataclass(frozen=True)
class Call:
    """One step: what forward and the loss get, and where each of that has its rows (0 if it is not said; None: nowhere)."""

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, int | None] = field(default_factory=dict)
    rows: int = 8


def run(model: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Layer after layer; each gets the keyword arguments that it names."""
    value = args
    for i, layer in enumerate(model):
        parameters = list(inspect.signature(layer.forward).parameters.values())
        everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in (parameters if i == 0 else parameters[1:])}
        value = (layer(*value, **{name: given for name, given in kwargs.items() if everything or name in names}),)
    return value[0]


def part(value: Any, dim: int | None, cut: slice) -> Any:
    def rows(t: Tensor) -> Tensor:
        return t if t.dim() == 0 or dim is None else t.transpose(0, dim)[cut].transpose(0, dim).contiguous() if t.shape[dim] > 1 else t

    return pytree.tree_map_only(Tensor, rows, value)


def loop(model: Sequence[nn.Module], names: Sequence[str], call: Call, micro_batches: int, loss_fn: Any) -> float:
    """The loss; adds to the gradients."""
    total, start = 0.0, 0
    for piece in torch.arange(call.rows).tensor_split(min(micro_batches, call.rows)):
        cut = slice(start, start + len(piece))
        start += len(piece)
        args = tuple(part(value, call.dims.get(name, 0), cut) for name, value in zip(names, call.args))
        kwargs = {name: part(value, call.dims.get(name, 0), cut) for name, value in call.kwargs.items()}
        output, target = run(model, args, kwargs), part(call.target, call.dims.get("target", 0), cut)
        loss = (output if loss_fn is None else loss_fn(output, target)) * (len(piece) / call.rows)
        loss.backward()
        total += loss.item()
    return total


def beside(model: list[nn.Module], calls: Sequence[Call], loss_fn: Any = None, *, own_loss: bool = False, **options: Any) -> pipe.Engine:
    """An engine that has trained on the calls, with every loss, gradient and weight equal to the plain loop's."""
    whole = nn.Sequential(*model)
    reference = copy.deepcopy(whole)
    own, loss_fn = sgd(reference), None if own_loss else loss_fn or nn.MSELoss()
    found = list(inspect.signature(model[0].forward).parameters)
    names = [name for name in found if name not in ("args", "kwargs")] or [f"args[{i}]" for i in range(9)]
    settings: dict[str, Any] = {"micro_batches": 3, "strategy": "pipeline"} | options
    engine = pipe.Engine(model, sgd(whole), loss_fn, **settings)
    for call in calls:
        own.zero_grad()
        want = loop(list(reference), names, call, settings["micro_batches"], loss_fn)
        own.step()
        assert engine.train_step(*call.args, target=call.target, **call.kwargs) == want
        same_weights(engine, reference)
    return engine


def refused(model: list[nn.Module], args: tuple[Any, ...], text: str, *, target: Any = None, **kwargs: Any) -> None:
    """The batch is refused before anything is sent; then the engine works on."""
    options = {name: kwargs.pop(name) for name in ("batch_dim",) if name in kwargs}
    with pipe.Engine(model, None, lambda output, wanted: output.square().mean(), stages=2, micro_batches=4, **options) as engine:
        with pytest.raises(BatchError, match=text):
            engine.forward_backward(*args, target=target, **kwargs)
        with pytest.raises(PlanError, match="there is no trace yet"):
            engine.trace
        assert set(engine.gradients().values()) == {None}


# --- sizes ---


@HOW
@pytest.mark.parametrize("micro_batches", [3, 4])
def test_every_size_in_one_run(micro_batches: int, stages: int, schedule: str) -> None:
    """That do not divide, smaller than the number of micro-batches, one row, and larger again."""
    data = [batch for rows in (8, 7, 2, 1, 11, 3) for batch in batches(rows, 1)]
    train_beside(layers(), data, micro_batches=micro_batches, stages=stages, schedule=schedule).close()


@pytest.mark.parametrize(("rows", "made"), [(1, 1), (3, 3), (4, 4), (5, 4), (9, 4)])
def test_fewer_rows_than_micro_batches_are_one_row_each(rows: int, made: int) -> None:
    with train_beside(layers(), batches(rows, 1), micro_batches=4, stages=3) as engine:
        done = {event.action.micro_batch for event in engine.trace.events if event.action.op is Op.F and event.action.stage == 2}
        assert done == set(range(made))
        assert engine.predict(batches(rows, 1)[0][0]).shape == (rows, 3)


def test_a_batch_without_rows_is_as_in_one_process() -> None:
    """The mean of nothing is not a number; the gradients are as they are."""
    model, empty = layers(), (torch.zeros(0, 6).double(), torch.zeros(0, 3).double())
    reference = copy.deepcopy(model)
    nn.MSELoss()(reference(empty[0]), empty[1]).backward()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=4, strategy="pipeline") as engine:
        loss = engine.forward_backward(empty[0], target=empty[1])
        assert loss != loss
        assert all(same_tensor(engine.gradients()[name], p.grad) for name, p in reference.named_parameters())
        assert engine.predict(empty[0]).shape == (0, 3)
        engine.zero_grad()
        x, y = batches(8, 1)[0]
        assert engine.train_step(x, target=y) == plain(reference, sgd(reference), x, y, 4, nn.MSELoss())


# --- where the rows are ---


class Recurrent(nn.Module):
    """Sequence first: (steps, batch, features); gives its states, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2)

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, states = self.lstm(x, (h0.contiguous(), c0.contiguous()))
        return out, states


class Reads(nn.Module):
    """The output beside the last state, spread over the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 8)

    def forward(self, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        out, (h, c) = value
        return torch.tanh(self.linear(torch.cat([out, (h[-1] * c[0]).expand_as(out)], -1)))


@HOW
def test_c12_everything_in_dimension_1(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Recurrent().double(), Reads().double(), nn.Linear(8, 3).double(), nn.Tanh()]
    dims = {"x": 1, "h0": 1, "c0": 1, "target": 1}
    calls = [
        Call((torch.randn(5, rows, 6).double(), *torch.randn(2, 2, rows, 5).double()), torch.randn(5, rows, 3).double(), {}, dims, rows)
        for rows in (8, 7, 2)
    ]
    with beside(model, calls, batch_dim=1, stages=stages, schedule=schedule) as engine:
        found = engine.predict(*calls[0].args)
    with torch.no_grad():
        want = torch.cat([run(model, tuple(part(value, 1, slice(m, m + 1)) for value in calls[0].args), {}) for m in range(8)], 1)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stages", [1, 2])
def test_c12_states_are_merged_where_they_came(stages: int) -> None:
    torch.manual_seed(0)
    model = [Recurrent().double(), *(nn.Identity() for _ in range(stages - 1))]
    args = torch.randn(4, 6, 6).double(), torch.randn(2, 6, 5).double(), torch.randn(2, 6, 5).double()
    with pipe.Engine(model, None, stages=stages, micro_batches=3, batch_dim=1) as engine:
        out, (h, c) = engine.predict(*args)
    with torch.no_grad():
        want, (wanted_h, wanted_c) = run(model, args, {})
    for one, other in ((out, want), (h, wanted_h), (c, wanted_c)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Affine(nn.Module):
    """Takes (features, batch) and gives (batch, features); a gain a sample, a bias a feature, a table for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, gain: Tensor, bias: Tensor, table: Tensor) -> Any:
        return self.linear(x.t()) * gain[:, None] + bias + table[0]


@HOW
@pytest.mark.parametrize("last", [-1, 1])
def test_a_dimension_for_each_argument_and_the_target(last: int, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Affine().double(), nn.Tanh(), nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
    dims: dict[str, int | None] = {"x": last, "gain": 0, "bias": None, "table": None, "target": last}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.t())

    def given(rows: int) -> Call:
        x, target = torch.randn(6, rows).double(), torch.randn(3, rows).double()
        return Call((x, torch.randn(rows).double(), torch.randn(4).double()), target, {"table": torch.randn(8, 4).double()}, dims, rows)

    beside(model, [given(8), given(5), given(8)], loss_fn, batch_dim=dims, stages=stages, schedule=schedule).close()


def test_a_dimension_that_is_not_said_is_refused_with_the_one_it_may_be() -> None:
    torch.manual_seed(0)
    model = [Affine(), nn.Linear(4, 3)]
    args = torch.randn(6, 8), torch.randn(8), torch.randn(4)
    refused(model, args, r"'gain' of shape \(8,\) has 8 in dimension 0, but the batch has 6 rows.*batch_dim=", table=torch.randn(8, 4))
    more = {"table": torch.randn(8, 4), "batch_dim": {"x": 1}}
    refused(model, args, r"'bias' of shape \(4,\) has 4 in dimension 0, but the batch has 8 rows.*batch_dim=\{'bias': None\}", **more)


# --- keyword arguments of later stages ---


class Names(nn.Module):
    """A layer that names some of mask, gain, shift, how."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


class NamesMask(Names):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * mask
        return out


class NamesGain(Names):
    def forward(self, x: Tensor, *, gain: Tensor | float = 1.0, how: str | None = None) -> Tensor:
        out = self.linear(x) * gain
        return torch.tanh(out) if how == "tanh" else out


class NamesAll(Names):
    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        assert set(kwargs) <= {"mask", "gain", "how", "shift"}
        out: Tensor = self.linear(x) + (kwargs["shift"] if kwargs.get("shift") is not None else 0.0)
        return out * kwargs["mask"]


class NamesNothing(Names):
    def forward(self, x: Tensor, /) -> Tensor:
        out: Tensor = self.linear(x)
        return out


MASKS: dict[str, tuple[int, ...]] = {
    "a row each": (8, 6),
    "a number each": (8, 1),
    "one for all": (1, 6),
    "one number": (1, 1),
    "0-dim": (),
}


@HOW
@pytest.mark.parametrize("shape", MASKS)
def test_c14_masks_for_stages_that_name_them(shape: str, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model: list[nn.Module] = [NamesGain().double(), NamesNothing().double(), NamesMask().double(), NamesAll().double()]
    mask = torch.rand(MASKS[shape]).double()
    x, y = torch.randn(2, 8, 6).double()
    more: list[dict[str, Any]] = [{}, {"gain": 2.0}, {"gain": torch.rand(8, 1).double(), "how": "tanh"}, {"shift": None, "how": None}]
    calls = [Call((x,), y, {"mask": mask, **each}) for each in more]
    calls.append(Call((x,), y, {"mask": mask[:1] if mask.dim() else mask, "shift": torch.tensor(0.5).double(), "how": "no"}))
    beside(model, calls, stages=stages, schedule=schedule).close()


class Anything(nn.Module):
    """A forward without names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.linear(sum(args[1:], args[0]))
        for name in sorted(kwargs):
            out = out + kwargs[name]
        return out


@HOW
def test_forwards_that_take_anything(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model: list[nn.Module] = [Anything().double() for _ in range(4)]
    x, z, y = torch.randn(3, 8, 6).double()
    calls = [
        Call((x,), y),
        Call((x, z), y, {"a": torch.randn(8, 6).double()}),
        Call((x, torch.randn(6).double()), y, {"b": 0.5, "a": torch.tensor(2.0).double()}, {"args[1]": None}),
    ]
    beside(model, calls[:2], stages=stages, schedule=schedule).close()
    beside(model, calls[2:], stages=stages, schedule=schedule, batch_dim={"args[1]": None}).close()


def test_one_tensor_given_twice_is_one_tensor() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> Tensor:
            assert query is key
            assert value is not query
            out: Tensor = self.linear(query * key)
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Same(), nn.Linear(6, 6)).double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 6).double()
    want = 0.0
    for xs, ys in zip(x.split(2), y.split(2)):
        loss = F.mse_loss(reference[1](reference[0](xs, xs)), ys) * 0.25
        loss.backward()  # type: ignore[no-untyped-call]
        want += loss.item()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, micro_batches=4, strategy="pipeline") as engine:
        assert engine.forward_backward(x, x, value=x.clone(), target=y) == want
        same_weights(engine, reference)


# --- inputs of any kind ---


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        assert list(batch) == ["name", "ids", "more", "nothing"]
        first, (second, flag) = batch["more"]
        assert (batch["name"], batch["nothing"], flag) == ("a name", None, True)
        out: Tensor = self.linear(self.embedding(batch["ids"]).mean(1) + first * second)
        return out


@HOW
def test_a_batch_in_containers(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Bag().double(), nn.Tanh(), nn.Linear(6, 6).double(), nn.Linear(6, 3).double()]

    def given(rows: int) -> Call:
        more = [torch.randn(rows, 6).double(), (torch.rand(1, 6).double(), True)]
        batch = {"name": "a name", "ids": torch.randint(9, (rows, 4)), "more": more, "nothing": None}
        return Call((batch,), torch.randn(rows, 3).double(), rows=rows)

    beside(model, [given(8), given(2), given(7)], stages=stages, schedule=schedule).close()


INPUTS: dict[str, Callable[[], Tensor]] = {
    "integers": lambda: torch.randint(-5, 5, (8, 6)),
    "bytes": lambda: torch.randint(0, 255, (8, 6)).to(torch.uint8),
    "booleans": lambda: torch.randn(8, 6) > 0,
    "bfloat16": lambda: torch.randn(8, 6).bfloat16(),
    "complex": lambda: torch.randn(8, 6, dtype=torch.complex128),
    "transposed": lambda: torch.randn(6, 8).t(),
    "every second column": lambda: torch.randn(8, 12)[:, ::2],
    "reversed": lambda: torch.randn(8, 6).flip(0),
    "expanded rows": lambda: torch.randn(1, 6).expand(8, 6),
    "expanded columns": lambda: torch.randn(8, 1).expand(8, 6),
    "overlapping rows": lambda: torch.randn(20).as_strided((8, 6), (2, 1)),
    "sparse": lambda: torch.randn(8, 6).relu().to_sparse(),
}


class ToReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to_dense() if x.is_sparse else x
        out: Tensor = self.linear((x.abs() if x.is_complex() else x).double())
        return out


@HOW
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_kind(name: str, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [ToReal().double(), nn.Tanh(), nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
    x, y = INPUTS[name](), torch.randn(8, 3).double()
    kept, whole = x.clone(), nn.Sequential(*model)
    reference = copy.deepcopy(whole)
    own = sgd(reference)
    with pipe.Engine(model, sgd(whole), nn.MSELoss(), stages=stages, micro_batches=3, schedule=schedule, strategy="pipeline") as engine:
        for _ in range(2):
            assert engine.train_step(x, target=y) == plain(reference, own, x.to_dense(), y, 3, nn.MSELoss())
            same_weights(engine, reference)
        assert torch.equal(x.to_dense(), kept.to_dense())


@dataclass
class Sample:
    x: Tensor
    lens: Tensor
    words: str = "text"


torch.export.register_dataclass(Sample)


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, info: Any = None) -> Tensor:
        assert (type(info), info.words) == (Sample, "text")
        out: Tensor = self.linear(x + info.x) * (torch.arange(6) < info.lens[:, None])
        return out


@HOW
def test_c10_a_registered_class_is_cut(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [ByLength().double(), ByLength().double(), nn.Tanh(), nn.Linear(6, 3).double()]
    x, lens = torch.randn(8, 6).double(), torch.arange(8) % 6
    calls = [Call((x,), torch.randn(8, 3).double(), {"info": Sample(torch.randn(8, 6).double(), lens)}) for _ in range(2)]
    beside(model, calls, stages=stages, schedule=schedule).close()


class Opaque:
    """Knows how many samples it was made for."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


class Unregistered:
    def __init__(self) -> None:
        self.held = {"lens": [torch.arange(8)]}


class Ignores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, info: Any = None) -> Tensor:
        out: Tensor = self.linear(x)
        return out


CANNOT: dict[str, tuple[Any, str]] = {
    "names": (list("abcdefgh"), r"'info' \(list\) has length 8 like the batch"),
    "names in a dict": ({"names": list("abcdefgh")}, r"'info' \(list\) has length 8 like the batch"),
    "an array": (np.zeros((8, 2)), r"'info' \(ndarray\) has length 8 like the batch"),
    "an object with a length": (Opaque(8), r"'info' \(Opaque\) has length 8 like the batch"),
    "an object with tensors": (Unregistered(), r"'info' \(Unregistered\) holds tensors"),
    "such an object in a list": ([1, Unregistered()], r"'info' \(Unregistered\) holds tensors"),
    "a packed sequence": (nn.utils.rnn.pack_sequence([torch.zeros(3, 6)] * 2), r"'info' of shape .* has \d in dimension 0"),
    "another size": (torch.zeros(5, 6), r"'info' of shape \(5, 6\) has 5 in dimension 0, but the batch has 8 rows \(those of '\w+'\)"),
    "no such dimension": ({"a": torch.zeros(3)}, r"'info' of shape \(3,\) has 3 in dimension 0"),
    "a square": (torch.zeros(8, 8), r"'info' is a square \(8, 8\) and the batch has 8 rows: beside '\w+' \(8, 6\) it is ambiguous"),
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_cut_is_named_and_goes_whole_if_asked(name: str, layer: int) -> None:
    value, text = CANNOT[name]
    model: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6)]
    model[layer] = Ignores()
    x = torch.randn(8, 6)
    refused(model, (x,), text + r"(?s:.*)batch_dim=\{'info': None\}", info=value)
    with pipe.Engine(model, None, nn.MSELoss(), stages=2, micro_batches=4, batch_dim={"info": None}) as engine:
        assert engine.forward_backward(x, target=x, info=value) > 0


CAN: dict[str, Any] = {
    "text of the batch's length": "abcdefgh",
    "a shape": torch.Size([8, 1]),
    "a tuple of numbers": (1, 2, 3, 4, 5, 6, 7, 8),
    "a shorter list": list("abc"),
    "options": {str(i): i for i in range(8)},
    "a module": nn.Sequential(*(nn.Identity() for _ in range(8))),
    "a function": F.relu,
    "a dtype": torch.float64,
    "numbers": 8,
}


@pytest.mark.parametrize("name", CAN)
def test_what_says_nothing_of_the_batch_goes_to_every_micro_batch(name: str) -> None:
    class Expects(Ignores):
        def forward(self, x: Tensor, info: Any = None) -> Tensor:
            assert info == CAN[name] or isinstance(info, nn.Module)
            return super().forward(x, info)

    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 6).double()
    beside([Expects().double(), Expects().double()], [Call((x,), y, {"info": CAN[name]})], stages=2).close()


# --- lists of tensors ---


class Images(nn.Module):
    """Takes images, one a sample, and gives for each what it holds; normalising makes three channels of one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 2, 1)

    def forward(self, images: Any, scale: Tensor | None = None) -> Any:
        images = images["in"] if isinstance(images, dict) else images
        out = self.conv(torch.stack([image - torch.ones(3, 1, 1) for image in images]))
        return [{"mean": each.mean((1, 2))} for each in out] if self.kind == "detection" else out.mean((2, 3))


LIST = r"'images' is a list of 8 tensors that were cut into 1, 1, 1 rows, .*torch\.stack.*{'images': None}.*{'images': 0}"


@pytest.mark.parametrize("kind", ["detection", "classification"])
def test_a_list_of_images_is_refused_and_goes_whole_if_asked(kind: str) -> None:
    """It has been cut by channel."""
    images, model = [torch.randn(3, 4, 4) for _ in range(8)], Images(kind)
    for args, kwargs in [((images,), {}), ((), {"images": images}), ((images, torch.tensor(2.0)), {}), ((), {"images": {"in": images}})]:
        with pipe.Engine(model, None, nn.MSELoss(), stages=1, micro_batches=3) as engine, pytest.raises(BatchError, match=LIST):
            engine.predict(*args, **kwargs)
    with pipe.Engine(model, None, nn.MSELoss(), stages=1, micro_batches=3, batch_dim={"images": None}) as engine, torch.no_grad():
        want, found = model(images), engine.predict(images)
        assert len(found) == 8
        assert all(torch.equal(a["mean"], b["mean"]) if kind == "detection" else torch.equal(a, b) for a, b in zip(found, want))
    with pipe.Engine(model, None, nn.MSELoss(), stages=1, micro_batches=1) as engine:  # nothing to cut
        assert len(engine.predict(images)) == 8


class Features(nn.Module):
    """Takes features of the batch, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, features: list[Tensor]) -> Tensor:
        out: Tensor = self.linear(features[0] * features[1])
        return out


@HOW
def test_a_list_of_tensors_is_cut_in_each(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Features().double(), nn.Tanh(), nn.Linear(6, 6).double(), nn.Linear(6, 3).double()]
    a, b, y = torch.randn(8, 6).double(), torch.randn(8, 6).double(), torch.randn(8, 3).double()
    for rows in (8, 7, 6):
        with beside(model, [Call(([a[:rows], b[:rows]],), y[:rows], rows=rows)], stages=stages, schedule=schedule) as engine:
            assert engine.predict([a[:rows], b[:rows]]).shape == (rows, 3)


class Each(nn.Module):
    """From features in a list to features in a list."""

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [feature * 2 for feature in features]


def test_a_list_for_a_list_is_refused_unless_batch_dim_says_where_it_is_cut() -> None:
    features = [torch.randn(8, 6), torch.randn(8, 2)]
    with pipe.Engine(Each(), None, nn.MSELoss(), stages=1, micro_batches=3) as engine, pytest.raises(BatchError, match="of 2 tensors"):
        engine.predict(features)
    with pipe.Engine(Each(), None, nn.MSELoss(), stages=1, micro_batches=3, batch_dim={"features": 0}) as engine:
        assert all(torch.equal(found, feature * 2) for found, feature in zip(engine.predict(features), features))


# --- squares ---


class Adds(nn.Module):
    """A table for all rows, or a row each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + (table[: len(x)] if len(x) == len(table) else table.sum(0))
        return out


@HOW
@pytest.mark.parametrize("dim", [0, None])
def test_c09_a_square_as_it_was_said(dim: int | None, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [Adds().double(), nn.Tanh(), nn.Linear(8, 8).double(), nn.Linear(8, 3).double()]
    calls = [
        Call((torch.randn(rows, 6).double(), torch.randn(8, 8).double()), torch.randn(rows, 3).double(), {}, {"table": dim}, rows)
        for rows in ((8,) if dim == 0 else (8, 5))
    ]
    beside(model, calls, stages=stages, schedule=schedule, batch_dim={"table": dim}).close()


def test_a_square_is_refused_where_it_could_be_either_and_only_there() -> None:
    torch.manual_seed(0)
    model = [Adds().double(), nn.Linear(8, 3).double()]
    x, table = torch.randn(8, 6).double(), torch.randn(8, 8).double()
    refused(model, (x, table), r"'table' is a square \(8, 8\).*batch_dim=\{'table': None\}.*batch_dim=\{'table': 0\}")
    y = torch.randn(8, 3).double()
    beside(model, [Call((x, table), y)], stages=2, micro_batches=1).close()  # nothing to cut
    beside(model, [Call((x[:5], table[:1]), y[:5], rows=5)], stages=2).close()
    square = torch.randn(6, 6).double()
    train_beside([nn.Linear(6, 8).double(), nn.Linear(8, 6).double()], [(square, square.t())], stages=2, micro_batches=3).close()


# --- targets ---


def by_name(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(output, target["y"]) * target["gain"] + (output.sum(1) * target["weight"]).mean()


def by_place(output: Tensor, target: tuple[Tensor, Any]) -> Tensor:
    return F.mse_loss(output, target[0]) * (2.0 if target[1] == "double" else 1.0)


def without(output: Tensor, target: None) -> Tensor:
    assert target is None
    return output.square().mean()


def of_one_row(output: Tensor, target: Tensor) -> Tensor:
    assert target.shape == (1, 3)
    return (output - target).square().mean()


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


TARGETS: dict[str, tuple[Callable[..., Tensor], Callable[[int], Any]]] = {
    "a dict": (
        by_name,
        lambda n: {"y": torch.randn(n, 3).double(), "gain": torch.tensor(2.0).double(), "weight": torch.randn(n).double()},
    ),
    "a tuple": (by_place, lambda n: (torch.randn(n, 3).double(), "double")),
    "none": (without, lambda n: None),
    "one row for all": (of_one_row, lambda n: torch.randn(1, 3).double()),
    "classes": (of_classes, lambda n: torch.randint(3, (n,))),
    "a square": (lambda output, target: (output.sum(1) - target.sum(1)).square().mean(), lambda n: torch.randn(n, n).double()),
}


@HOW
@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    loss_fn, make = TARGETS[name]
    model = [nn.Linear(6, 8).double(), nn.Tanh(), nn.Linear(8, 8).double(), nn.Linear(8, 3).double()]
    calls = [Call((torch.randn(rows, 6).double(),), make(rows), rows=rows) for rows in (8, 7, 2)]
    beside(model, calls, loss_fn, stages=stages, schedule=schedule).close()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (list("abcdefgh"), r"'target' \(list\) has length 8 like the batch"),
        (torch.zeros(7, 3), r"'target' of shape \(7, 3\) has 7 in dimension 0, but the batch has 8 rows \(those of 'input'\)"),
        ({"y": torch.zeros(3, 8)}, r"'target' of shape \(3, 8\).*batch_dim=\{'target': 1\}"),
        (Unregistered(), r"'target' \(Unregistered\) holds tensors"),
    ],
    ids=["names", "rows", "dimension", "object"],
)
def test_a_target_that_cannot_be_cut_is_named(target: Any, text: str) -> None:
    refused([nn.Linear(6, 8), nn.Linear(8, 3)], (torch.randn(8, 6),), text, target=target)


class Scores(nn.Module):
    """Consumes the labels, and gives the loss and what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        scores: Tensor = self.head(h)
        return scores if labels is None else F.cross_entropy(scores, labels)


class Peeks(nn.Module):
    """A layer before the last that sees the labels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(3, 8), nn.Linear(8, 8)

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(h) if labels is None else self.linear(h) + self.embedding(labels))


@HOW
def test_c64_labels_that_two_stages_consume(stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = [nn.Linear(6, 8).double(), Peeks().double(), nn.Linear(8, 8).double(), Scores().double()]
    calls = [
        Call((torch.randn(rows, 6).double(),), None, {"labels": torch.randint(3, (rows,))}, rows=rows) for rows in (8, 7, 2)
    ]  # of 3, 3, 2 rows, and so on: the weights are those of the rows
    with beside(model, calls, own_loss=True, stages=stages, schedule=schedule) as engine:
        assert engine.predict(calls[0].args[0]).shape == (8, 3)


# --- outputs ---


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_c69_outputs_and_losses_are_on_the_controller(stages: int) -> None:
    """Before the first step, after it, and for batches of any size, in the batch's order."""
    model = layers()
    reference = copy.deepcopy(model)
    own = sgd(reference)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=stages, micro_batches=4, strategy="pipeline") as engine:
        for rows in (8, 3, 1, 21):
            x, y = batches(rows, 1)[0]
            with torch.no_grad():
                want = torch.cat([reference(piece.contiguous()) for piece in x.tensor_split(min(4, rows))])
            found = engine.predict(x)
            assert torch.equal(found, want)
            assert not found.requires_grad
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
