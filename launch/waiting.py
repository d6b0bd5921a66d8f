"""A line that counts while other hosts are awaited."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

EVERY = 5.0  # seconds between two lines where they cannot be rewritten


class Waiting:
    """Says who is missing and for how long: rewritten each second on a terminal, a plain line now and then elsewhere."""

    def __init__(self, stream: TextIO, nodes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._nodes = nodes
        self._now = now
        self._began = now()
        self._next = 0.0  # seconds since the beginning
        self._shown = False

    @property
    def seconds(self) -> float:
        return self._now() - self._began

    def show(self, missing: Sequence[int]) -> None:
        if self.seconds < self._next:
            return
        seconds = int(self.seconds)
        names = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        text = f"waiting for {names} of {self._nodes} ({seconds // 60}:{seconds % 60:02})"
        rewrite = self._stream.isatty()
        self._stream.write(f"\r\033[K{text}" if rewrite else text + "\n")
        self._stream.flush()
        self._next = seconds + (1.0 if rewrite else EVERY)
        self._shown = rewrite

    def done(self) -> None:
        """Leaves a line that is being rewritten."""
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
