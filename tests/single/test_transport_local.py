"""LocalTransport passes the suite; and what is special about mailboxes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from pipe.action import Schedule
from pipe.errors import TransportTimeout
from pipe.transport.deferred import Deferred
from pipe.transport.local import LocalTransport
from pipe.transport.mailbox import Mailbox
from tests.suites import transport as suite


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_transport(check: suite.Check) -> None:
    mailboxes = [Mailbox(), Mailbox()]
    a, b = (LocalTransport(worker, mailboxes, suite.timeout_of(check)) for worker in (0, 1))
    check(a, b)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_deferred_transport(check: suite.Check) -> None:
    mailboxes = [Mailbox(), Mailbox()]
    a, b = (Deferred(LocalTransport(worker, mailboxes, suite.timeout_of(check))) for worker in (0, 1))
    check(a, b)


def test_what_is_not_ready_is_sent_later_and_in_order_while_the_worker_goes_on() -> None:
    copied = threading.Event()

    class Copying:
        nbytes = 3
        ready = SimpleNamespace(synchronize=copied.wait)

        def __deepcopy__(self, memo: object) -> str:
            return "copied" if copied.is_set() else "not yet copied"

    mailboxes = [Mailbox(), Mailbox()]
    a, b = (Deferred(LocalTransport(worker, mailboxes, 10.0)) for worker in (0, 1))
    a.begin(1, Schedule(()))
    b.begin(1, Schedule(()))
    a.send(1, "first", Copying())
    a.send(1, "second", "plain")
    with pytest.raises(TransportTimeout):
        mailboxes[1].take(1, "second", 0.0)
    copied.set()
    assert (b.recv("first"), b.recv("second")) == ("copied", "plain")
    a.finish()
    assert a.sent_bytes == 3


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
