"""What is in force around a call: autocast, default dtype and deterministic flag, which torch keeps per thread or process.

The controller captures it where the user calls; a worker enters it around forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ambient:
    """Autocast (device type -> dtype, for those enabled), the deterministic flag (0 off, 1 warn, 2 error) and the default dtype."""

    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    deterministic: int = 0
    dtype: torch.dtype = torch.float32  # torch's default

    @classmethod
    def capture(cls, precision: str = "fp32") -> Ambient:
        """What is in force in the calling thread; precision "bf16" or "fp16" adds autocast to that on every device type."""
        casts = {kind: torch.get_autocast_dtype(kind) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)}
        if precision in _CASTS:
            casts = dict.fromkeys(_DEVICE_TYPES, _CASTS[precision])
        return cls(tuple(casts.items()), torch.get_deterministic_debug_mode(), torch.get_default_dtype())

    @contextmanager
    def forward(self, device_type: str) -> Iterator[None]:
        """Enters autocast as the caller had it, for a forward on this kind of device."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                if kind in ("cpu", device_type):
                    stack.enter_context(torch.autocast(kind, dtype))
            yield

    def apply(self) -> None:
        """Sets the process-wide default dtype and deterministic flag where they differ from the caller's."""
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if torch.get_deterministic_debug_mode() != self.deterministic:
            torch.set_deterministic_debug_mode(self.deterministic)
