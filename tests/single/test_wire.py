"""What crosses between stages: values, dtypes, strides and alignment survive; gradients come back bit for bit."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.rpc.internal import _internal_rpc_pickler
from torch.utils import _pytree as pytree

from pipe.errors import PlanError
from pipe.wire import Inbox, Message, check_device_copy, enter_boundary, pack, pack_list, roots, unpack, unpack_list

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)


def same(t: Tensor, needs_grad: bool) -> Tensor:
    return t


def over_rpc(message: Message) -> Message:
    """The message as torch's RPC gives it to the other process: tensors beside the pickle, with their storage."""
    data, tensors = _internal_rpc_pickler.serialize(message)
    arrived = []
    for t in tensors:
        assert not t.requires_grad
        storage = t.untyped_storage().clone()
        arrived.append(torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride()))
    return _internal_rpc_pickler.deserialize(data, arrived)


def address(t: Tensor) -> int:
    return t.data_ptr() % 16


def check_same(sent: Any, got: Any) -> None:
    (a, spec_a), (b, spec_b) = pytree.tree_flatten(sent), pytree.tree_flatten(got)
    assert spec_a == spec_b
    for x, y in zip(a, b):
        if not isinstance(x, Tensor):
            assert x == y
            continue
        assert (x.dtype, x.stride(), x.shape) == (y.dtype, y.stride(), y.shape)
        assert torch.equal(x.detach(), y)
        assert address(x) == address(y) or x.numel() == 0


@st.composite
def tensors(draw: Any) -> Tensor:
    """A tensor as models make them: sliced, permuted, expanded, transposed, at an odd place in a larger storage, 0-dim, empty."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.lists(st.integers(0, 4), max_size=4))
    offset = draw(st.integers(0, 5))
    n = torch.Size(size).numel()
    base = torch.randint(-100, 100, (n + offset,)).to(dtype)
    t = base[offset:].view(size)
    for change in draw(
        st.lists(st.sampled_from(["permute", "slice", "expand", "channels_last", "clone", "grad", "conj", "unfold"]), max_size=3)
    ):
        if change == "permute":
            t = t.permute(draw(st.permutations(range(t.dim()))))
        elif change == "slice" and t.dim():
            t = t[..., draw(st.integers(0, 1)) :: draw(st.integers(1, 3))]
        elif change == "expand":
            t = (
                t.unsqueeze(draw(st.integers(0, t.dim()))).expand(*[3 if n == 1 else n for n in t.unsqueeze(0).shape])
                if t.dim() == 0
                else t
            )
            t = t.unsqueeze(0).expand(3, *t.shape)
        elif change == "channels_last" and t.dim() == 4:
            t = t.contiguous(memory_format=torch.channels_last)
        elif change == "clone":
            t = t.clone()
        elif change == "grad" and (t.is_floating_point() or t.is_complex()):
            t = t.detach().requires_grad_() * 2
        elif change == "conj":
            t = t.conj()
        elif change == "unfold" and t.dim() and t.shape[-1] >= 2:
            t = t.unfold(-1, 2, 1)
    return t


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
structures = st.recursive(
    tensors() | plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(structures)
def test_any_structure_survives_rpc(value: Any) -> None:
    message = pack(value)
    check_same(value, unpack(over_rpc(message), "cpu", same))


@settings(max_examples=200, deadline=None)
@given(structures)
def test_any_structure_survives_the_local_transport(value: Any) -> None:
    message = pack(value)
    copied = copy.deepcopy(message)
    for t in message.tensors:
        t.untyped_storage().fill_(0)  # the copy is independent
    for t, live in zip(copied.tensors, roots(value)):
        if t.numel() and not live.requires_grad:
            assert t.untyped_storage().data_ptr() != live.untyped_storage().data_ptr()
    again = unpack(copied, "cpu", same)
    assert [t.shape for t in roots(again)] == [t.shape for t in roots(value)]


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors() | st.none(), max_size=4))
def test_a_list_of_gradients_survives(gradients: list[Tensor | None]) -> None:
    message = over_rpc(copy.deepcopy(pack_list(gradients)))
    check_same(gradients, unpack_list(message, torch.device("cpu")))


def test_restores_alignment_that_a_transport_lost() -> None:
    x = torch.arange(40.0)[3:]
    message = pack(x)
    moved = Message(None, (message.tensors[0].clone(),), message.needs_grad, message.geometry)
    assert address(moved.tensors[0]) == 0
    check_same(x, unpack(moved, "cpu", same))


def test_only_a_views_own_bytes_travel() -> None:
    base = torch.zeros(1000, 1000)
    assert pack(base[:, 5]).nbytes == 1000 * 4
    assert pack(base[3]).nbytes == 1000 * 4
    assert pack(base[3:4].expand(500, 1000)).nbytes == 1000 * 4
    assert pack(base[:2, ::4].unsqueeze(0).expand(9, 2, 250)).nbytes == 2 * 250 * 4
    assert pack(base[:8].t()).nbytes == 8000 * 4


def test_what_an_operation_made_goes_as_it_is_and_a_leaf_is_copied() -> None:
    leaf = torch.ones(4, requires_grad=True)
    made = leaf * 2
    assert pack(made).tensors[0].data_ptr() == made.data_ptr()
    for value in (leaf, made.view(2, 2), torch.ones(3), nn.Parameter(torch.ones(2)), leaf.detach()):
        assert pack(value).tensors[0].data_ptr() != value.data_ptr()
    message = pack(leaf)
    with torch.no_grad():
        leaf.fill_(5)
    assert torch.equal(message.tensors[0], torch.ones(4))


def test_says_which_tensors_need_a_gradient() -> None:
    w = torch.ones(2, requires_grad=True)
    value = (w, w * 2, torch.ones(2), torch.tensor([1]), torch.tensor([True]))
    assert pack(value).needs_grad == (True, True, False, False, False)
    assert all(not t.requires_grad for t in pack(value).tensors)
    with torch.no_grad():
        assert pack(value).needs_grad == (False,) * 5


def test_aliases_stay_aliases_and_order_is_that_of_roots() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    value = {"x": a, "y": [b, a]}
    assert [id(t) for t in roots(value)] == [id(a), id(b)]
    got = unpack(over_rpc(pack(value)), "cpu", same)
    assert got["x"] is got["y"][1]
    assert len(pack(value).tensors) == 2


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    hidden: Tensor
    scale: float
    cache: Any = None


def test_user_classes_cross() -> None:
    class Local(dict):
        pass

    value = (Pair(torch.ones(2), None), Output(torch.zeros(3), 0.5, cache=(torch.ones(1), {"k"})), Local(t=torch.ones(2)), torch.float32)
    pair, output, local, dtype = unpack(over_rpc(pack(value)), "cpu", same)
    assert isinstance(pair, Pair)
    assert pair.right is None
    assert isinstance(output, Output)
    assert (output.scale, output.cache[1]) == (0.5, {"k"})
    assert isinstance(local, Local)
    assert dtype is torch.float32


class Tagged(torch.Tensor):
    pass


def test_subclasses_cross_as_themselves() -> None:
    x = torch.arange(4.0).as_subclass(Tagged)
    got = unpack(over_rpc(pack([x])), "cpu", same)[0]
    assert type(got) is Tagged
    assert got.tolist() == [0, 1, 2, 3]


def test_attributes_cross_once_and_what_cannot_be_pickled_stays_behind() -> None:
    x, y = torch.arange(4.0), torch.arange(2.0).as_subclass(Tagged)
    x.twin, x.itself, x.lock, x.number = y, x, threading.Lock(), 3  # type: ignore[attr-defined]
    y.back = [x]  # type: ignore[attr-defined]
    for value in (x, [x, y]):
        message = pack(value)
        assert len(message.tensors) == 2
        got = unpack(over_rpc(message), "cpu", same)
        first = got if isinstance(got, Tensor) else got[0]
        assert (first.itself is first, first.number, hasattr(first, "lock")) == (True, 3, False)
        assert (type(first.twin), first.twin.tolist(), first.twin.back[0] is first) == (Tagged, [0, 1], True)
        assert first is got or got[1] is first.twin
    assert pack(torch.ones(3)).frame is None


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), r"a tensor of layout torch\._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a NestedTensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided), "a nested tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "a quantized tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # these are prototypes, or deprecated
def test_kinds_of_tensors_that_cannot_cross_are_named(make: Any, what: str) -> None:
    t, holder = make(), torch.ones(1)
    holder.part = t  # type: ignore[attr-defined]
    for value in (t, [t], {"a": (1, t)}):
        with pytest.raises(PlanError, match=what + r" cannot cross to the next stage.*split="):
            pack(value)
    assert not hasattr(unpack(pack([holder]), "cpu", same)[0], "part")


def test_sparse_tensors_cross() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
    got = unpack(copy.deepcopy(pack((x, 1))), "cpu", same)
    assert torch.equal(got[0].to_dense(), x.to_dense())
    assert pack(x).nbytes == 2 * 2 * 8 + 2 * 4


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(PlanError, match=r"tuple cannot be sent.*lock.*split="):
        pack((torch.ones(1), threading.Lock()))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(PlanError, match=r"NestedTensor cannot cross"):
        pack([nested])


def test_a_gradient_message_does_not_share_memory_with_the_gradient() -> None:
    g = torch.ones(3)
    message = pack_list([g, None])
    g.add_(1)
    assert torch.equal(message.tensors[0], torch.ones(3))
    assert message.tensors[1] is None


def test_check_device_copy_does_nothing_on_the_cpu() -> None:
    assert check_device_copy("cpu") is None


# Boundary: in two pieces with a message between, against plain autograd in one.


class Add(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * x


class Fill(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return x.sin()


class Both(nn.Module):
    """Several values to the next stage, some of no use there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Linear(8, 8), nn.Linear(8, 2)
        self.query = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return (
            h,
            None,
            (self.unused(x), self.query),
            {"mask": h > 0, "at": torch.arange(8), "flag": True},
            [h.view(-1, 2, 4).transpose(1, 2)],
        )


class Join(nn.Module):
    def forward(self, value: Any) -> Tensor:
        h, none, (_, query), more, (t,) = value
        assert none is None
        assert more["flag"] is True
        assert more["at"].dtype == torch.int64
        return (h * more["mask"] @ query.t()).sum() + (t.sin() @ torch.ones(2, 3)).sum() + h[:, more["at"]].relu_().mean()


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def run_in_two(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out = first(x)
    inboxes: list[Inbox | None] = []

    def enter(t: Tensor, needs_grad: bool) -> Tensor:
        inboxes.append(Inbox() if needs_grad else None)
        return enter_boundary(t, inboxes[-1]) if inboxes[-1] else t

    result = second(unpack(over_rpc(copy.deepcopy(pack(out))), "cpu", enter))
    result.sum().backward()
    back = unpack_list(over_rpc(pack_list([box and box.gradient for box in inboxes])), "cpu")
    pairs = [(t, g) for t, g in zip(roots(out), back) if g is not None]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return result


CASES = {
    "relu_": lambda: (nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))),
    "+=": lambda: (nn.Linear(8, 8), Add()),
    "x[:, 0] =": lambda: (nn.Linear(8, 8), Fill()),
    "dropout_": lambda: (nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(8, 3))),
    "structure": lambda: (Both(), Join()),
    "channels_last": lambda: (
        nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1)).to(memory_format=torch.channels_last),
        nn.Sequential(nn.SiLU(inplace=True), nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_pieces_equal_one_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    first, second = CASES[name]()
    x = torch.randn(6, 8)
    whole = copy.deepcopy(nn.ModuleList([first, second]))
    torch.manual_seed(1)
    want = whole[1](whole[0](x))
    want.sum().backward()
    torch.manual_seed(1)
    got = run_in_two(first, second, x)
    assert torch.equal(got, want)
    for (key, a), b in zip(grads(whole).items(), grads(nn.ModuleList([first, second])).values()):
        assert (a is None) == (b is None), key
        assert a is None or torch.equal(a, b), key
        assert a is None or a.stride() == b.stride(), key
    if name == "structure":
        assert first.unused.weight.grad is None


def test_gradient_keeps_strides_and_none_stays_none() -> None:
    box, unused = Inbox(), Inbox()
    x, y = enter_boundary(torch.ones(2, 3), box), enter_boundary(torch.ones(2), unused)
    (x.t() * torch.ones(3, 2)).sum().backward()
    assert box.gradient.stride() == (1, 2)
    assert unused.gradient is None
    assert not y.is_leaf


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


def test_a_function_that_gives_no_gradient_leaves_none() -> None:
    box = Inbox()
    NoGradient.apply(enter_boundary(torch.ones(2), box)).sum().backward()
    assert box.gradient is None


def test_softmax_first_keeps_functional_semantics() -> None:
    box = Inbox()
    F.softmax(enter_boundary(torch.zeros(1, 2), box), -1)[0, 0].backward()
    assert torch.allclose(box.gradient, torch.tensor([[0.25, -0.25]]))
