"""Real processes for tests: each answers questions, none outlives the `with`."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

ENDS = 20.0  # seconds in which a process that was told to end does

_spawn = multiprocessing.get_context("spawn")


class Process:
    """A process that runs functions, each in a thread of its own."""

    def __init__(self, rank: int) -> None:
        self._here, there = _spawn.Pipe()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self.process = _spawn.Process(target=_answer, args=(there,), name=f"rank {rank}")
        self.process.start()
        there.close()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The result of a module-level function there, to come."""
        number = next(self._numbers)
        answer = self._asked[number] = Future()
        self._here.send_bytes(pickle.dumps((number, function, args)))
        return answer

    def end(self) -> int | None:
        """The exit code once it has ended; None: it does not."""
        with suppress(OSError):  # it may have died
            self._here.send_bytes(pickle.dumps(None))
        self.process.join(ENDS)
        return self.process.exitcode

    def _read(self) -> None:
        try:
            while True:
                number, error, result = pickle.loads(self._here.recv_bytes())
                answer = self._asked.pop(number)
                answer.set_exception(error) if error else answer.set_result(result)
        except (OSError, EOFError):
            for answer in self._asked.values():
                answer.set_exception(EOFError("the process has ended"))


def _answer(link: Connection) -> None:
    lock = threading.Lock()

    def run(number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            reply = pickle.dumps((number, None, function(*args)))
        except BaseException as error:
            reply = pickle.dumps((number, error, None))
        with lock:
            link.send_bytes(reply)

    with suppress(OSError, EOFError):  # the test may have died
        while question := pickle.loads(link.recv_bytes()):
            threading.Thread(target=run, args=question, daemon=True).start()
    os._exit(0)  # what still waits here, waits for a test that has ended


@contextmanager
def processes(number: int) -> Iterator[list[Process]]:
    """Processes with the environment that the launcher gives; the store of their rendezvous lives here, on the loopback."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    port = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        timeout=timedelta(seconds=60),
    )
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, given):
        started = [Process(rank) for rank in range(number)]
    try:
        yield started
    finally:
        ended = [one.end() for one in started]
        for one in started:
            one.process.kill()
        del store
    assert None not in ended, f"a process did not end: {ended}"
