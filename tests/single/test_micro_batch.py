from __future__ import annotations

import collections
import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from pipe.errors import BatchError
from pipe.micro_batch import count_rows, cut, merge

torch.set_num_threads(1)

Pair = collections.namedtuple("Pair", "one two")


def tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def column(batch, i=0):
    return [piece.args[i] for piece in batch.pieces]


def same(one, other):
    """Equal in structure, and tensors also in dtype."""
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b
        for a, b in zip(leaves, others)
    )


# --- sizes ---


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50))
def test_sizes_are_those_of_tensor_split_and_fewer_rows_are_one_row_each(rows, pieces):
    x = torch.arange(rows)
    batch = cut((x,), {}, None, pieces=pieces)
    expected = [part for part in x.tensor_split(pieces) if len(part)]
    assert batch.sizes == tuple(map(len, expected)) == tuple(piece.rows for piece in batch.pieces)
    assert all(map(torch.equal, column(batch), expected))
    assert batch.size == count_rows((x,), {}) == rows
    assert batch.why_whole is None


def test_uneven_and_last_partial_batches():
    assert cut((torch.zeros(8, 2),), {}, None, pieces=3).sizes == (3, 3, 2)
    assert [cut((torch.zeros(n, 2),), {}, None, pieces=4).sizes for n in (8, 8, 5)] == [(2, 2, 2, 2), (2, 2, 2, 2), (2, 1, 1, 1)]


def test_no_pieces():
    with pytest.raises(BatchError, match="pieces is 0"):
        cut((torch.zeros(8),), {}, None, pieces=0)


@pytest.mark.parametrize(
    ("args", "batch_dim", "why"),
    [
        ((torch.zeros(0, 3),), 0, "no rows"),
        ((torch.zeros(8, 3),), None, "batch dimension"),
        ((torch.zeros(8, 3),), {"x": None}, "batch dimension"),
        ((torch.tensor(1.0),), 0, "batch dimension"),
        ((3, "text"), 0, "hold no tensor"),
        ((), 0, "hold no tensor"),
    ],
)
def test_what_has_no_rows_is_one_piece_and_says_why(args, batch_dim, why):
    batch = cut(args, {}, None, pieces=4, batch_dim=batch_dim, names=["x"])
    assert why in batch.why_whole
    assert len(batch.pieces) == 1
    assert same(batch.pieces[0].args, args)


# --- structure ---

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.sampled_from(["rows", "rows, features", "integers", "bits", "strided", "alone"]),
)
CONTAINERS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=8,
)


def filled(value, n, seed):
    """The structure with tensors of n rows where it has their kind's name."""
    make = torch.Generator().manual_seed(seed)
    kinds = {
        "rows": lambda: torch.randn(n, generator=make),
        "rows, features": lambda: torch.randn(n, 3, 2, generator=make),
        "integers": lambda: torch.randint(99, (n, 3), generator=make),
        "bits": lambda: torch.rand(n, 2, 5, generator=make) < 0.5,
        "strided": lambda: torch.randn(3, n, 2, 2, generator=make).transpose(0, 1),
        "alone": lambda: torch.randn(1, 5, generator=make)[:, 0].sum(),
    }
    return pytree.tree_map(lambda leaf: kinds[leaf]() if isinstance(leaf, str) and leaf in kinds else leaf, value)


@settings(deadline=None, max_examples=200)
@given(CONTAINERS, st.integers(4, 13), st.integers(1, 15), st.integers(0, 99))
def test_cut_then_merge_is_the_identity(value, n, pieces, seed):
    x, value = torch.randn(n, 14), filled(value, n, seed)
    batch = cut((x, value), {"more": [value, None]}, value, pieces=pieces)
    assert same(batch.merge(column(batch, 1)), value)
    assert same(merge([piece.args for piece in batch.pieces], batch.sizes), (x, value))
    assert same(merge([piece.kwargs for piece in batch.pieces], batch.sizes), {"more": [value, None]})
    assert same(merge([piece.target for piece in batch.pieces], batch.sizes), value)


@settings(deadline=None, max_examples=50)
@given(CONTAINERS, st.integers(4, 13), st.integers(1, 15), st.integers(0, 99))
def test_micro_batches_are_contiguous_and_share_no_storage(value, n, pieces, seed):
    value = filled(value, n, seed)
    batch = cut((torch.randn(n, 2), value), {}, value, pieces=pieces)
    given_storages = {t.untyped_storage().data_ptr() for t in tensors(value)}
    made = [t for piece in batch.pieces for t in tensors((piece.args, piece.target))]
    assert all(t.is_contiguous() for t in made)
    assert not given_storages & {t.untyped_storage().data_ptr() for t in made}
    assert len({t.untyped_storage().data_ptr() for t in tensors([p.args for p in batch.pieces])}) == len(
        {id(t) for t in tensors([p.args for p in batch.pieces])}
    )


def test_writing_in_place_touches_neither_the_batch_nor_another_micro_batch():
    x, mask = torch.zeros(6, 3), torch.zeros(1, 3)
    batch = cut((x, mask), {}, x, pieces=3)
    for t in tensors(batch.pieces[0].args):
        t.add_(1)
    assert not x.any()
    assert not mask.any()
    assert not any(t.any() for t in tensors([batch.pieces[1].args, batch.pieces[2].args, batch.pieces[0].target]))


def test_one_piece_is_a_copy_too():
    x = torch.zeros(6, 3)
    cut((x,), {}, None, pieces=1).pieces[0].args[0].add_(1)
    assert not x.any()


def test_a_tensor_given_twice_is_one_tensor_in_each_micro_batch():
    """nn.MultiheadAttention asks `query is key`, and packs its projections if so: other kernels, other bits."""
    x = torch.randn(6, 3, 8)
    for piece in cut((x, x), {"value": x}, x, pieces=3).pieces:
        assert piece.args[0] is piece.args[1] is piece.kwargs["value"]
        assert piece.target is not piece.args[0]


def test_keyword_arguments_keep_their_order():
    piece = cut((), {"b": torch.zeros(4), "a": torch.zeros(4)}, None, pieces=2, names=["a", "b"]).pieces[0]
    assert list(piece.kwargs) == ["b", "a"]


# --- layout, grad ---


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((7, 3, 5, 4), torch.channels_last), ((7, 1, 5, 4), torch.channels_last), ((7, 3, 2, 5, 4), torch.channels_last_3d)],
)
def test_channels_last_is_kept_stride_by_stride(shape, layout):
    x = torch.randn(shape).to(memory_format=layout)
    for part, piece in zip(x.tensor_split(3), cut((x,), {}, None, pieces=3).pieces):
        assert piece.args[0].stride() == part.stride()
        assert torch.equal(piece.args[0], part)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_bits_are_those_of_a_plain_loop_over_tensor_split(memory_format, pieces):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    plain = copy.deepcopy(model)
    x, y = torch.randn(10, 3, 9, 9).to(memory_format=memory_format), torch.randint(5, (10,))
    for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces)):
        (F.cross_entropy(plain(xs), ys) * (len(xs) / len(x))).backward()
    for piece in cut((x,), {}, y, pieces=pieces).pieces:
        (F.cross_entropy(model(*piece.args), piece.target) * (piece.rows / len(x))).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))


def test_a_whole_tensor_keeps_its_layout():
    table = torch.randn(5, 3).t()
    batch = cut((torch.zeros(8, 2), table), {}, None, pieces=2, batch_dim={"table": None}, names=["x", "table"])
    assert all(t.stride() == table.stride() and torch.equal(t, table) for t in column(batch, 1))


def test_copies_are_detached_and_the_batch_names_who_waited_for_a_gradient():
    x, w = torch.zeros(4, 2, requires_grad=True), nn.Parameter(torch.zeros(1, 2))
    batch = cut((x, torch.zeros(4)), {"w": w}, torch.zeros(4), pieces=2, names=["x", "y", "w"])
    assert batch.needs_grad == ("x", "w")
    assert not any(t.requires_grad or isinstance(t, nn.Parameter) for p in batch.pieces for t in tensors((p.args, p.kwargs)))


def test_tensors_made_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        x = torch.ones(4, 2)
    (piece, _) = cut((x,), {}, None, pieces=2).pieces
    nn.Linear(2, 1)(piece.args[0]).sum().backward()
    assert not piece.args[0].is_inference()


def test_sparse_rows():
    x = torch.eye(6).to_sparse()
    batch = cut((x,), {}, None, pieces=4)
    assert torch.equal(torch.cat(column(batch)).to_dense(), torch.eye(6))
    assert torch.equal(batch.merge(column(batch)).to_dense(), torch.eye(6))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_layouts_go_whole_only_when_asked():
    x, graph = torch.zeros(4, 2), torch.eye(4).to_sparse_csr()
    with pytest.raises(BatchError, match=r"'graph'.*sparse_csr"):
        cut((x, graph), {}, None, pieces=2, names=["x", "graph"])
    batch = cut((x, graph), {}, None, pieces=2, names=["x", "graph"], batch_dim={"graph": None})
    assert all(torch.equal(t.to_dense(), torch.eye(4)) for t in column(batch, 1))


def test_nested_tensors_are_refused_by_name():
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(BatchError, match=r"'rows'.*nested"):
        cut((torch.zeros(2, 2), rows), {}, None, pieces=2, names=["x", "rows"])


# --- which are cut ---


def test_size_is_that_of_the_first_tensor_in_forwards_order():
    kwargs = {"labels": torch.zeros(3, 2), "ids": torch.zeros(6, 5)}
    assert count_rows((), kwargs, names=["ids", "labels"]) == 6
    assert count_rows((), kwargs) == 3
    assert count_rows((torch.tensor(0.5), None, {"a": [torch.zeros(7, 1)]}), {}) == 7
    assert count_rows((torch.zeros(2, 9),), {}, batch_dim=1) == count_rows((torch.zeros(2, 9),), {}, batch_dim=-1) == 9
    assert count_rows((torch.zeros(5, 2), torch.zeros(4)), {}, batch_dim={"table": None}, names=["table", "x"]) == 4
    assert count_rows((torch.zeros(5, 2), torch.zeros(4)), {}, batch_dim={"args[0]": None}) == 4


def test_size_one_and_no_dimensions_go_whole():
    batch = cut((torch.zeros(6, 2), torch.ones(1, 9), torch.tensor(2.0)), {}, None, pieces=3)
    assert [t.shape for t in column(batch, 1)] == [(1, 9)] * 3
    assert [t.item() for t in column(batch, 2)] == [2.0] * 3


@pytest.mark.parametrize("how", ["argument", "keyword", "nested", "target"])
def test_any_other_size_raises_and_names_batch_dim(how):
    x, other = torch.zeros(6, 2), torch.zeros(4, 6)
    args = {"argument": (x, other), "nested": (x, {"a": [other]})}.get(how, (x,))
    kwargs = {"mask": other} if how == "keyword" else {}
    name = "target" if how == "target" else "mask"
    with pytest.raises(BatchError, match=rf"'{name}' of shape \(4, 6\) has 4 .*6 rows \(those of 'x'\).*batch_dim={{'{name}': 1}}.*None"):
        cut(args, kwargs, other if how == "target" else None, pieces=3, names=["x", "mask"])


def test_a_first_tensor_of_size_one_does_not_hide_the_batch():
    args = (torch.zeros(1, 9), torch.zeros(8, 9))
    with pytest.raises(BatchError, match=r"'x' of shape .* 1 rows \(those of 'table'\)"):
        cut(args, {}, None, pieces=4, names=["table", "x"])
    assert cut(args, {}, None, pieces=4, names=["table", "x"], batch_dim={"table": None}).sizes == (2, 2, 2, 2)


def test_a_dimension_that_a_tensor_lacks():
    with pytest.raises(BatchError, match=r"'target'.*no dimension 1"):
        cut((torch.zeros(5, 4),), {}, torch.zeros(4), pieces=2, batch_dim=1)
    batch = cut((torch.zeros(5, 4),), {}, torch.zeros(4), pieces=2, batch_dim={"args[0]": 1, "target": 0})
    assert [(p.args[0].shape, p.target.shape) for p in batch.pieces] == [((5, 2), (2,))] * 2


@pytest.mark.parametrize("dim", ["0", True, 1.0])
def test_batch_dim_is_a_number(dim):
    with pytest.raises(BatchError, match="batch_dim of 'x'"):
        cut((torch.zeros(4),), {}, None, pieces=2, batch_dim={"x": dim}, names=["x"])


def test_one_piece_refuses_nothing():
    args = (torch.zeros(8, 8, 16), torch.zeros(8, 8), torch.zeros(5), SimpleNamespace(lens=torch.zeros(8)))
    assert same(cut(args, {}, None, pieces=1).pieces[0].args[:3], args[:3])


# --- squares ---


def test_a_square_beside_another_shape_is_ambiguous_unless_marked():
    """A causal mask (S, S) with S equal to the batch was cut into rows, without a word."""
    x, mask = torch.randn(8, 8, 16), torch.ones(8, 8).tril()
    names = ["x", "mask"]
    with pytest.raises(BatchError, match=r"'mask' is a square \(8, 8\).*ambiguous.*batch_dim={'mask': None}"):
        cut((x,), {"mask": mask}, None, pieces=4, names=names)
    with pytest.raises(BatchError, match="'mask' is a square"):
        cut((x, mask), {}, None, pieces=4, names=names, batch_dim={"x": 0})
    whole = cut((x, mask), {}, None, pieces=4, names=names, batch_dim={"mask": None})
    assert all(torch.equal(t, mask) for t in column(whole, 1))
    rows = cut((x, mask), {}, None, pieces=4, names=names, batch_dim={"mask": 0})
    assert torch.equal(torch.cat(column(rows, 1)), mask)


def test_masks_with_more_dimensions_are_not_ambiguous():
    x = torch.randn(8, 8, 16)
    assert [t.shape for t in column(cut((x, torch.ones(1, 1, 8, 8)), {}, None, pieces=4), 1)] == [(1, 1, 8, 8)] * 4
    assert [t.shape for t in column(cut((x, torch.ones(8, 1, 8, 8)), {}, None, pieces=4), 1)] == [(2, 1, 8, 8)] * 4


@pytest.mark.parametrize("target", [torch.zeros(8, dtype=torch.long), torch.zeros(8, 4), torch.zeros(8, 8)])
def test_a_lone_square_is_cut_whatever_the_target(target):
    batch = cut((torch.zeros(8, 8), torch.tensor(0.1)), {"same": torch.zeros(8, 8), "row": torch.zeros(1, 3)}, target, pieces=4)
    assert [(p.args[0].shape, p.kwargs["same"].shape, len(p.target)) for p in batch.pieces] == [((2, 8), (2, 8), 2)] * 4


def test_a_square_target_is_a_row_a_sample():
    assert [len(p.target) for p in cut((torch.zeros(4, 16),), {}, torch.zeros(4, 4), pieces=2).pieces] == [2, 2]


def test_a_square_is_alone_where_the_others_go_whole():
    batch = cut((torch.zeros(8, 8), torch.zeros(8, 3)), {}, None, pieces=4, batch_dim={"table": None}, names=["x", "table"])
    assert [t.shape for t in column(batch)] == [(2, 8)] * 4


# --- other dimensions ---


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_states_of_an_rnn_on_their_own_dimension(pieces):
    torch.manual_seed(0)
    lstm = nn.LSTM(10, 20, num_layers=2, batch_first=True).double()
    x, h0, c0 = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 5, 10), (2, 6, 20), (2, 6, 20)))
    with pytest.raises(BatchError, match=r"'hx' of shape .* 2 in dimension 0.*6 rows.*'hx': 1"):
        cut((x, (h0, c0)), {}, None, pieces=pieces, names=["input", "hx"])
    batch = cut((x, (h0, c0)), {}, None, pieces=pieces, names=["input", "hx"], batch_dim={"hx": 1})
    assert all(t.is_contiguous() for piece in batch.pieces for t in tensors(piece.args))
    with torch.no_grad():
        merged = batch.merge([lstm(*piece.args) for piece in batch.pieces])
        for one, other in zip(tensors(merged), tensors(lstm(x, (h0, c0)))):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_outputs_are_merged_on_the_inputs_dimension():
    x = torch.randn(5, 6, 3)
    for batch_dim in (1, -2, {"x": 1}):
        batch = cut((x,), {}, None, pieces=4, batch_dim=batch_dim, names=["x"])
        assert torch.equal(batch.merge([{"y": t * 2} for t in column(batch)])["y"], x * 2)


# --- objects ---


@dataclasses.dataclass
class Lengths:
    lens: torch.Tensor


class Slots:
    __slots__ = ("lens", "unset")

    def __init__(self, lens):
        self.lens = lens


class Options(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Lengths(torch.ones(8)),
        Slots(torch.ones(8)),
        SimpleNamespace(deep=[{"a": SimpleNamespace(lens=torch.ones(3))}]),
        collections.UserDict(lens=torch.ones(8)),
        Options(lens=torch.ones(8)),
        np.zeros((8, 2)),
        range(8),
        list("abcdefgh"),
        {"names": list("abcdefgh")},
        [Lengths(torch.ones(1)) for _ in range(8)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_made_for_the_whole_batch_is_refused_by_name(value):
    x = torch.zeros(8, 2)
    with pytest.raises(BatchError, match=r"'info' \(\w+\) .*batch_dim={'info': None}"):
        cut((x, value), {}, None, pieces=4, names=["x", "info"])
    with pytest.raises(BatchError, match="'target'"):
        cut((x,), {}, value, pieces=4, names=["x", "info"])
    batch = cut((x,), {"info": value}, None, pieces=4, batch_dim={"info": None})
    assert batch.sizes == (2, 2, 2, 2)
    assert all(type(piece.kwargs["info"]) is type(value) for piece in batch.pieces)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 8, 8.0, "eight ch", b"eight ch", (1,) * 8, torch.Size([8] * 8), set("abcdefgh"), dict.fromkeys("abcdefgh"),
        Options.fromkeys("abcdefgh"),
        list("abc"), [], torch.float32, torch.device("cpu"), torch.Generator(), np.float64(1.0), np.zeros(()), nn.Linear(8, 8),
        nn.ModuleList([nn.ReLU()] * 8),
        len, lambda: 8, Lengths, SimpleNamespace(a=1), np.zeros(3),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_values_go_to_every_micro_batch_as_they_are(value):
    batch = cut((torch.zeros(8, 2), value), {}, None, pieces=4)
    assert batch.sizes == (2, 2, 2, 2)
    assert all(t is value or t == value for t in column(batch, 1))


def test_a_registered_class_is_cut():
    @dataclasses.dataclass
    class Registered:
        lens: torch.Tensor
        name: str

    torch.export.register_dataclass(Registered, serialized_type_name="test_micro_batch.Registered")
    x, info = torch.randn(8, 8), Registered(torch.randint(9, (8,)), "a")

    def model(x, info):
        return x * (torch.arange(8) < info.lens[:, None])

    batch = cut((x[:, None], info), {}, None, pieces=4)
    assert torch.equal(batch.merge([model(t[:, 0], i) for t, i in zip(column(batch), column(batch, 1))]), model(x, info))
    assert batch.merge(column(batch, 1)).name == "a"


# --- merge ---


def test_merge_by_kind():
    out = [{"loss": torch.tensor(1.0), "y": torch.ones(3 - 2 * m, 2), "n": 4, "who": "a", "none": None, "t": (True, [m])} for m in range(2)]
    out[1]["loss"], out[1]["who"] = torch.tensor(2.0), "b"
    merged = merge(out, [3, 1])
    assert merged["loss"].item() == 1.25
    assert merged["y"].shape == (4, 2)
    assert {name: merged[name] for name in ("n", "who", "none", "t")} == {"n": 4, "who": ["a", "b"], "none": None, "t": (True, [[0, 1]])}


def test_merge_averages_like_the_loss_of_a_step():
    values, sizes = torch.rand(3, dtype=torch.float64).unbind(), (3, 3, 2)
    total = torch.zeros((), dtype=torch.float64)
    for value, rows in zip(values, sizes):
        total = total + value * (rows / 8)
    assert torch.equal(merge(list(values), sizes), total)
    assert merge([torch.tensor(1), torch.tensor(2)], [1, 1]).item() == 1.5
    assert torch.equal(merge([torch.tensor(3)] * 3, sizes), torch.tensor(3))
    assert merge([torch.tensor(0.1)] * 3, sizes).item() == torch.tensor(0.1).item()
    assert merge([torch.tensor(float("nan")), torch.tensor(1.0)], [1, 1]).isnan()


def test_merge_of_one_is_that_one():
    out = {"a": torch.zeros(3), "b": object()}
    assert merge([out], [3]) is out


def test_merge_gives_a_weight_once_and_tokens_all():
    weight = torch.randn(7, 3)
    assert torch.equal(merge([weight, weight.clone()], [2, 2]), weight)
    assert merge([torch.ones(10, 3), torch.ones(5, 3)], [2, 1]).shape == (15, 3)
    assert merge([torch.zeros(4, 3), torch.ones(9, 3)], [2, 2]).shape == (13, 3)


def test_merge_lists_what_does_not_fit():
    pieces = [torch.zeros(2, 3), torch.zeros(2, 4)]
    assert merge(pieces, [2, 2]) == pieces
    assert merge([None, pieces[0]], [2, 2]) == [None, pieces[0]]
    assert merge([pieces[0], torch.tensor(1.0)], [2, 2])[0] is pieces[0]
    assert merge([(1,), (1, 2)], [2, 2]) == [(1,), (1, 2)]
    assert merge([{"a": 1}, {"b": 1}], [2, 2]) == [{"a": 1}, {"b": 1}]
    assert merge([1, True], [2, 2]) == [1, True]
    arrays = [np.zeros(2), np.zeros(2)]
    assert merge(arrays, [2, 2]) == arrays
    assert merge([torch.tensor([1, 2])] * 2, [2, 2], batch_dim=1).tolist() == [1, 2]


def test_merge_keeps_channels_last():
    x = torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last)
    batch = cut((x,), {}, None, pieces=4)
    assert batch.merge(column(batch)).stride() == x.stride()


def test_merge_of_namedtuples_and_empty_containers():
    merged = merge([Pair(torch.zeros(2), ()), Pair(torch.ones(1), ())], [2, 1])
    assert isinstance(merged, Pair)
    assert merged.one.tolist() == [0, 0, 1]
    assert merged.two == ()
