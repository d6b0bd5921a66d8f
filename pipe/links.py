"""What links and devices are like, measured in a moment before a model is cut.

rank 0 --start--> rank a: sends some bytes to rank b, and times it        one pair after the other
       <--told---
rank 0 --start--> every rank: multiplies matrices on its device            all at once, as they will work
       <--told---
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pipe.session import Session, current

_PATIENCE = 10.0  # seconds for all answers; who does not answer by then counts as unknown
_BYTES = (2**18, 2**22)  # the second only where the first was quick
_QUICK = 0.02  # seconds
_REPEATS = 5
_SIDE = 384  # of the matrices; some milliseconds on a slow core
_EQUAL = 1.25  # devices whose times differ by no more than this factor count as equal: noise is no reason for another cut

_tickets = itertools.count()
_answers: queue.SimpleQueue[tuple[int, Any, float]] = queue.SimpleQueue()


def per_byte(session: Session, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Seconds that a byte takes from one rank to another, without latency; 0 where that could not be measured."""
    found = {}
    for pair in pairs:
        ticket = next(_tickets)
        session.start(pair[0], _send, ticket, pair)
        found[pair] = _told(ticket, 1).get(pair, 0.0)
    return found


def slowness(session: Session, devices: Sequence[Callable[[], str]]) -> list[float]:
    """By what each rank's device is slower than the fastest, measured on all at once; 1 for those about as fast.

    Args:
        devices: of each rank from 0 on; asked on its host.
    """
    ticket = next(_tickets)
    for rank, device in enumerate(devices):
        session.start(rank, _work, ticket, rank, device)
    found = _told(ticket, len(devices))
    return relative([found.get(rank, 0.0) for rank in range(len(devices))])


def relative(seconds: Sequence[float]) -> list[float]:
    """Each by the least; 1 for those that are about as fast, or unknown (0)."""
    known = [s for s in seconds if s > 0]
    least = min(known, default=1.0)
    return [s / least if s > _EQUAL * least else 1.0 for s in seconds]


def seconds(device: str) -> float:
    """The best time of a few multiplications of matrices on a device."""
    place = torch.device(device)
    matrix = torch.ones(_SIDE, _SIDE, device=place)
    times = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        began = time.perf_counter()
        for _ in range(4):
            torch.mm(matrix, matrix)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _send(ticket: int, pair: tuple[int, int]) -> None:
    """In a thread of the first rank of the pair."""
    session = current()
    if session is None:
        return
    rate = 0.0
    with suppress(Exception):  # a rank that is gone is told when the stages are built
        latency = min(_timed(session, pair[1], 1) for _ in range(_REPEATS))
        for nbytes in _BYTES:
            took = min(_timed(session, pair[1], nbytes) for _ in range(2))
            rate = max(took - latency, 0.0) / nbytes
            if took > _QUICK:
                break
    session.call(0, _answer, ticket, pair, rate)


def _timed(session: Session, rank: int, nbytes: int) -> float:
    sent = torch.zeros(nbytes, dtype=torch.uint8)
    began = time.perf_counter()
    session.call(rank, _take, sent, timeout=_PATIENCE).wait()
    return time.perf_counter() - began


def _work(ticket: int, rank: int, device: Callable[[], str]) -> None:
    """In a thread of each rank."""
    torch.set_num_threads(torch.get_num_threads())  # a new thread's first operation would take the process's default
    session, took = current(), 0.0
    with suppress(Exception):  # a device that is not there is told when the stage is built
        took = seconds(device())
    if session is not None:
        session.call(0, _answer, ticket, rank, took)


def _take(sent: Tensor) -> None:
    """RPC target: that it has come is all."""


def _answer(ticket: int, key: Any, value: float) -> None:
    """RPC target on rank 0."""
    _answers.put((ticket, key, value))


def _told(ticket: int, count: int) -> Mapping[Any, float]:
    found: dict[Any, float] = {}
    end = time.monotonic() + _PATIENCE
    while len(found) < count:
        try:
            of, key, value = _answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if of == ticket:  # else it is late, for another question
            found[key] = value
    return found
