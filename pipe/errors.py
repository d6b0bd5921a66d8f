"""What can go wrong, as a tree.

    PipeError
      PlanError        what was asked cannot be planned: stages, split, schedule, strategy
        ScheduleError  a schedule that would deadlock, lose work or do it twice
      BatchError       a batch that cannot be cut into micro-batches
      OptimizerError   an optimizer that cannot be carried to the stages
      StageError       a stage raised; holds a Failure
      TransportError   a message did not get through
        TransportTimeout   it did not come in time
        PeerLost           the process at the other end is gone
      Aborted          another worker failed first; the message is that worker's

Every message has the value, the rule and the remedy, in that order, and travels between processes as text.
"""

from __future__ import annotations

from dataclasses import dataclass


class PipeError(Exception):
    """Anything that this package raises on purpose."""


class PlanError(PipeError, ValueError):
    """What was asked cannot be planned."""


class ScheduleError(PlanError):
    """A schedule that would deadlock, lose work or do it twice."""


class BatchError(PipeError, ValueError):
    """A batch that cannot be cut into micro-batches."""


class OptimizerError(PipeError, ValueError):
    """An optimizer that cannot be carried to the stages."""


class TransportError(PipeError):
    """A message did not get through."""


class TransportTimeout(TransportError):
    """A message did not come in time; says what was awaited, how long, and what had come."""


class PeerLost(TransportError):
    """The process at the other end is gone."""


class Aborted(PipeError):
    """Another worker failed first; the message is that worker's."""


@dataclass(frozen=True)
class Failure:
    """An exception of a worker as data, since torch's RPC cannot carry exceptions whole.

    `where` is an action ("F3@1") or a command ("optimizer step"); `traceback` ends in the user's line.
    """

    where: str
    worker: int
    host: str
    pid: int
    kind: str  # the remote type's qualified name
    message: str
    traceback: str
    stage: int | None = None
    micro_batch: int | None = None
    layer: str | None = None  # whose forward raised

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer!r}"
        return f"{self.where} on worker {self.worker} (host {self.host}, pid {self.pid}{layer}): {self.kind}: {self.message}"


class StageError(PipeError):
    """A stage raised. `failure` says where and what; the text ends with the remote traceback."""

    def __init__(self, failure: Failure) -> None:
        remote = f"\n\n--- traceback on worker {failure.worker} ---\n{failure.traceback}" if failure.traceback else ""
        super().__init__(f"{failure}{remote}".rstrip())
        self.failure = failure
        self.stage = failure.stage
        self.worker = failure.worker
        self.host = failure.host
        self.micro_batch = failure.micro_batch
        self.layer = failure.layer
        self.remote_type = failure.kind
        self.remote_traceback = failure.traceback

    def __reduce__(self) -> tuple[type[StageError], tuple[Failure]]:
        return StageError, (self.failure,)
