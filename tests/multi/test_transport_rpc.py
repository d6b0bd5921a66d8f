"""RpcTransport passes the suite between two processes; and what happens when one of them dies."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pipe import session
from pipe.errors import PeerLost, TransportError
from pipe.transport import rpc
from tests.suites import transport as suite
from tests.suites.processes import Process, processes

pytestmark = pytest.mark.timeout(120)

_engines = itertools.count()
_ends: dict[str, rpc.RpcTransport] = {}  # in the process of that end


def _join(rank: int, world_size: int) -> None:
    session.join(rank, world_size, secret=b"of the test", timeout=60)


def _make(address: str, peers: dict[int, int], timeout: float) -> None:
    here = session.current()
    assert here is not None
    _ends[address] = rpc.RpcTransport(here, address, int(address[-1]), peers, timeout)


def _do(address: str, method: str, *args: Any) -> Any:
    return getattr(_ends[address], method)(*args)


def _sent_bytes(address: str) -> int:
    return _ends[address].sent_bytes


class End:
    """A transport in another process; its messages go there by another way."""

    def __init__(self, process: Process, address: str, peers: dict[int, int], timeout: float) -> None:
        self._process, self._address = process, address
        process.ask(_make, address, peers, timeout).result(60)

    def _call(self, method: str, *args: Any) -> Any:
        return self._process.ask(_do, self._address, method, *args).result(60)

    def begin(self, step: int, schedule: Any) -> None:
        self._call("begin", step, schedule)

    def send(self, worker: int, made_by: Any, tensors: Any) -> None:
        self._call("send", worker, made_by, tensors)

    def recv(self, made_by: Any) -> Any:
        return self._call("recv", made_by)

    def finish(self) -> None:
        self._call("finish")

    def abort(self, why: str) -> None:
        self._call("abort", why)

    @property
    def sent_bytes(self) -> int:
        return self._process.ask(_sent_bytes, self._address).result(60)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Process]]:
    with processes(2) as started:
        joined = [process.ask(_join, rank, 2) for rank, process in enumerate(started)]
        for answer in joined:
            answer.result(60)
        yield started


def pair(two: list[Process], timeout: float, ranks: tuple[int, int] = (0, 1)) -> tuple[End, End]:
    engine = f"engine{next(_engines)}"
    peers = dict(enumerate(ranks))
    a, b = (End(two[rank], f"{engine}/{worker}", peers, timeout) for worker, rank in peers.items())
    return a, b


@pytest.mark.parametrize("ranks", [(0, 1), (1, 1)], ids=["two processes", "one process"])
@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_transport(check: suite.Check, ranks: tuple[int, int], two: list[Process]) -> None:
    check(*pair(two, suite.timeout_of(check), ranks))


def test_a_forgotten_address_takes_nothing(two: list[Process]) -> None:
    two[0].ask(rpc.forget, "old/0").result(60)
    two[0].ask(rpc.deliver, "old/0", 1, "key", "message").result(60)
    with pytest.raises(TransportError, match="'old/0' is not a new address of worker 0; one is engine/worker"):
        End(two[0], "old/0", {0: 0}, 1.0)


def test_a_peer_that_dies_is_told_at_once_not_after_the_time_out() -> None:
    with processes(3) as started:
        for answer in [process.ask(_join, rank, 3) for rank, process in enumerate(started)]:
            answer.result(60)
        a, b = pair(started, 3600.0)
        c = End(started[2], "other/2", {1: 1, 2: 2}, 3600.0)
        for end in (a, b, c):
            end.begin(1, suite.SCHEDULE)
        waiting = [started[0].ask(_do, a._address, "recv", key) for key in (suite.SCHEDULE.orders[1][2], ("unknown", 1))]
        waiting.append(started[2].ask(_do, "other/2", "recv", suite.SCHEDULE.orders[1][2]))
        victim = started[1].process
        os.kill(victim.pid or 0, signal.SIGKILL)
        for answer in waiting:
            with pytest.raises(PeerLost, match=rf"^worker 1 \(host .*, pid {victim.pid}\) is gone: .*; a step needs all its workers"):
                answer.result(60)
        a.send(1, suite.F0, "into the void")
        with pytest.raises(PeerLost, match="worker 1"):
            a.finish()
        victim.join(20)
        assert victim.exitcode == -signal.SIGKILL
