"""The strides and the alignment of a tensor, kept over a copy: kernels choose their order of summation by them.

    the tensor                        what travels                          what the receiver does
    owns its storage, has a grad_fn   itself                                nothing
    dense, or overlaps itself         a copy, same strides, same address    nothing
                                      modulo 16 bytes [1]
    has gaps (x[:, ::4])              a contiguous copy                     spreads it out again [2]

So only the bytes that a view shows travel, and never those of the tensor it looks into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides in elements, address of the first element modulo 16

_ALIGNMENT = 16  # bytes; vector loads of the CPU kernels depend on it
_HOST = torch.device("cpu")


def is_sendable(t: Tensor) -> bool:
    """Whether the tensor can go as it is: made by an operation, so nobody writes to it, and all of its storage is its own."""
    return (
        t.grad_fn is not None
        and t.device.type == "cpu"
        and t.layout is torch.strided
        and type(t) is Tensor
        and not t._is_view()
        and t.untyped_storage().nbytes() == t.nbytes
        and t.data_ptr() % _ALIGNMENT == 0
        and (t.is_contiguous() or _span(t.size(), t.stride()) == (t.numel(), False))
    )


def ship(t: Tensor) -> tuple[Tensor, Geometry | None]:
    """A copy in host memory that holds the tensor's own bytes only, and how the receiver gets the tensor from it."""
    t = t.as_subclass(Tensor) if type(t) is not Tensor else t
    if t.layout is not torch.strided:
        return t.cpu().clone(), None
    size, stride, address = tuple(t.size()), t.stride(), _address(t)
    if _span(size, stride)[1]:
        kept = _unexpanded(size, stride)
        gathered = torch.empty(kept, dtype=t.dtype, pin_memory=t.is_cuda)
        return gathered.copy_(t.as_strided(kept, stride), non_blocking=True), (size, stride, address)
    return _spread(t, size, stride, address, _HOST, pin=t.is_cuda), (size, stride, address)  # [1]


def restore(t: Tensor, geometry: Geometry | None, device: torch.device) -> Tensor:
    """The tensor on `device` as its sender had it; itself, where it is so already."""
    if t.layout is not torch.strided:
        return t.to(device)
    size, stride, address = geometry or (tuple(t.size()), t.stride(), 0)
    if device.type == "cpu" and t.stride() == stride and (t.data_ptr() % _ALIGNMENT == address or t.numel() == 0):
        return t
    return _spread(t, size, stride, address, device)  # [2]


def copy(t: Tensor) -> Tensor:
    """A copy on the host with the strides and the alignment of `t`, which has no gaps or is contiguous."""
    if t.layout is not torch.strided:
        return t.clone()
    pin = torch.cuda.is_initialized() and t.is_pinned()  # type: ignore[no-untyped-call]
    return _spread(t, tuple(t.size()), t.stride(), _address(t), _HOST, pin=pin)


def _spread(t: Tensor, size: tuple[int, ...], stride: tuple[int, ...], address: int, device: torch.device, pin: bool = False) -> Tensor:
    """A copy of `t` with these strides, whose first element lies at `address` modulo 16."""
    before = address // t.element_size()
    span, _ = _span(size, stride)
    buffer = torch.empty(before + span, dtype=t.dtype, device=device, pin_memory=pin)
    out = buffer.as_strided(size, stride, before)
    if t.stride() == stride:  # byte for byte, so that a tensor that overlaps itself (expand, unfold) can be written at all
        buffer[before:].copy_(t.as_strided((span,), (1,), t.storage_offset()), non_blocking=True)
    else:
        out.as_strided(_unexpanded(size, stride), stride, before).copy_(t, non_blocking=True)
    return out


def _address(t: Tensor) -> int:
    """Where its first element lies, modulo 16; 0 where no whole number of elements reaches that (memory of another library)."""
    address = t.data_ptr() % _ALIGNMENT
    return address if address % t.element_size() == 0 else 0


def _unexpanded(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The size before `expand`: one where the stride is 0."""
    return tuple(n if step else min(n, 1) for n, step in zip(size, stride))


def _span(size: Sequence[int], stride: Sequence[int]) -> tuple[int, bool]:
    """Elements of storage from the first to the last that the strides reach, and whether some of them are not reached.

    Of a tensor that overlaps itself, other than by a stride of 0, all count as reached.
    """
    if 0 in size:
        return 0, False
    span = count = 1
    overlaps = False
    for step, n in sorted((step, n) for step, n in zip(stride, size) if n > 1 and step > 0):
        overlaps = overlaps or step < span
        span += (n - 1) * step
        count *= n
    return span, not overlaps and span > count


def nbytes(t: Tensor) -> int:
    """Bytes that a transport moves for the tensor: all of its storage."""
    if t.layout is torch.strided:
        return t.untyped_storage().nbytes()
    parts = (t._indices(), t._values()) if t.layout is torch.sparse_coo else (t.values(),)
    return sum(part.nbytes for part in parts)
