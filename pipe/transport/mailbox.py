"""Mailbox: where messages lie until a worker takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from pipe.errors import Aborted, TransportTimeout

_WATCH_EVERY = 0.5  # seconds of waiting between two calls of `watch`


class Mailbox:
    """Messages by step and key. Messages of later steps than the worker's are kept, those of earlier ones dropped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self._messages: dict[int, dict[Hashable, Any]] = {}
        self._aborted: dict[int, str] = {}

    def begin(self, step: int) -> None:
        """Drops all that belongs to older steps."""
        with self._changed:
            self._step = step
            self._messages = {s: found for s, found in self._messages.items() if s >= step}
            self._aborted = {s: why for s, why in self._aborted.items() if s >= step}

    def put(self, step: int, key: Hashable, message: Any) -> None:
        """Never waits."""
        with self._changed:
            if step >= self._step:
                self._messages.setdefault(step, {})[key] = message
                self._changed.notify_all()

    def abort(self, step: int, why: str) -> None:
        """Makes every `take` of this step raise, those to come, too. The first reason stays."""
        with self._changed:
            if step >= self._step:
                self._aborted.setdefault(step, why)
                self._changed.notify_all()

    def take(self, step: int, key: Hashable, timeout: float | None, watch: Callable[[], None] | None = None) -> Any:
        """The message, once; waits for it.

        Args:
            timeout: seconds; None: for ever.
            watch: called now and then while waiting; what it raises ends the wait.

        Raises:
            TransportTimeout, Aborted: see Transport.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else end - time.monotonic()
            wait = left if watch is None else _WATCH_EVERY if left is None else min(left, _WATCH_EVERY)
            with self._changed:
                if self._changed.wait_for(lambda: step in self._aborted or key in self._messages.get(step, ()), wait):
                    if step in self._aborted:
                        raise Aborted(self._aborted[step])
                    return self._messages[step].pop(key)
                if timeout is not None and left is not None and left <= 0:
                    raise TransportTimeout(_late(step, key, timeout, self._messages.get(step, ())))
            if watch is not None:
                watch()


def _late(step: int, key: Hashable, timeout: float, come: Iterable[Hashable]) -> str:
    named = [str(other) for other in come]
    listed = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
    return (
        f"{key} of step {step} did not come within {timeout:g} s (waiting here: {listed or 'nothing'}); "
        f"a worker waits no longer than the time-out: find the worker that hangs, or give more time with --timeout SECONDS (0: for ever)"
    )
