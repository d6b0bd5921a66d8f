"""Deferred: lets a worker go on while the device still copies what it sends.

stage --pack--> message, its copy to the host under way --send--> queue --ready?--> the transport below
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipe.action import Schedule
from pipe.transport.protocol import Transport


class Deferred(Transport):
    """A transport whose messages may have a `ready` with `synchronize()`, a CUDA event: they are sent, in order, once it returns."""

    def __init__(self, below: Transport) -> None:
        self.sent_bytes = 0
        self._below = below
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipe sender")
        self._waiting: list[Future[None]] = []

    def begin(self, step: int, schedule: Schedule) -> None:
        self._waiting = []
        self.sent_bytes = 0
        self._below.begin(step, schedule)

    def send(self, worker: int, made_by: Hashable, tensors: Any) -> None:
        self.sent_bytes += getattr(tensors, "nbytes", 0)
        if self._waiting or getattr(tensors, "ready", None) is not None:  # in order behind the first that waits
            self._waiting.append(self._thread.submit(self._send, worker, made_by, tensors))
        else:
            self._below.send(worker, made_by, tensors)

    def recv(self, made_by: Hashable) -> Any:
        return self._below.recv(made_by)

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sending in waiting:
            sending.result()
        self._below.finish()

    def abort(self, why: str) -> None:
        self._below.abort(why)

    def _send(self, worker: int, made_by: Hashable, tensors: Any) -> None:
        if (ready := getattr(tensors, "ready", None)) is not None:
            ready.synchronize()
        self._below.send(worker, made_by, tensors)
