"""Pickling by value, as cloudpickle does it for what lives in the user's script, with the file's name kept in tracebacks."""

from __future__ import annotations

from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as internals


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which names every piece of code "<dynamic-code>"; a user wants the file and line where a stage raised."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: lambda code: _with_file(code)}, cloudpickle.Pickler.dispatch_table)


def _with_file(code: CodeType) -> tuple[Any, ...]:
    _, parts = internals._code_reduce(code)
    return _rebuilt, (code.co_filename, *parts)


def _rebuilt(filename: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)
