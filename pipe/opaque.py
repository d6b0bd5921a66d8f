"""What objects hold that are neither tensors nor containers of them, so that one made for a whole batch is noticed."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, nn.Module, torch.dtype, torch.device, torch.Generator)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_NO_ROWS = (tuple, set, frozenset, Mapping)  # a length of these says nothing of the batch: shapes, options
_DEEP = 4  # levels of attributes searched for tensors


def length(value: Any) -> int | None:
    """Its length, where that may be a number of samples; None for text, code, options, shapes."""
    if isinstance(value, (*_PLAIN, *_CODE, *_NO_ROWS)) or not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except TypeError:  # a numpy array without dimensions
        return None


def holds_tensors(value: Any, deep: int = _DEEP) -> bool:
    """Whether tensors are found in it, in its items or attributes. A module's weights are no samples."""
    if isinstance(value, Tensor):
        return True
    if deep == 0 or isinstance(value, (*_PLAIN, *_CODE)):
        return False
    return any(holds_tensors(held, deep - 1) for held in _held(value))


def _held(value: Any) -> Iterator[Any]:
    """What an object holds: items of a container, attributes, slots."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
