"""Who takes part in a job, and whether they fit together. Told through the rendezvous store, before RPC begins."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from pipe.errors import PipeError
from pipe.signing import sign, verified

_PINGS = 10


@dataclass(frozen=True)
class Member:
    """One process of the job."""

    rank: int
    name: str
    host: str
    pid: int
    local_rank: int
    boot_id: str  # equal where perf_counter is the same clock: one boot of one host
    python: str  # minor: "3.11"
    torch: str  # without the build: "2.9.0" for 2.9.0+cpu too
    pipe: str
    has_script: bool  # whether the user's script is a file here, too
    clock_offset: float = 0.0  # seconds: perf_counter of this member minus rank 0's


def facts(rank: int, script: str | None) -> Member:
    """This process."""
    host = socket.gethostname()
    return Member(
        rank=rank,
        name=f"worker{rank}",
        host=host,
        pid=os.getpid(),
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        boot_id=f"{_boot_id()}/{host}",
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.__version__.split("+")[0],
        pipe=_version(),
        has_script=script is not None and Path(script).is_file(),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _version() -> str:
    try:
        return metadata.version("pipe-launch")
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


def exchange(store: Store, own: Member, world_size: int, secret: bytes, timeout: float) -> tuple[Member, ...]:
    """The members of all ranks, once all have told theirs.

    Raises:
        PipeError: some have not within `timeout` seconds, or do not know the secret.
    """
    store.set(_key(own.rank), sign(secret, json.dumps(asdict(own)).encode()).hex())
    keys = [_key(rank) for rank in range(world_size)]
    _wait(store, keys, timeout)
    told = [store.get(key) for key in keys]
    store.set(f"{_key(own.rank)}/read", "")
    if own.rank == 0:  # where the store may live: it stays until all have read, even if they then disagree
        _wait(store, [f"{key}/read" for key in keys], timeout)
    return tuple(_read(told[rank], rank, own.rank, secret) for rank in range(world_size))


def _read(told: bytes, rank: int, reader: int, secret: bytes) -> Member:
    try:
        return Member(**json.loads(verified(secret, bytes.fromhex(told.decode()))))
    except (PipeError, ValueError):
        raise PipeError(
            f"worker {rank} and worker {reader} do not have the same secret; a job has one: start both with the same PIPE_SECRET"
        ) from None


def agree(members: Sequence[Member]) -> None:
    """Checks that all have the same Python minor, torch and pipe-launch; all members raise the same text.

    Raises:
        PipeError: names the first two that differ.
    """
    first = members[0]
    for other in members:
        for what, attribute in (("Python", "python"), ("torch", "torch"), ("pipe-launch", "pipe")):
            here, there = getattr(first, attribute), getattr(other, attribute)
            if here != there:
                raise PipeError(
                    f"worker {other.rank} on {other.host} has {what} {there} and worker {first.rank} on {first.host} has {here}; "
                    f"a job needs one version: install {what} {here} on {other.host}"
                )


def with_clocks(store: Store, members: Sequence[Member], rank: int, ask: Callable[[], float], timeout: float) -> tuple[Member, ...]:
    """The members with their clock offsets; those of another boot than rank 0's measure theirs, the rest share its clock.

    Args:
        ask: rank 0's perf_counter.
    """
    away = [m for m in members if m.boot_id != members[0].boot_id]
    if any(m.rank == rank for m in away):
        store.set(f"{_key(rank)}/clock", repr(clock_offset(ask)))
    _wait(store, [f"{_key(m.rank)}/clock" for m in away], timeout)
    offsets = {m.rank: float(store.get(f"{_key(m.rank)}/clock")) for m in away}
    return tuple(replace(m, clock_offset=offsets.get(m.rank, 0.0)) for m in members)


def clock_offset(ask: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> float:
    """This process's clock minus the asked one's, in seconds; wrong by at most half the quickest round trip.

    Source: Cristian, 1989, Probabilistic clock synchronization, section 3.
    """
    rounds = []
    for _ in range(_PINGS):
        asked = clock()
        theirs = ask()
        answered = clock()
        rounds.append((answered - asked, (asked + answered) / 2 - theirs))
    return min(rounds)[1]


def _key(rank: int) -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job may meet its old store
    return f"pipe/{attempt}/member/{rank}"


def _wait(store: Store, keys: Sequence[str], timeout: float) -> None:
    try:
        if keys:
            store.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        late = [key.split("/")[3] for key in keys if not store.check([key])]
        raise PipeError(
            f"worker{'s'[: len(late) > 1]} {', '.join(late)} did not join within {timeout:g} s; "
            f"a job begins when all are there: start them, or give more time with --timeout"
        ) from None
