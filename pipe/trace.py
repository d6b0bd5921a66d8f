"""Trace: one event an action. The simulator makes it, a run makes it, and the same functions read it.

A file is JSON lines: a first line with the plan, the clock and the unit; then one line an event, its action as `F3@1`. Waiting is
derived, never stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipe.action import Action, Op, Schedule
from pipe.chart import draw
from pipe.errors import PipeError

FORMAT = 1
BUSY = frozenset({Op.F, Op.B, Op.I, Op.W, Op.OPTIMIZER})


@dataclass(frozen=True, slots=True)
class Event:
    """An action that was done."""

    action: Action
    worker: int
    start: float  # seconds since the step began
    end: float  # seconds since the step began

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """What happened in one step. With replicas, workers and micro-batches are numbered through over all of them."""

    events: tuple[Event, ...]
    workers: int
    clock: str  # "simulated", "wall" or "cuda"
    plan: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values
    step: int = 0
    peak_bytes: tuple[int, ...] = ()  # one a worker; () where nobody counted
    sent_bytes: tuple[int, ...] = ()  # one a worker; () where nobody counted

    def __post_init__(self) -> None:
        lost = next((e for e in self.events if not 0 <= e.worker < self.workers), None)
        if lost is not None:
            raise PipeError(f"{lost.action} is on worker {lost.worker}; the trace has workers 0 to {self.workers - 1}: count them all")

    @cached_property
    def by_worker(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each worker, in the order in which they began."""
        found: list[list[Event]] = [[] for _ in range(self.workers)]
        for event in sorted(self.events, key=lambda e: e.start):
            found[event.worker].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def schedule(self) -> Schedule:
        """The order in which things were done, without the ops that only traces hold."""
        return Schedule(tuple(tuple(e.action for e in row if e.action.op.scheduled) for row in self.by_worker))

    @cached_property
    def began(self) -> float:
        """The first start, in seconds since the step began."""
        return min((e.start for e in self.events), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((e.end for e in self.events), default=0.0) - self.began

    @property
    def span(self) -> float:
        """The longest of the workers' own times from first start to last end, in seconds."""
        return max((max(e.end for e in row) - row[0].start for row in self.by_worker if row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of forward, backward and optimizer work, one a worker."""
        return tuple(sum(e.seconds for e in row if e.action.op in BUSY) for row in self.by_worker)

    @property
    def bubble(self) -> float:
        """The share of the workers' time in which they were not busy, 0 to 1."""
        whole = self.workers * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each worker held at once, counted per stage and summed over its stages."""
        return tuple(int(peak_held(order, lambda stage: 1)) for order in self.schedule.orders)

    @property
    def starved(self) -> tuple[float, ...]:
        """Seconds in which each worker waited for another's action to end."""
        return tuple(starved for starved, _ in self._gaps)

    @property
    def overhead(self) -> tuple[float, ...]:
        """Seconds between actions in which all that the next one needs had ended: transfers and the engine's own work."""
        return tuple(overhead for _, overhead in self._gaps)

    @cached_property
    def _gaps(self) -> tuple[tuple[float, float], ...]:
        ended = {e.action: e.end for e in self.events if e.action.op.scheduled}
        last = max(ended.values(), default=0.0)

        def due(action: Action) -> float:
            if action.op is Op.OPTIMIZER:  # may wait for everybody: norms, tied weights, the controller
                return last
            needs = self.schedule.needs(action) if action.op.scheduled else ()
            return max((ended.get(need, self.began) for need in needs), default=self.began)

        def gaps(row: Sequence[Event]) -> Iterator[tuple[float, float]]:
            at = self.began
            for event in row:
                gap = max(0.0, event.start - at)
                starved = min(gap, max(0.0, due(event.action) - at))
                yield starved, gap - starved
                at = max(at, event.end)

        rows = [[e for e in row if e.action.op is not Op.SEND] for row in self.by_worker]
        return tuple((sum(s for s, _ in found), sum(o for _, o in found)) for found in (list(gaps(row)) for row in rows))

    def chart(self, width: int | None = None) -> str:
        """A drawing, one line a worker: `0 | F0 F1 .. B0 B0`, or F0@0 where a worker has several stages. See `pipe.chart.draw`."""
        several = any(len(self.schedule.stages_of(w)) > 1 for w in range(self.workers))

        def label(action: Action) -> str:
            if action.op is Op.OPTIMIZER:
                return f"{action.op.value}"
            return str(action) if several else f"{action.op.value}{action.micro_batch}"

        return draw([[(label(e.action), e.start, e.end) for e in row if e.action.op is not Op.SEND] for row in self.by_worker], width)

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON lines; `load` reads it back, equal."""
        head = {"format": FORMAT, "clock": self.clock, "unit": "seconds", "workers": self.workers, "step": self.step}
        head |= {"plan": dict(self.plan), "peak_bytes": self.peak_bytes, "sent_bytes": self.sent_bytes, "events": len(self.events)}
        rows = ({"action": str(e.action), "worker": e.worker, "start": e.start, "end": e.end} for e in self.events)
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)), encoding="ascii")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what `save` wrote.

        Raises:
            PipeError: the file is not a trace, is cut short, or comes from a later version.
        """
        number = 1
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            head = json.loads(lines[0])
            if head["format"] != FORMAT:
                raise PipeError(f"{path} has trace format {head['format']}; this version reads {FORMAT}: use the version that wrote it")
            events = []
            for line in lines[1:]:
                number += 1
                row = json.loads(line)
                events.append(Event(Action.parse(row["action"]), int(row["worker"]), float(row["start"]), float(row["end"])))
            if len(events) != head["events"]:
                raise PipeError(f"{path} holds {len(events)} events of {head['events']}; the file is cut short: save it again")
            counts = {name: tuple(head[name]) for name in ("peak_bytes", "sent_bytes")}
            return cls(tuple(events), head["workers"], head["clock"], head["plan"], head["step"], **counts)
        except (LookupError, TypeError, ValueError) as error:
            raise PipeError(f"{path} line {number} is not of a trace ({error!r}); Trace.save writes JSON lines: save it again") from error

    def chrome(self, path: str | Path) -> None:
        """Writes Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens: one track a worker, an arrow for each message."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._chrome_events()), "displayTimeUnit": "ms"}), encoding="ascii")

    def _chrome_events(self) -> Iterator[dict[str, Any]]:
        micro = 1e6  # the format counts microseconds
        done = {e.action: e for e in self.events if e.action.op.scheduled}
        yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"pipeline, step {self.step} ({self.clock} clock)"}}
        for w in range(self.workers):
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": w, "args": {"name": f"worker {w}"}}
        for number, e in enumerate(self.events):
            at = {"pid": 0, "tid": e.worker, "cat": e.action.op.name}
            args = {"micro_batch": e.action.micro_batch, "stage": e.action.stage}
            yield at | {"ph": "X", "name": str(e.action), "ts": e.start * micro, "dur": e.seconds * micro, "args": args}
            needs = self.schedule.needs(e.action) if e.action.op.scheduled else ()
            for made in (done[n] for n in needs if n in done and done[n].worker != e.worker):
                flow = {"pid": 0, "cat": "message", "name": str(made.action), "id": number}
                yield flow | {"ph": "s", "tid": made.worker, "ts": (made.start + made.end) / 2 * micro}
                yield flow | {"ph": "f", "tid": e.worker, "ts": e.start * micro, "bp": "e"}


def peak_held(order: Iterable[Action], size: Callable[[int], float]) -> float:
    """The most that a worker holds at once while it does its actions in this order.

    A micro-batch takes `size(stage)` from its forward to its whole backward, or to its W where the backward is split. One without
    a backward (as in `predict`) is let go as its forward ends.
    """
    order = tuple(order)
    kept = {(a.micro_batch, a.stage) for a in order if a.op in (Op.B, Op.W)}
    held = peak = 0.0
    for a in order:
        if a.op is Op.F:
            held += size(a.stage)
            peak = max(peak, held)
        if a.op in (Op.B, Op.W) or (a.op is Op.F and (a.micro_batch, a.stage) not in kept):
            held -= size(a.stage)
    return peak
