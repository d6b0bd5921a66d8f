"""LocalTransport: between the threads of one process."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

from pipe.action import Schedule
from pipe.transport.mailbox import Mailbox


class LocalTransport:
    """Puts a copy of the message into the peer's mailbox: what the receiver writes in place, the sender does not see.

    Args:
        mailboxes: one a worker, shared by all of them.
        timeout: seconds to wait for a message; None or 0: for ever.
    """

    def __init__(self, worker: int, mailboxes: Sequence[Mailbox], timeout: float | None = None) -> None:
        self.sent_bytes = 0
        self._worker = worker
        self._mailboxes = mailboxes
        self._timeout = timeout or None
        self._step = 0

    def begin(self, step: int, schedule: Schedule) -> None:
        self.sent_bytes = 0
        self._step = step
        self._mailboxes[self._worker].begin(step)

    def send(self, worker: int, made_by: Hashable, tensors: Any) -> None:
        self.sent_bytes += getattr(tensors, "nbytes", 0)
        self._mailboxes[worker].put(self._step, made_by, copy.deepcopy(tensors))

    def recv(self, made_by: Hashable) -> Any:
        return self._mailboxes[self._worker].take(self._step, made_by, self._timeout)

    def finish(self) -> None:
        """Nothing is under way: `send` has delivered."""

    def abort(self, why: str) -> None:
        for mailbox in self._mailboxes:
            mailbox.abort(self._step, why)
