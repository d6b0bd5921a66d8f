"""An exception as data: where it happened, what it says, and the user's part of its traceback."""

from __future__ import annotations

import os
import socket
import traceback

import torch

from pipe.action import Action
from pipe.errors import Failure, PipeError


def failure_of(error: BaseException, where: str, worker: int, action: Action | None = None, layer: str | None = None) -> Failure:
    """The error of a worker of this process. An exception may hold anything, and may raise when it is looked at."""
    kind = type(error)
    return Failure(
        where=where,
        worker=worker,
        host=socket.gethostname(),
        pid=os.getpid(),
        kind=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        message=_text(error) + _remedy(error),
        traceback="" if isinstance(error, PipeError) else _users_traceback(error),
        stage=action.stage if action else None,
        micro_batch=action.micro_batch if action else None,
        layer=layer,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its text cannot be made: {type(broken).__name__}>"


def _remedy(error: BaseException) -> str:
    """What to do about an error that comes of cutting the batch; empty for others."""
    if isinstance(error, ValueError) and "Expected more than 1 value per channel when training" in _text(error):
        return "; a micro-batch of one row has no variance: use fewer micro-batches (--micro-batches), larger batches, or drop_last=True"
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in _text(error):
        return (
            "; micro-batches interleave, so if forward writes into a buffer that its backward needs, a later micro-batch has moved it: use "
            "a .clone() of the buffer in forward, or assign a new one"
        )
    return ""


def _users_traceback(error: BaseException) -> str:
    """The traceback from the first frame outside this package on, so that it ends in, and starts near, the user's line."""
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = error.__traceback__
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith((here, os.path.dirname(torch.__file__))):
        first = first.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, first or frames))
    except Exception:
        return "".join(traceback.format_tb(frames)) + f"{type(error).__name__}: {_text(error)}\n"
