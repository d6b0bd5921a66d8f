"""What the launchers of one job tell each other while it runs, through node 0's store: that a host has failed, or is done."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from torch.distributed.distributed_c10d import Store

from launch.report import Outcome

_FAREWELL = 3.0  # seconds in which node 0 keeps the store open, for the others to read the end
_POLL = 0.05
_STRAGGLERS = 30.0  # seconds for the other hosts to end after this one, then it ends alone: a host may be lost without a word


class Peers:
    """This host among the hosts of the job. With one host nothing is said."""

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store = store
        self._node = node
        self._nodes = nodes
        self._done_at: float | None = None

    def fail(self, attempt: int, outcome: Outcome) -> None:
        """Tells that this host failed; the first of all counts."""
        if self._nodes > 1:
            self._try_set(f"failed/{attempt}", json.dumps(asdict(outcome)), once=True)

    def failure(self, attempt: int) -> Outcome | None:
        """Why the job has failed on another host."""
        if self._nodes == 1:
            return None
        try:
            if not self._store.check([f"failed/{attempt}"]):
                return None
            return Outcome(**json.loads(self._store.get(f"failed/{attempt}")))
        except RuntimeError:
            return Outcome(1, "node 0's launcher is gone; this host cannot go on: see the output there")

    def done(self, attempt: int) -> bool:
        """Tells that this host's workers have ended well; whether all have, or are waited for no longer."""
        if self._nodes == 1:
            return True
        self._done_at = self._done_at or time.monotonic()
        self._try_set(f"done/{attempt}/{self._node}", "")
        return self._all(f"done/{attempt}") or time.monotonic() > self._done_at + _STRAGGLERS

    def farewell(self) -> None:
        """Says that this host knows the end; node 0 waits for the others, since its store goes with it."""
        if self._nodes == 1:
            return
        self._try_set(f"left/{self._node}", "")
        end = time.monotonic() + _FAREWELL
        while self._node == 0 and not self._all("left") and time.monotonic() < end:
            time.sleep(_POLL)

    def _all(self, key: str) -> bool:
        try:
            return bool(self._store.check([f"{key}/{node}" for node in range(self._nodes)]))
        except RuntimeError:
            return True  # the store is gone: nothing left to wait for

    def _try_set(self, key: str, value: str, once: bool = False) -> None:
        try:
            if once:
                self._store.compare_set(key, "", value)
            else:
                self._store.set(key, value)
        except RuntimeError:
            pass  # node 0 is gone; `failure` says so
