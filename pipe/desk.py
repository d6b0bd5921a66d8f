"""The controller's desk: commands that are out, and the answers that have come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipe.errors import Aborted, Failure, PeerLost, StageError, TransportTimeout

_TICK = 0.25  # seconds between two looks at workers that have not answered
_BETTER = 2.0  # seconds that a lost peer or a time-out waits for the failure that caused it


@dataclass
class _Out:
    workers: frozenset[int]
    early: dict[int, Any] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def silent(self) -> set[int]:
        """Workers that have neither ended nor failed."""
        return set(self.workers) - set(self.done) - {failure.worker for failure in self.failures}


class Desk:
    """Thread-safe; answers come from worker threads or RPC, the controller waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out: dict[int, _Out] = {}
        self._last = 0
        self.watch: Callable[[set[int]], Failure | None] = lambda workers: None

    def ticket(self, workers: frozenset[int]) -> int:
        """Opens a ticket that these workers will answer."""
        with self._changed:
            self._last += 1
            self._out[self._last] = _Out(workers)
            return self._last

    def answer(self, ticket: int, worker: int, kind: str, value: Any) -> None:
        """Takes a worker's answer: "early", "done" or "failed"."""
        with self._changed:
            out = self._out.get(ticket)
            if out is None:
                return
            if kind == "failed":
                out.failures.append(value)
            else:
                (out.early if kind == "early" else out.done)[worker] = value
            self._changed.notify_all()

    def early(self, ticket: int, workers: set[int]) -> Mapping[int, Any]:
        """The early answers of these workers.

        Raises:
            StageError: a worker failed before.
        """
        return self._wait(ticket, lambda out: workers <= set(out.early)).early

    def done(self, ticket: int) -> Mapping[int, Any]:
        """All workers' last answers; closes the ticket.

        Raises:
            StageError: the first failure.
        """
        try:
            return self._wait(ticket, lambda out: set(out.workers) == set(out.done)).done
        finally:
            with self._changed:
                self._out.pop(ticket, None)

    def _wait(self, ticket: int, ready: Callable[[_Out], bool]) -> _Out:
        out = self._out[ticket]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ready(out) or bool(out.failures), _TICK)
                if out.failures:
                    break
                if ready(out):
                    return out
            found = self.watch(out.silent)  # asks the workers: never under the lock
            if found is not None:
                self.answer(ticket, found.worker, "failed", found)
        raise StageError(self._first(out))

    def _first(self, out: _Out) -> Failure:
        """The failure that caused the others: an own error rather than a lost peer, and that rather than an abort."""
        end = time.monotonic() + _BETTER
        with self._changed:
            while True:
                best = min(out.failures, key=_rank)
                left = end - time.monotonic()
                if _rank(best) == 0 or left <= 0 or not out.silent:
                    return best
                self._changed.wait(left)


def _rank(failure: Failure) -> int:
    name = failure.kind.rpartition(".")[2]
    return (Aborted.__name__, TransportTimeout.__name__, PeerLost.__name__).index(name) + 1 if name in _FOLLOWING else 0


_FOLLOWING = (Aborted.__name__, TransportTimeout.__name__, PeerLost.__name__)
