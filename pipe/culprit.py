"""Which part of a value cannot be pickled, as a path of names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

_DEPTH = 20
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def culprit(value: Any, dumps: Callable[[Any], bytes]) -> tuple[tuple[Any, ...], Any]:
    """The smallest part of the value at which `dumps` fails, and the names that lead to it; the value and () if it is that itself."""
    path: list[Any] = []
    while len(path) < _DEPTH:
        for name, part in _parts(value):
            if not _passes(part, dumps):
                path.append(name)
                value = part
                break
        else:
            break
    return tuple(path), value


def _passes(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a value is made of, by name; a module's own dictionaries (`_modules`, `_buffers`) give their entries."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        yield from zip(value.__code__.co_freevars, (cell.cell_contents for cell in value.__closure__ or ()))
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, type):
        yield from vars(value).items()
    else:
        own = getattr(value, "__dict__", {})
        yield from ((name, part) for name, part in own.items() if name not in _OF_MODULES)
        yield from (entry for name in _OF_MODULES for entry in own.get(name, {}).items())
        yield type(value).__name__, type(value)  # a class that goes by value takes along what its methods refer to
