"""Starts, watches and ends the workers of this host, by torch.distributed.elastic."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from launch.output import Prefixed
from launch.peers import Peers
from launch.rendezvous import Meeting, Static
from launch.report import Ended, Outcome, first, outcome
from launch.spec import WorkerRun

_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_LOOK = 0.1  # seconds between two looks at the workers
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Agent(LocalElasticAgent):
    """Torch elastic's agent, which also ends whole process groups and hears of the other hosts."""

    def __init__(self, spec: WorkerSpec, logs: Prefixed, runs: Sequence[WorkerRun], peers: Peers) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=_GRACE)  # `Peers.done` has waited
        self.peers = peers
        self.outcome: Outcome | None = None  # why the job failed
        self._runs = runs
        self._groups: list[int] = []  # each worker leads its own

    @property
    def attempt(self) -> int:
        return int(self._worker_group.spec.max_restarts) - int(self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._groups = list(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self.outcome = self._judge(result)
            self.peers.fail(self.attempt, self.outcome)
        elif found := self.peers.failure(self.attempt):
            self.outcome = found
            result = RunResult(state=WorkerState.FAILED)
        elif result.state is WorkerState.SUCCEEDED and not self.peers.done(self.attempt):
            result = RunResult(state=WorkerState.HEALTHY)  # until the other hosts are done
        if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
            again = f"starting again ({self.attempt + 1} of {worker_group.spec.max_restarts})"
            say(f"{self.outcome.line}; {again}" if self.outcome and self.outcome.line else again)
        return result

    def _judge(self, result: RunResult) -> Outcome:
        failures = {rank: Ended(rank, failure.pid, failure.exitcode) for rank, failure in result.failures.items()}
        ended = first(failures)
        place = next(run.place for run in self._runs if run.rank == ended.rank)
        return outcome(ended, place, socket.gethostname())

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the workers and their children: elastic passes a signal on, but the workers ignore SIGINT, and it waits long."""
        if isinstance(sys.exc_info()[1], SignalException):
            handle(lambda number, frame: self.kill())  # who signals again does not want to wait
        self._signal_groups(signal.SIGTERM)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(map(_runs, self._groups)):
            time.sleep(_LOOK / 5)
        self.kill()
        super()._shutdown()

    def kill(self) -> None:
        """Ends what is left of the workers' process groups: a DataLoader's children survive a worker that was killed."""
        self._signal_groups(signal.SIGKILL)

    def _signal_groups(self, number: signal.Signals) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)


def _runs(pid: int) -> bool:
    """Whether our child still runs; leaves its exit status to who waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def run(meeting: Meeting, node: int, runs: Sequence[WorkerRun]) -> int:
    """Runs the workers of this host to the end of the job; returns its exit code.

    Args:
        runs: those of this host.
    """
    silence()
    logs = Prefixed(runs)
    spec = WorkerSpec(
        role="worker",
        local_world_size=len(runs),
        entrypoint=runs[0].command[0],
        args=runs[0].command[1:],
        rdzv_handler=Static(meeting, node),
        max_restarts=meeting.command.max_restarts,
        monitor_interval=_LOOK,
    )
    agent = Agent(spec, logs, runs, Peers(meeting.store, node, len(meeting.workers)))
    ended = watch(agent, node)
    logs.finish()
    if ended.line:
        say(ended.line)
    agent.peers.farewell()
    return ended.code


def watch(agent: Agent, node: int) -> Outcome:
    """Runs the agent; how the job ended. Afterwards no process of it is left."""
    try:
        with no_name_lookups():
            result = agent.run()
        ended = (agent.outcome or Outcome(1)) if result.is_failed() else Outcome(0)
    except SignalException as stopped:
        ended = Outcome(128 + stopped.sigval)
        name = signal.Signals(stopped.sigval).name
        agent.peers.fail(agent.attempt, Outcome(ended.code, f"node {node} ({socket.gethostname()}) was stopped by {name}"))
    finally:
        handle(lambda number, frame: None)  # we are ending already
        agent.kill()
    return ended


def handle(handler: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


def say(line: str) -> None:
    print(f"pipe-launch: {line}", file=sys.stderr, flush=True)


def silence() -> None:
    """Elastic's long reports are not shown: what matters is said in one line."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextmanager
def no_name_lookups() -> Iterator[None]:
    """Elastic puts the host's full name in each of its (unshown) events; one that does not resolve would wait for a name server."""
    original = socket.getfqdn
    socket.getfqdn = lambda name="": name or socket.gethostname()
    try:
        yield
    finally:
        socket.getfqdn = original
