"""Copies between a GPU and pinned host memory, on a stream of their own, so that they run beside the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_streams: dict[torch.device, Any] = {}


@contextmanager
def leaving(tensors: Iterable[Tensor]) -> Iterator[list[Any]]:
    """Copies made inside run on the side streams of the tensors' GPUs, after the work so far; gives what to wait for, one event a GPU.

    The list is filled on leaving; it is empty where no tensor is on a GPU.
    """
    found = list(tensors)
    events: list[Any] = []
    devices = {tensor.device for tensor in found if tensor.is_cuda}
    if not devices:
        yield events
        return
    for device in devices:
        _side(device).wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.StreamContext(_side(next(iter(devices)))):
        yield events
    for device in devices:
        events.append(_side(device).record_event())
    for tensor in found:
        if tensor.is_cuda:
            tensor.record_stream(_side(tensor.device))  # its memory is not used anew before the copy is done


@contextmanager
def arriving(device: torch.device, come: list[Tensor]) -> Iterator[None]:
    """Copies made inside run on the device's side stream; the work that follows waits for them. `come`: what they made."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.StreamContext(_side(device)):
        yield
    current = torch.cuda.current_stream(device)
    current.wait_stream(_side(device))
    for tensor in come:
        tensor.record_stream(current)


def _side(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
