"""Transport: moves the result of an action to a worker. It knows neither stages nor order.

Keys are handovers, or tuples of text and numbers for what is not the result of an action. A message is any value; what is received
is a copy of it. Every implementation passes `tests/suites/transport.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from pipe.action import Schedule


class Transport(Protocol):
    """One worker's end of the links to all others. Used by one thread, but for `abort`."""

    sent_bytes: int  # since `begin`, of messages that have `nbytes`

    def begin(self, step: int, schedule: Schedule) -> None:
        """Begins a step, with a higher number than the last; drops what is left of older ones. Some of this step may have come."""

    def send(self, worker: int, made_by: Hashable, tensors: Any) -> None:
        """Sends a message on its way; never waits for what the peer does. The message must not change until `finish`."""

    def recv(self, made_by: Hashable) -> Any:
        """The message `made_by`, once; waits for it.

        Raises:
            TransportTimeout: it has not come in `timeout` seconds; the text lists what has.
            Aborted: another worker failed first; the text is that worker's.
            PeerLost: the process that would send it is gone.
        """

    def finish(self) -> None:
        """Waits until all messages of this step have arrived.

        Raises:
            TransportTimeout, PeerLost: one has not.
        """

    def abort(self, why: str) -> None:
        """Wakes every `recv` of this step, here and at the peers, also those that have not begun it. Never fails, never waits."""
