"""Making one output of the outputs of a batch's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def merge(outputs: Sequence[Any], sizes: Sequence[int], batch_dim: int = 0) -> Any:
    """One output for the batch from those of its micro-batches, of any structure; `sizes` are their rows.

    Tensors are concatenated on `batch_dim`, those without dimensions averaged by rows. Equal other values are given
    once, None too, else they make a list, one a micro-batch; so do structures or shapes that do not fit together. A
    tensor without rows of the batch (a weight) that is the same in all micro-batches is given once.
    """
    return merge_along(outputs, sizes, batch_dim, {})


def merge_along(outputs: Sequence[Any], sizes: Sequence[int], dim: int, dim_of_shape: Mapping[torch.Size, int]) -> Any:
    """`merge`, where tensors whose first has a shape of `dim_of_shape` are concatenated on that one's dimension."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(list(outputs), sizes, dim_of_shape.get(first.shape, dim))
    apart = [_open(output) for output in outputs]
    held, spec = apart[0]
    is_leaf = len(held) == 1 and held[0] is first
    if is_leaf or any(other != spec for _, other in apart):
        return first if _all_equal(outputs) else list(outputs)
    merged = [merge_along(row, sizes, dim, dim_of_shape) for row in zip(*(held for held, _ in apart))]
    return pytree.tree_unflatten(merged, spec)


def _open(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """One level of a structure: what it holds, and how to put that back."""
    return pytree.tree_flatten(value, is_leaf=lambda node: node is not value)


def _merge_tensors(outputs: list[Tensor], sizes: Sequence[int], dim: int) -> Any:
    first = outputs[0]
    if all(output.dim() == 0 for output in outputs):
        return first if _all_equal(outputs) else _average(outputs, sizes)
    if not all(-output.dim() <= dim < output.dim() for output in outputs):
        return first if _all_equal(outputs) else outputs
    lengths = [output.shape[dim] for output in outputs]
    if dim and lengths != list(sizes) and [output.shape[0] for output in outputs] == list(sizes):
        return _merge_tensors(outputs, sizes, 0)  # a model of sequence-first inputs may give its output batch-first
    has_rows = all(n % rows == 0 and n * sizes[0] == lengths[0] * rows for n, rows in zip(lengths, sizes))
    if not has_rows and _all_equal(outputs):
        return first
    return torch.cat(outputs, dim) if len({_features(output, dim) for output in outputs}) == 1 else outputs


def _average(outputs: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """The sum, in micro-batch order, of each value times its share of the rows: as the loss of a step."""
    parts = [output * (rows / sum(sizes)) for output, rows in zip(outputs, sizes)]
    return sum(parts[1:], parts[0])


def _features(tensor: Tensor, dim: int) -> tuple[torch.layout, tuple[int, ...]]:
    """What has to be the same in tensors that are concatenated on `dim`: layout, and sizes of the other dimensions."""
    sizes = list(tensor.shape)
    sizes[dim] = -1
    return tensor.layout, tuple(sizes)


def _all_equal(outputs: Sequence[Any]) -> bool:
    return all(_equal(outputs[0], output) for output in outputs)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, where they can tell; of the same type too, so that True is not 1."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return one.dtype == other.dtype and torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
    except Exception:  # any class may raise what it likes, an array for having no single truth
        return False
