"""CudaClock: when the device did the work, not when it was launched."""

from __future__ import annotations

import time
from typing import Any

import torch


class CudaClock:
    """Marks are events on the current stream, read after the step against one anchor that both clocks know."""

    name = "cuda"

    def __init__(self, began: float, device: torch.device) -> None:
        """`began`: when the step began, by time.perf_counter of this process. Waits for the device, once."""
        self._device = device
        torch.cuda.synchronize(device)
        self._anchor = self._record()
        self._anchor_seconds = time.perf_counter() - began

    def mark(self) -> Any:
        """This moment in the current stream."""
        return self._record()

    def seconds(self, mark: Any) -> float:
        """Seconds from the beginning of the step to the moment at which the device reached the mark; waits for it."""
        mark.synchronize()
        milliseconds: float = self._anchor.elapsed_time(mark)
        return self._anchor_seconds + milliseconds / 1e3

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
