"""Peak memory of a worker during a step, and how much a device has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """The highest memory in use since `begin`, in bytes.

    On a GPU: what this process allocated on it. On a CPU: the resident memory of the process, which workers that are threads
    of one process share. 0 where the system does not tell (Linux does).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Starts over."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark, nothing else

    def peak(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _proc("/proc/self/status", "VmHWM:")


def available(device: torch.device, sharing: int) -> int:
    """Bytes that a worker may use: its GPU's memory, or its part of the host's available memory; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _proc("/proc/meminfo", "MemAvailable:") // max(1, sharing)


def _proc(path: str, key: str) -> int:
    if os.path.exists(path):
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0
