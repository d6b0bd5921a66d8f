"""Copying modules for workers in this process, and sending them to other processes."""

from __future__ import annotations

import copy
from typing import Any

import cloudpickle
from torch import nn


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy."""
    return copy.deepcopy(module)


def dump_module(obj: Any) -> bytes:
    """Pickled bytes."""
    data: bytes = cloudpickle.dumps(obj)
    return data


def load_module(data: bytes) -> Any:
    """What `dump_module` was given."""
    return cloudpickle.loads(data)
