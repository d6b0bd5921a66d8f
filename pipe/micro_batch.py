"""Cutting a mini-batch into micro-batches.

    x (8, 16)  --cut, 3 pieces-->  (3, 16) (3, 16) (2, 16)  --model-->  (3, 4) (3, 4) (2, 4)  --merge-->  (8, 4)

The batch's size is that of the first tensor in forward's order. A tensor of that size in its batch dimension is cut,
one without dimensions or of size 1 there goes whole, any other raises. `batch_dim` overrides: one dimension for every
argument, or a mapping from an argument's name (and "target") to its dimension, or to None where it goes whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipe.errors import BatchError
from pipe.merging import merge, merge_along
from pipe.opaque import holds_tensors, length

__all__ = ["Batch", "BatchDim", "Piece", "count_rows", "cut", "merge"]

BatchDim: TypeAlias = int | Mapping[str, int | None] | None


@dataclass(frozen=True)
class Piece:
    """One micro-batch: what forward and the loss take, and its number of rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    rows: int


@dataclass(frozen=True)
class Batch:
    """A mini-batch in micro-batches.

    `why_whole` says why it could not be cut, and then there is one piece. `needs_grad` names arguments that require
    grad: micro-batches are detached copies, so nothing comes back to those.
    """

    size: int
    sizes: tuple[int, ...]  # rows of each micro-batch
    pieces: tuple[Piece, ...]
    why_whole: str | None = None
    needs_grad: tuple[str, ...] = ()
    output_dim: int = 0
    dim_of_shape: Mapping[torch.Size, int] = field(default_factory=dict)
    listed: tuple[str, int] | None = None  # the argument and length of a list of tensors, if nothing beside it has the batch's size

    def merge(self, outputs: Sequence[Any]) -> Any:
        """`merge` along this batch's own dimensions.

        Where `batch_dim` names several, an output takes that of the input of its shape (the states of an RNN), else
        that of the first input.

        Raises:
            BatchError: the outputs tell that a list of tensors was not to be cut in each: it has one a sample.
        """
        if self.listed is not None and all(self._is_one_a_sample(output, rows) for output, rows in zip(outputs, self.sizes)):
            name, length = self.listed
            raise BatchError(
                f"{name!r} is a list of {length} tensors that were cut into {', '.join(map(str, self.sizes))} rows, and the model gives "
                f"{length} results for each part: a list of samples, such as images, cannot be cut like a batch; torch.stack them, or "
                f"pass batch_dim={{{name!r}: None}} to give the list whole, or {{{name!r}: {self.output_dim}}} if it was meant so"
            )
        return merge_along(outputs, self.sizes, self.output_dim, self.dim_of_shape)

    def _is_one_a_sample(self, output: Any, rows: int) -> bool:
        """Whether an output has as many results as the list has tensors, and not as many as its micro-batch has rows."""
        assert self.listed is not None
        if isinstance(output, Tensor):
            return -output.dim() <= self.output_dim < output.dim() and output.shape[self.output_dim] == self.listed[1] != rows
        return isinstance(output, (list, tuple)) and len(output) == self.listed[1]


@dataclass(frozen=True)
class _Argument:
    name: str
    key: int | str  # its place in args or kwargs
    value: Any
    dim: int | None  # where it has the batch; None: it goes whole
    said: bool = False  # batch_dim has its name
    is_target: bool = False

    def tensors(self) -> list[Tensor]:
        if isinstance(self.value, Tensor):  # most are: no structure to walk
            return [self.value]
        return [leaf for leaf in pytree.tree_leaves(self.value) if isinstance(leaf, Tensor)]


# --- cut ---


def cut(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any = None,
    *,
    pieces: int,
    batch_dim: BatchDim = 0,
    names: Sequence[str] = (),
) -> Batch:
    """The batch in at most `pieces` micro-batches, of the sizes that `torch.tensor_split` gives; fewer rows: one row each.

    Every tensor is a detached copy on its own storage, so a model may write in place. Parts that are cut are contiguous,
    or keep channels_last where the input has it: so a plain loop over `x.tensor_split(pieces)` of such an x runs the same
    kernels (others compute a contiguous copy of a channels_last image). Whole tensors keep their layout. Other
    objects are passed on as they are. One tensor given twice is one tensor in each micro-batch too (attention asks
    `key is value`). With `pieces` of 1 nothing has to be guessed, and nothing is refused.

    Args:
        names: forward's parameters in order, which gives positional arguments their names; one beyond is "args[2]".

    Raises:
        BatchError: a tensor that neither has the batch's size nor goes whole; an ambiguous square; an object that
            cannot be cut although it holds tensors or has the batch's length.
    """
    if pieces < 1:
        raise BatchError(f"pieces is {pieces}; a batch has at least one micro-batch: pass micro_batches=1 or more")
    inputs = _arguments(args, kwargs, batch_dim, names)
    wanted = _Argument("target", "target", target, *_dim_of("target", batch_dim), is_target=True)
    first, rows = _first(inputs)
    why_whole = _why_whole(first, rows, inputs)
    if pieces > 1 and first is not None and why_whole is None:
        _check([*inputs, wanted], rows, first.name)
    number = 1 if why_whole else min(pieces, rows)
    sizes = tuple(rows // number + (m < rows % number) for m in range(number))
    made = [_piece(args, kwargs, inputs, wanted, _Rows(rows, sum(sizes[:m]), sizes[m])) for m in range(number)]
    needs_grad = tuple(a.name for a in [*inputs, wanted] if any(t.requires_grad for t in a.tensors()))
    dims = _output_dims(inputs, first, rows, sizes[0])
    return Batch(rows, sizes, tuple(made), why_whole, needs_grad, *dims, _listed([*inputs, wanted], rows, first) if number > 1 else None)


def count_rows(args: Sequence[Any], kwargs: Mapping[str, Any], *, batch_dim: BatchDim = 0, names: Sequence[str] = ()) -> int:
    """The batch's size: that of the first tensor in forward's order, in its batch dimension; 1 where there is none."""
    return _first(_arguments(args, kwargs, batch_dim, names))[1]


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], batch_dim: BatchDim, names: Sequence[str]) -> list[_Argument]:
    """All arguments in forward's order; keyword arguments that `names` lacks come last."""
    place = {name: i for i, name in enumerate(names)}
    found = []
    for i, value in enumerate(args):
        name = names[i] if i < len(names) else f"args[{i}]"
        found.append(_Argument(name, i, value, *_dim_of(name, batch_dim)))
    for name in sorted(kwargs, key=lambda name: place.get(name, len(place))):
        found.append(_Argument(name, name, kwargs[name], *_dim_of(name, batch_dim)))
    return found


def _dim_of(name: str, batch_dim: BatchDim) -> tuple[int | None, bool]:
    """The argument's batch dimension, and whether it was given by name."""
    said = isinstance(batch_dim, Mapping) and name in batch_dim
    dim = batch_dim.get(name, 0) if isinstance(batch_dim, Mapping) else batch_dim
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise BatchError(f"batch_dim of {name!r} is {dim!r}; it is a dimension's number, or None for an argument that goes whole")
    return dim, said


def _rows(tensor: Tensor, dim: int | None) -> int | None:
    """The tensor's size in its batch dimension; None where it has none, or cannot be cut at all."""
    if dim is None or not _can_be_cut(tensor) or not -tensor.dim() <= dim < tensor.dim():
        return None
    return tensor.shape[dim]


def _can_be_cut(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout in (torch.strided, torch.sparse_coo)


def _first(inputs: list[_Argument]) -> tuple[_Argument | None, int]:
    for argument in inputs:
        for tensor in argument.tensors():
            rows = _rows(tensor, argument.dim)
            if rows is not None:
                return argument, rows
    return None, 1


def _why_whole(first: _Argument | None, rows: int, inputs: list[_Argument]) -> str | None:
    if first is None:
        given = any(argument.tensors() for argument in inputs)
        return "no tensor among the inputs has a batch dimension" if given else "the inputs hold no tensor"
    return "the batch has no rows" if rows == 0 else None


# --- what cannot be cut ---


def _check(arguments: list[_Argument], rows: int, first: str) -> None:
    shapes = {t.shape: a.name for a in arguments for t in a.tensors() if not a.is_target and a.dim is not None and _rows(t, a.dim) == rows}
    for argument in arguments:
        if argument.dim is None:
            continue
        for leaf in _leaves(argument.value, rows):
            if isinstance(leaf, Tensor) and _can_be_cut(leaf):
                _check_size(argument, argument.dim, leaf, rows, first)
                _check_square(argument, leaf, rows, shapes)
            else:
                _check_object(argument, leaf, rows)


def _listed(arguments: list[_Argument], rows: int, first: _Argument | None) -> tuple[str, int] | None:
    """The argument and the length of the list of tensors that alone says how many rows there are: it may be one tensor a sample."""
    if first is None or first.said:
        return None
    leaves = [(a, leaf) for a in arguments if a.dim is not None for leaf in pytree.tree_leaves(a.value, is_leaf=_is_list_of_tensors)]
    if any(isinstance(leaf, Tensor) and _rows(leaf, a.dim) == rows for a, leaf in leaves):
        return None
    lists = [leaf for a, leaf in leaves if a is first and _is_list_of_tensors(leaf)]
    return first.name, len(next(each for each in lists if any(_rows(t, first.dim) == rows for t in each)))


def _is_list_of_tensors(node: Any) -> bool:
    return type(node) is list and len(node) > 0 and all(isinstance(leaf, Tensor) for leaf in node)


def _check_size(argument: _Argument, dim: int, tensor: Tensor, rows: int, first: str) -> None:
    size = _rows(tensor, dim)
    if size in (1, rows) or tensor.dim() == 0:
        return
    has = f"no dimension {dim}" if size is None else f"{size} in dimension {dim}"
    other = [i for i, n in enumerate(tensor.shape) if n == rows]
    name = repr(argument.name)
    remedy = f"pass batch_dim={{{name}: {other[0]}}} if its batch dimension is {other[0]}, or " if other else "pass "
    raise BatchError(
        f"{name} of shape {tuple(tensor.shape)} has {has}, but the batch has {rows} rows (those of {first!r}); a tensor is cut "
        f"where it has the batch's size: {remedy}batch_dim={{{name}: None}} to give it whole to every micro-batch"
    )


def _check_square(argument: _Argument, tensor: Tensor, rows: int, shapes: Mapping[torch.Size, str]) -> None:
    """Raises for a mask or table (n, n) that only looks like n rows. A target is a row a sample, and so is a lone input."""
    if argument.said or argument.is_target or tensor.shape != (rows, rows) or rows == 1:
        return
    for shape, name in shapes.items():
        if shape != tensor.shape:
            raise BatchError(
                f"{argument.name!r} is a square {tuple(tensor.shape)} and the batch has {rows} rows: beside {name!r} {tuple(shape)} it is "
                f"ambiguous, a row a sample or a table for all; pass batch_dim={{{argument.name!r}: None}} to give it whole to every "
                f"micro-batch, or batch_dim={{{argument.name!r}: {argument.dim}}} to cut it"
            )


def _leaves(value: Any, rows: int) -> list[Any]:
    """The leaves, and in their place whole lists of `rows` values without a tensor: names, lengths, one a sample."""

    if isinstance(value, Tensor):
        return [value]

    def one_a_sample(node: Any) -> bool:
        return type(node) is list and len(node) == rows > 1 and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node))

    return pytree.tree_leaves(value, is_leaf=one_a_sample)


def _check_object(argument: _Argument, value: Any, rows: int) -> None:
    if isinstance(value, Tensor):
        what = f"is a nested tensor or one of layout {value.layout}"
    elif holds_tensors(value):
        what = "holds tensors"
    elif length(value) == rows > 1:
        what = f"has length {rows} like the batch"
    else:
        return
    raise BatchError(
        f"{argument.name!r} ({type(value).__name__}) {what}, and cannot be cut into micro-batches; pass tensors, alone or in a dict, list "
        f"or tuple, register its class with torch.export.register_dataclass, or pass batch_dim={{{argument.name!r}: None}} to give it "
        f"whole to every micro-batch"
    )


# --- the copies ---


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a batch make a micro-batch."""

    batch: int
    start: int
    length: int


def _piece(args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[_Argument], target: _Argument, rows: _Rows) -> Piece:
    seen: dict[tuple[int, int | None], Tensor] = {}
    copies = {a.key: _part(a, rows, seen) for a in inputs}
    return Piece(tuple(copies[i] for i in range(len(args))), {name: copies[name] for name in kwargs}, _part(target, rows, {}), rows.length)


def _part(argument: _Argument, rows: _Rows, seen: dict[tuple[int, int | None], Tensor]) -> Any:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        key = (id(leaf), argument.dim)
        if key not in seen:
            seen[key] = _copy(leaf, argument.dim, rows)
        return seen[key]

    return copy(argument.value) if isinstance(argument.value, Tensor) else pytree.tree_map(copy, argument.value)


def _copy(tensor: Tensor, dim: int | None, rows: _Rows) -> Tensor:
    whole = tensor.detach()
    if dim is None or _rows(tensor, dim) != rows.batch:
        return whole.clone()
    if tensor.layout == torch.sparse_coo:
        return whole.narrow_copy(dim, rows.start, rows.length)
    part = whole.narrow(dim, rows.start, rows.length)
    return part.clone() if _is_contiguous(part) else part.clone(memory_format=torch.contiguous_format)


def _is_contiguous(tensor: Tensor) -> bool:
    """Contiguous in a memory format that torch's kernels tell apart; clone then keeps every stride."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (channels_last is not None and tensor.is_contiguous(memory_format=channels_last))


def _output_dims(inputs: list[_Argument], first: _Argument | None, rows: int, length: int) -> tuple[int, dict[torch.Size, int]]:
    """The first input's batch dimension, and the shapes in the first micro-batch of inputs that have another one."""
    default = 0 if first is None or first.dim is None else first.dim
    found: dict[torch.Size, int] = {}
    usual: set[torch.Size] = set()
    for argument in inputs:
        for tensor in argument.tensors():
            if argument.dim is not None and _rows(tensor, argument.dim) == rows:
                shape = list(tensor.shape)
                shape[argument.dim] = length
                if argument.dim == default:
                    usual.add(torch.Size(shape))
                else:
                    found[torch.Size(shape)] = argument.dim
    return default, {shape: dim for shape, dim in found.items() if shape not in usual}
