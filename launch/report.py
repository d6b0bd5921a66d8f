"""What is said of a worker that failed: one line, and the exit code of the job."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

_WHY = {
    signal.SIGKILL: "maybe out of memory: the kernel's log (dmesg) tells; more stages or smaller micro-batches need less",
    signal.SIGSEGV: "a crash in native code: run with PYTHONFAULTHANDLER=1 to see where",
    signal.SIGBUS: "maybe /dev/shm is full: df /dev/shm tells",
    signal.SIGABRT: "native code gave up: its message is above",
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and the line that says why; an empty line where the user has seen it."""

    code: int
    line: str = ""


@dataclass(frozen=True)
class Ended:
    """A worker's process that has failed."""

    rank: int
    pid: int
    status: int  # as of subprocess: the exit code, or minus the signal


def first(failures: Mapping[int, Ended]) -> Ended:
    """The failure that the others follow from, of those found at one look; in the order in which they were found.

    A worker that was ended because of another has SIGTERM. Rank 0 that ends with 1 may have raised since another worker was gone.
    """
    return min(failures.values(), key=lambda e: (e.status == -signal.SIGTERM, e.rank == 0 and e.status == 1))


def outcome(ended: Ended, place: str, host: str) -> Outcome:
    """The exit code and the line for the user."""
    who = f"{place} (rank {ended.rank}, pid {ended.pid}) on host {host}"
    if ended.status < 0:
        number = -ended.status
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        why = _WHY.get(signal.Signals(number)) if number in set(signal.Signals) else None
        return Outcome(128 + number, f"{who} was killed by {name}" + (f" - {why}" if why else ""))
    if ended.rank == 0:
        return Outcome(ended.status)  # the script's own end: it has said what there is to say
    return Outcome(ended.status, f"{who} ended by itself with exit code {ended.status} - its last lines begin with [rank {ended.rank}]")
