"""LocalTransport passes the suite; and what is special about mailboxes."""

from __future__ import annotations

import pytest

from pipe.errors import TransportTimeout
from pipe.transport.local import LocalTransport
from pipe.transport.mailbox import Mailbox
from tests.suites import transport as suite


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_transport(check: suite.Check) -> None:
    mailboxes = [Mailbox(), Mailbox()]
    a, b = (LocalTransport(worker, mailboxes, suite.timeout_of(check)) for worker in (0, 1))
    check(a, b)


def test_a_watch_ends_the_wait() -> None:
    def watch() -> None:
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError, match="lost"):
        Mailbox().take(1, "x", None, watch)


def test_a_watch_does_not_lengthen_the_wait() -> None:
    looks: list[int] = []
    with pytest.raises(TransportTimeout, match=r"x of step 1 did not come within 0.01 s \(waiting here: nothing\)"):
        Mailbox().take(1, "x", 0.01, lambda: looks.append(1))
    assert len(looks) <= 1


def test_the_time_out_lists_eight_at_most() -> None:
    mailbox = Mailbox()
    for m in range(11):
        mailbox.put(1, f"F{m}@0", None)
    with pytest.raises(TransportTimeout, match="F7@0 and 3 more"):
        mailbox.take(1, "B0@1", 0.0)
