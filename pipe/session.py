"""Joining and leaving RPC: who takes part in a job, and what a worker does until it is told to stop.

Rank 0 runs the user's script; the others `serve`. What RPC calls here only enqueues or answers at once.

    rank 0                          rank 1
    join --------- facts ---------> join         compared in the store, before RPC begins
    start(1, f) -- _post(f) ------> serve        runs f in a thread
                <- alive() --------              is rank 0 still there?
    leave -------- _post(stop) ---> serve        ends
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import rpc
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.rpc import constants
from torch.futures import Future

from pipe import signing
from pipe.errors import PipeError
from pipe.members import Member, agree, exchange, facts, with_clocks

__all__ = ["Member", "Session", "alive", "current", "join"]

_PING_EVERY = 5.0  # seconds between two looks at rank 0
_PING_AGAIN = 1.0  # seconds after a look that failed
_FAREWELL = 1.0  # seconds for stops to be acknowledged
_GRACE = 5.0  # seconds for RPC to shut down
_WEEK = 7 * 86400.0
_RPC_THREADS = 2  # what runs in them only enqueues


@dataclass(frozen=True)
class _Start:
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def begin(self) -> None:
        threading.Thread(target=self.function, args=self.args, name=self.function.__name__, daemon=True).start()


@dataclass(frozen=True)
class _Stop:
    code: int


_commands: queue.SimpleQueue[_Start | _Stop] = queue.SimpleQueue()  # may fill before `serve` begins
_session: Session | None = None


def _post(command: _Start | _Stop) -> None:
    _commands.put(command)


def alive() -> None:
    """Answers, which is all that a ping needs."""


@dataclass
class Session:
    """This process's place in the job."""

    rank: int
    world_size: int
    members: tuple[Member, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    used: bool = False  # whether an engine has been made here

    def call(self, rank: int, function: Callable[..., Any], *args: Any, timeout: float = 0.0) -> Future[Any]:
        """The result of a module-level function in another process, to come. The function must not block.

        A process that is gone shows as a future that failed, never as an exception here.

        Args:
            timeout: seconds until the future fails; 0: never.
        """
        try:
            return rpc.rpc_async(self.members[rank].name, function, args=args, timeout=timeout)  # type: ignore[no-any-return]
        except RuntimeError as error:  # also when RPC has ended
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[None]:
        """Runs a module-level function in a new thread of that process, which must be serving or be this one.

        Returns a future that is done when the process has the command.
        """
        if rank != self.rank:
            return self.call(rank, _post, _Start(function, args))
        _Start(function, args).begin()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def serve(self) -> int:
        """Does what rank 0 says until it says stop; without time limit.

        Returns the exit code: 0 after a normal end, 1 after a failure elsewhere or when rank 0's process is gone.
        """
        rank_0 = _Watched(self)
        while True:
            try:
                command = _commands.get(timeout=rank_0.pause)
            except queue.Empty:
                if rank_0.gone():
                    command = _Stop(1)
                else:
                    continue
            if isinstance(command, _Stop):
                self._depart(graceful=command.code == 0)
                return command.code
            command.begin()

    def leave(self, graceful: bool) -> None:
        """Ends the job for all (from rank 0), or for this process.

        After a failure leave without grace: a graceful end of RPC waits for ever on a dead process. Then nothing is waited for but, a
        second at most, that the others know, and for RPC's own threads to end.
        """
        if _session is not self:
            return
        if self.rank == 0:
            told = [self.call(rank, _post, _Stop(0 if graceful else 1)) for rank in range(1, self.world_size)]
            _wait(told, _FAREWELL)
        self._depart(graceful)

    def _depart(self, graceful: bool) -> None:
        global _session
        _session = None
        # Also without grace: Python's own end would meet RPC's threads and abort.
        ending = threading.Thread(target=_shut_down, args=(graceful,), name="rpc shutdown", daemon=True)
        ending.start()
        ending.join(_GRACE)


class _Watched:
    """Whether rank 0's process is gone. TensorPipe tells of a broken link only to who has a call on it, hence pings.

    A ping that is merely slow (the process computes and holds the GIL) says nothing; two that failed say gone.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ping: Future[Any] | None = None
        self._failed = 0

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return _PING_AGAIN if self._ping or self._failed else _PING_EVERY

    def gone(self) -> bool:
        if self._ping is not None and self._ping.done():
            self._failed = self._failed + 1 if failure(self._ping) else 0
            self._ping = None
        elif self._ping is None:
            self._ping = self._session.call(0, alive)
        return self._failed >= 2


def failure(future: Future[Any]) -> Exception | None:
    """Why a future failed, None: it did not; waits until it is done."""
    try:
        future.wait()
    except Exception as error:  # of any type: the other process names it
        return error
    return None


def join(
    rank: int,
    world_size: int,
    *,
    secret: bytes,
    options: Mapping[str, Any] | None = None,
    timeout: float | None = 300.0,
    script: str | None = None,
) -> Session:
    """Takes part in the job that MASTER_ADDR and MASTER_PORT name, when all its workers have come.

    Args:
        secret: of the job; what is not signed with it is refused.
        options: the engine's, as given to the launcher.
        timeout: seconds to wait for the others; None or 0: a week, as RPC takes a number only.
        script: the user's, to tell whether this host has it.

    Raises:
        PipeError: not all came in time, they do not have one secret, or their versions differ; on every rank.
    """
    global _session
    if _session is not None:
        raise PipeError("this process has joined a job already; it can be in one: leave that first")
    timeout = timeout or _WEEK
    store = _store(rank, world_size, timeout)
    members = exchange(store, facts(rank, script), world_size, secret, timeout)
    agree(members)
    signing.install(secret)
    _init_rpc(members[rank].name, rank, world_size, timeout)
    members = with_clocks(store, members, rank, _clock_of_rank_0, timeout)
    _session = Session(rank, world_size, members, dict(options or {}))
    return _session


def current() -> Session | None:
    """The job that this process has joined."""
    return _session


def _store(rank: int, world_size: int, timeout: float) -> Store:
    try:
        store: Store = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout)))[0]
    except (RuntimeError, ValueError) as error:
        raise PipeError(f"no rendezvous ({str(error).splitlines()[0]}); MASTER_ADDR and MASTER_PORT name it: check them") from None
    return store


def _init_rpc(name: str, rank: int, world_size: int, timeout: float) -> None:
    # Not over TensorPipe's shared memory, whose thread never sleeps and takes a core from the stages; sockets are as fast.
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=_RPC_THREADS, rpc_timeout=timeout, _transports=["uv"])
    constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)  # half an hour, else, when one ends while joining
    try:
        with warnings.catch_warnings():  # init_rpc warns of the way in which it uses a process group itself
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise PipeError(
            f"RPC did not begin ({str(error).splitlines()[0]}); all workers connect to all: "
            f"see whether one has ended, and that TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name an interface which the others reach"
        ) from None


def _clock_of_rank_0() -> float:
    seconds: float = rpc.rpc_sync(0, time.perf_counter, timeout=0)
    return seconds


def _wait(futures: list[Future[Any]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(future.done() for future in futures):
        time.sleep(0.001)


def _shut_down(graceful: bool) -> None:
    logging.getLogger("torch.distributed.rpc.api").disabled = True  # a peer that is gone is no news here
    with suppress(RuntimeError):
        rpc.shutdown(graceful=graceful)
