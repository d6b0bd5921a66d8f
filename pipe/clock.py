"""What tells a worker the time of its actions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Clock(Protocol):
    """Marks moments while the step runs, and reads them after it."""

    @property
    def name(self) -> str:
        """As a trace calls it: "wall" or "cuda"."""

    def mark(self) -> Any:
        """This moment, in a form that costs little to take; `seconds` reads it."""

    def seconds(self, mark: Any) -> float:
        """Seconds from the beginning of the step to the mark. May wait until a device has reached it."""


@dataclass(frozen=True)
class WallClock:
    """The time of this process. Right where an action's work is done when its call returns, as on a CPU."""

    began: float  # seconds: what `now` said, or would have said in this process, when the step began
    now: Callable[[], float] = time.perf_counter
    name: str = "wall"

    def mark(self) -> float:
        """This moment, as `now` tells it."""
        return self.now()

    def seconds(self, mark: float) -> float:
        """Seconds from the beginning of the step to the mark."""
        return mark - self.began
