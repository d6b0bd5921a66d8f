"""The controller's desk: commands that are out, and the answers that have come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipe.errors import Aborted, Failure, PeerLost, StageError, TransportTimeout

_TICK = 0.25  # seconds between two looks at workers that have not answered
_BETTER = 2.0  # seconds that a consequence waits for its cause
_FOLLOWING = (PeerLost.__name__, TransportTimeout.__name__, Aborted.__name__)  # consequences, the most telling first


@dataclass
class _Out:
    workers: frozenset[int]
    early: dict[int, Any] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def cause(self) -> Failure | None:
        """The first failure that is not the consequence of another."""
        return next((failure for failure in self.failures if _name(failure) not in _FOLLOWING), None)

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
        found = self._wait(ticket, lambda out: set(out.workers) == set(out.done)).done
        with self._changed:
            del self._out[ticket]
        return found

    def _wait(self, ticket: int, ready: Callable[[_Out], bool]) -> _Out:
        out = self._out[ticket]
        end = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ready(out) or out.cause is not None, _TICK)
                if not out.failures and ready(out):
                    return out
                end = end or (time.monotonic() + _BETTER if out.failures else None)
                if out.failures and (out.cause or not out.silent or time.monotonic() > (end or 0.0)):
                    del self._out[ticket]
                    raise StageError(out.cause or min(out.failures, key=lambda failure: _FOLLOWING.index(_name(failure))))
            found = self.watch(out.silent)  # asks the workers: never under the lock
            if found is not None:
                self.answer(ticket, found.worker, "failed", found)


def _name(failure: Failure) -> str:
    return failure.kind.rpartition(".")[2]
