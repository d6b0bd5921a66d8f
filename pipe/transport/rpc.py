"""RpcTransport: between processes, over torch.distributed.rpc.

Each process has a mailbox for each worker that lives in it, under the worker's address. What RPC calls puts something into a
mailbox and returns. Messages push, so no receive is posted, and their order does not matter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from torch.futures import Future

from pipe.action import Handover, Schedule
from pipe.errors import PeerLost, TransportError, TransportTimeout
from pipe.session import Session, alive, failure
from pipe.transport.mailbox import Mailbox

_lock = threading.Lock()
_mailboxes: dict[str, Mailbox | None] = {}  # by address; None: forgotten, so that late messages are dropped


def _mailbox(address: str) -> Mailbox | None:
    with _lock:
        if address not in _mailboxes:
            _mailboxes[address] = Mailbox()  # the first message may come before the worker is built
        return _mailboxes[address]


def deliver(address: str, step: int, key: Hashable, message: Any) -> None:
    """RPC target: puts a message into a mailbox of this process."""
    if mailbox := _mailbox(address):
        mailbox.put(step, key, message)


def abort_at(address: str, step: int, why: str) -> None:
    """RPC target: aborts a step in a mailbox of this process."""
    if mailbox := _mailbox(address):
        mailbox.abort(step, why)


def forget(address: str) -> None:
    """Drops a mailbox of this process, and all that still comes to it."""
    with _lock:
        _mailboxes[address] = None


class RpcTransport:
    """One worker's end; its address is `engine/worker`, so that the workers of several engines do not meet.

    Args:
        peers: the rank of the process of each worker, this one's too.
        timeout: seconds for a message to come or to arrive; None or 0: for ever.
    """

    def __init__(self, session: Session, address: str, worker: int, peers: Mapping[int, int], timeout: float | None = None) -> None:
        engine, _, own = address.rpartition("/")
        mailbox = _mailbox(address)
        if own != str(worker) or mailbox is None:
            raise TransportError(f"{address!r} is not a new address of worker {worker}; one is engine/worker: use a new engine's name")
        self.sent_bytes = 0
        self._session = session
        self._engine = engine
        self._worker = worker
        self._peers = peers
        self._timeout = timeout or None
        self._mailbox = mailbox
        self._schedule = Schedule(())
        self._step = 0
        self._sent: list[tuple[int, Hashable, Future[Any]]] = []
        self._pings: dict[int, Future[Any]] = {}

    def begin(self, step: int, schedule: Schedule) -> None:
        self.sent_bytes = 0
        self._step = step
        self._schedule = schedule
        self._sent = []
        self._mailbox.begin(step)

    def send(self, worker: int, made_by: Hashable, tensors: Any) -> None:
        self.sent_bytes += getattr(tensors, "nbytes", 0)
        rank = self._peers[worker]
        if rank == self._session.rank:
            deliver(self._address(worker), self._step, made_by, copy.deepcopy(tensors))
        else:
            arriving = self._session.call(rank, deliver, self._address(worker), self._step, made_by, tensors, timeout=self._timeout or 0.0)
            self._sent.append((worker, made_by, arriving))

    def recv(self, made_by: Hashable) -> Any:
        return self._mailbox.take(self._step, made_by, self._timeout, partial(self._watch, made_by))

    def finish(self) -> None:
        sent, self._sent = self._sent, []
        for worker, made_by, arriving in sent:
            self._check(worker, made_by, arriving)

    def abort(self, why: str) -> None:
        for worker, rank in self._peers.items():
            if rank == self._session.rank:
                abort_at(self._address(worker), self._step, why)
            else:
                self._session.call(rank, abort_at, self._address(worker), self._step, why)

    def _address(self, worker: int) -> str:
        return f"{self._engine}/{worker}"

    def _watch(self, made_by: Hashable) -> None:
        """Whether waiting makes sense: TensorPipe tells of a broken link only to who has a call on it."""
        for worker, key, arriving in self._sent:
            if arriving.done():
                self._check(worker, key, arriving)
        home = self._schedule.home.get(made_by.made_by) if isinstance(made_by, Handover) else None
        for worker in self._peers if home is None else (home,):
            if self._peers[worker] == self._session.rank:
                continue
            ping = self._pings.get(worker)
            if ping is not None and ping.done():  # a ping that is not may be slow: that says nothing
                self._check(worker, made_by, self._pings.pop(worker))
            elif ping is None:
                self._pings[worker] = self._session.call(self._peers[worker], alive)

    def _check(self, worker: int, key: Hashable, future: Future[Any]) -> None:
        error = failure(future)
        if error is None:
            return
        member = self._session.members[self._peers[worker]]
        if "timeout" in str(error):
            raise TransportTimeout(
                f"{key} of step {self._step} did not reach worker {worker} ({member.host}) within {self._timeout:g} s; "
                f"a message takes no longer than the time-out: look at the link, or give more time with --timeout SECONDS (0: for ever)"
            )
        raise PeerLost(
            f"worker {worker} (host {member.host}, pid {member.pid}) is gone: {str(error).splitlines()[0].partition(' (this error')[0]}; "
            f"a step needs all its workers: see what that process printed, then start again"
        )
