"""A job as data: what was asked, and from it what each worker runs. Nothing here starts a process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from launch.foreign import ROOT
from launch.network import Endpoint

ENTRY = ROOT / "launch" / "worker.py"
# A step frees what the next one allocates. glibc gives such memory back, and every step would fault each of its pages in anew, zeroed:
# a fifth of the time of a convolutional step under GPipe. Its own default also keeps less for threads other than the first.
KEPT_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}  # bytes


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every host of the job agrees on: node 0's is taken by all."""

    script: str  # an absolute path, or the name of a module
    argv: tuple[str, ...] = ()
    module: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # the engine's, only those given as flags
    max_restarts: int = 0

    @property
    def folder(self) -> str:
        """What Python puts first on sys.path: the script's folder, or the working directory for a module."""
        return str(Path.cwd() if self.module else Path(self.script).parent)

    @property
    def replicas(self) -> int:
        return int(self.options.get("replicas", 1))

    @property
    def stages(self) -> int:
        return int(self.options.get("stages", 1))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Command:
        data = json.loads(text)
        return cls(**{**data, "argv": tuple(data["argv"])})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job as seen from one host."""

    command: Command
    nodes: int = 1
    node: int = 0
    endpoint: Endpoint | None = None
    interface: str | None = None
    here: int | None = None  # workers of this host, where said
    patience: float = 300.0  # seconds of rendezvous

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nnodes is {self.nodes}; a job has at least one host")
        if not 0 <= self.node < self.nodes:
            raise UsageError(f"--node-rank is {self.node}; with --nnodes {self.nodes} it is 0 to {self.nodes - 1}, another on each host")
        if self.nodes > 1 and self.endpoint is None:
            raise UsageError(f"--nnodes is {self.nodes} without --rdzv-endpoint; give HOST:PORT of node 0, the same on every host")
        for flag in ("stages", "replicas", "micro_batches", "stages_per_worker"):
            number = self.command.options.get(flag, 1)
            if number < 1:
                raise UsageError(f"--{flag.replace('_', '-')} is {number}; it is at least 1")
        if self.here is not None and self.here < 1:
            raise UsageError(f"--nproc-per-node is {self.here}; it is at least 1")
        if self.node == 0 and (self.here is None or self.nodes == 1):
            shares(self.command, [self.here] * self.nodes)


@dataclass(frozen=True)
class WorkerRun:
    """What one worker runs."""

    rank: int
    node: int
    local_rank: int
    place: str  # "stage 1", "stage 1 of replica 0"
    command: tuple[str, ...]
    env: Mapping[str, str]  # added to the launcher's own; torch adds RANK, WORLD_SIZE and their like


def shares(command: Command, given: Sequence[int | None]) -> tuple[int, ...]:
    """Workers of each host.

    Args:
        given: --nproc-per-node of each host.

    Raises:
        UsageError: they do not make stages x replicas workers.
    """
    total = command.stages * command.replicas
    asked = f"{command.stages} stages x {command.replicas} replicas"
    known = [workers for workers in given if workers is not None]
    if not known:
        if total % len(given):
            raise UsageError(
                f"{asked} make {total} workers, which {len(given)} hosts cannot share equally: give --nproc-per-node on each host"
            )
        return (total // len(given),) * len(given)
    if len(known) < len(given):
        raise UsageError(f"--nproc-per-node is missing on node {list(given).index(None)}; when one host has it, each has: add it there")
    if "stages" in command.options and sum(known) != total:
        raise UsageError(
            f"--nproc-per-node makes {' + '.join(map(str, known))} = {sum(known)} workers, but {asked} need {total}: change one"
        )
    if sum(known) % command.replicas:
        raise UsageError(f"{sum(known)} workers cannot be shared by {command.replicas} replicas: change --nproc-per-node or --replicas")
    return tuple(known)


def settle(command: Command, workers: Sequence[int]) -> Command:
    """The command with the number of stages that follows from the workers, where it was not given."""
    stages = sum(workers) // command.replicas
    if "stages" in command.options or stages == 1:
        return command
    return replace(command, options={**command.options, "stages": stages})


def expand(command: Command, workers: Sequence[int], env: Mapping[str, str], *, interface: str, cores: int, secret: str) -> list[WorkerRun]:
    """What each worker of the job runs, in order of rank.

    Args:
        workers: of each host.
        env: the launcher's; what the user has set there wins.
        interface: of this host, for every connection between workers.
        cores: of this host, divided among its workers.
        secret: signs the workers' messages; hexadecimal.
    """
    from pipe.placement import threads_for

    settled = settle(command, workers)
    runs: list[WorkerRun] = []
    for node, count in enumerate(workers):
        added = {
            "TP_SOCKET_IFNAME": interface,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(threads_for(count, cores, env.get("OMP_NUM_THREADS"))),
            **{name: env.get(name, value) for name, value in KEPT_MEMORY.items()},
            "TORCH_CPP_LOG_LEVEL": env.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "PIPE_LAUNCHER": str(os.getpid()),
            "PIPE_JOB": settled.to_json(),
            "PIPE_SECRET": secret,
        }
        for local_rank in range(count):
            rank = len(runs)
            runs.append(WorkerRun(rank, node, local_rank, place(settled, rank), (sys.executable, "-u", str(ENTRY)), added))
    return runs


def place(command: Command, rank: int) -> str:
    """The stage of a worker, in words."""
    replica, stage = divmod(rank, command.stages)
    return f"stage {stage}" if command.replicas == 1 else f"stage {stage} of replica {replica}"


def table(runs: Sequence[WorkerRun]) -> str:
    """What `--dry-run` prints."""
    rows = [("rank", "node", "local", "place", "command")]
    rows += [(str(r.rank), str(r.node), str(r.local_rank), r.place, " ".join(r.command)) for r in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    shown = {**runs[0].env, "PIPE_SECRET": "(32 random bytes, or yours)"}
    return "\n".join([*lines, "", "environment added:", *(f"  {name}={value}" for name, value in shown.items())])
