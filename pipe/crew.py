"""The crew: the workers as the controller holds them, threads of this process or processes of a job."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from pipe import wire
from pipe.action import Action
from pipe.desk import Desk
from pipe.errors import Failure, PlanError
from pipe.session import Session
from pipe.transport.local import LocalTransport
from pipe.transport.mailbox import Mailbox
from pipe.transport.rpc import RpcTransport, abort_at, forget
from pipe.worker import Worker

Command = tuple[int, str, Any]  # ticket, name of the worker's method, payload
Commands = queue.SimpleQueue[Command | None]
Doing = tuple[str, float] | None  # what a worker does, for how many seconds


class Crew(Protocol):
    """What the engine asks of its workers."""

    @property
    def offsets(self) -> Sequence[float]:
        """Seconds that each worker's perf_counter is ahead of the controller's."""

    def tell(self, name: str, payloads: Mapping[int, Any]) -> int:
        """Sends a command to some workers, each its payload; gives the ticket under which their answers come to the desk.

        Raises:
            PlanError: a payload cannot be sent; then nobody has got anything.
        """

    def abort(self, step: int, why: str) -> None:
        """Wakes every worker that waits for another in this step."""

    def close(self) -> None:
        """Ends the workers after the commands that they have."""


def work(worker: Worker, commands: Commands, threads: int) -> None:
    """A worker's thread: obeys until it is told to end."""
    torch.set_num_threads(threads)  # a new thread's first operation would take the process's default
    while (command := commands.get()) is not None:
        ticket, name, payload = command
        worker.obey(ticket, name, partial(_read, payload))


class LocalCrew:
    """Workers that are threads of this process."""

    def __init__(self, workers: int, desk: Desk, timeout: float | None) -> None:
        self.offsets = [0.0] * workers
        self._mailboxes = [Mailbox() for _ in range(workers)]
        self._commands: list[Commands] = [queue.SimpleQueue() for _ in range(workers)]
        self._timeout = timeout
        self._desk = desk
        self._workers = [Worker(w, LocalTransport(w, self._mailboxes, timeout), partial(_answer, desk, w)) for w in range(workers)]
        desk.watch = self._watch
        self._threads = [
            threading.Thread(target=work, args=(worker, commands, torch.get_num_threads()), name=f"pipe worker {w}", daemon=True)
            for w, (worker, commands) in enumerate(zip(self._workers, self._commands))
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, name: str, payloads: Mapping[int, Any]) -> int:
        ticket = self._desk.ticket(frozenset(payloads))
        for worker, payload in payloads.items():
            self._commands[worker].put((ticket, name, payload))
        return ticket

    def abort(self, step: int, why: str) -> None:
        for mailbox in self._mailboxes:
            mailbox.abort(step, why)

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def _watch(self, silent: set[int]) -> Failure | None:
        for w in silent:
            if found := _overdue(w, _for_seconds(self._workers[w]), self._timeout, socket.gethostname(), os.getpid()):
                return found
        return None


_lock = threading.Lock()
_queues: dict[str, Commands] = {}  # of the workers in this process, by address
_workers: dict[str, Worker] = {}
_desks: dict[str, Desk] = {}  # of the engines in this process


def command_at(address: str, ticket: int, name: str, payload: wire.Message) -> None:
    """RPC target: enqueues a command."""
    _queue(address).put((ticket, name, payload))


def end_at(address: str) -> None:
    """RPC target: ends a worker."""
    _queue(address).put(None)


def answer_at(engine: str, ticket: int, worker: int, kind: str, value: wire.Message) -> None:
    """RPC target: lays an answer on the desk."""
    if desk := _desks.get(engine):
        try:
            found = wire.unpack(value, torch.device("cpu"), _as_it_is)
        except Exception as error:  # of whatever class the user's object raises when it is made again
            text = f"its answer cannot be read here ({error}); an output must be picklable both ways: return tensors and plain data"
            kind, found = "failed", Failure("answer", worker, socket.gethostname(), os.getpid(), type(error).__name__, text, "")
        desk.answer(ticket, worker, kind, found)


def doing_at(address: str) -> Doing:
    """RPC target: what a worker does at this moment."""
    worker = _workers.get(address)
    return _for_seconds(worker) if worker else None


def _queue(address: str) -> Commands:
    with _lock:
        return _queues.setdefault(address, queue.SimpleQueue())


def serve_worker(engine: str, index: int, ranks: tuple[int, ...], timeout: float | None, threads: int) -> None:
    """A worker's thread in a process of the job."""
    from pipe.session import current

    session = current()
    assert session is not None
    address = f"{engine}/{index}"
    commands = _queue(address)
    transport = RpcTransport(session, address, index, dict(enumerate(ranks)), timeout)

    def answer(ticket: int, kind: str, value: Any) -> None:
        try:
            message = _packed(value)
        except PlanError as error:
            kind, message = "failed", _packed(worker.failure("answer", error))
        session.call(0, answer_at, engine, ticket, index, kind, message)

    worker = _workers[address] = Worker(index, transport, answer)
    work(worker, commands, threads)
    forget(address)
    del _workers[address], _queues[address]


class RpcCrew:
    """Worker 0 is a thread of this process; the others are in the processes of the job."""

    def __init__(self, engine: str, session: Session, workers: int, desk: Desk, timeout: float | None) -> None:
        self.offsets = [session.members[w].clock_offset for w in range(workers)]
        self._engine = engine
        self._session = session
        self._timeout = timeout
        self._desk = desk
        self._asked: dict[int, Any] = {}
        _desks[engine] = desk
        desk.watch = self._watch
        ranks = tuple(range(workers))
        mailboxes = RpcTransport(session, f"{engine}/0", 0, dict(enumerate(ranks)), timeout)
        self._first: Commands = queue.SimpleQueue()
        self._worker = Worker(0, mailboxes, partial(_answer, desk, 0))
        self._thread = threading.Thread(
            target=work, args=(self._worker, self._first, torch.get_num_threads()), name="pipe worker 0", daemon=True
        )
        self._thread.start()
        for rank in ranks[1:]:
            session.start(rank, serve_worker, engine, rank, ranks, timeout, torch.get_num_threads())

    def tell(self, name: str, payloads: Mapping[int, Any]) -> int:
        messages = {worker: _packed(payload) for worker, payload in payloads.items() if worker}
        ticket = self._desk.ticket(frozenset(payloads))
        for worker, message in messages.items():
            self._session.call(worker, command_at, f"{self._engine}/{worker}", ticket, name, message)
        if 0 in payloads:
            self._first.put((ticket, name, payloads[0]))
        return ticket

    def abort(self, step: int, why: str) -> None:
        for w in range(len(self.offsets)):
            address = f"{self._engine}/{w}"
            if w:
                self._session.call(w, abort_at, address, step, why)
            else:
                abort_at(address, step, why)

    def close(self) -> None:
        self._first.put(None)
        for w in range(1, len(self.offsets)):
            self._session.call(w, end_at, f"{self._engine}/{w}")
        self._thread.join(1.0)
        forget(f"{self._engine}/0")
        _desks.pop(self._engine, None)

    def _watch(self, silent: set[int]) -> Failure | None:
        """A worker that is gone, or that does one thing for longer than the time-out. A slow answer says nothing."""
        for w in silent:
            member = self._session.members[w]
            if w == 0:
                doing = _for_seconds(self._worker)
            else:
                asked = self._asked.get(w)
                if asked is None:
                    self._asked[w] = self._session.call(w, doing_at, f"{self._engine}/{w}")
                    continue
                if not asked.done():
                    continue
                del self._asked[w]
                try:
                    doing = asked.value()
                except Exception as error:
                    return _gone(w, member.host, member.pid, str(error))
            if found := _overdue(w, doing, self._timeout, member.host, member.pid):
                return found
        return None


def _read(payload: Any) -> Any:
    return wire.unpack(payload, "cpu", _as_it_is) if isinstance(payload, wire.Message) else payload


def _packed(value: Any) -> wire.Message:
    message = wire.pack(value)
    if message.ready is not None:
        message.ready.synchronize()
    return message


def _answer(desk: Desk, worker: int, ticket: int, kind: str, value: Any) -> None:
    desk.answer(ticket, worker, kind, value)


def _as_it_is(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    return tensor


def _for_seconds(worker: Worker) -> Doing:
    doing = worker.doing
    return None if doing is None else (doing[0], time.monotonic() - doing[1])


def _gone(worker: int, host: str, pid: int, why: str) -> Failure:
    first = why.splitlines()[0] if why else "no answer"
    return Failure("connection", worker, host, pid, "PeerLost", f"the process is gone ({first}); see what it printed, then start again", "")


def _overdue(worker: int, doing: Doing, timeout: float | None, host: str, pid: int) -> Failure | None:
    if doing is None or not timeout or doing[1] <= timeout:
        return None
    where = doing[0]
    action = Action.parse(where) if "@" in where else None
    who = f"stage {action.stage}" if action else f"worker {worker}"
    text = (
        f"{who} has been in {where} for {doing[1]:.1f} s and the time-out is {timeout:g} s; nothing takes longer: "
        "give more time with --timeout SECONDS or timeout= (0: for ever), or look at what the stage does"
    )
    stage, micro_batch = (action.stage, action.micro_batch) if action else (None, None)
    return Failure(where, worker, host, pid, "TimeoutError", text, "", stage, micro_batch)
