"""What a step cost and where its time went: a table and one line of advice, from a trace alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipe.action import Action, Op, Schedule
from pipe.errors import PlanError
from pipe.simulator import Costs, simulate
from pipe.trace import Event, Trace

FIELDS = {Op.F: "forward", Op.B: "backward", Op.I: "input_grad", Op.W: "weight_grad", Op.OPTIMIZER: "optimizer"}
CAUSES = {
    "link": "transfers and work between the actions",
    "imbalance": "stages of unequal cost",
    "bubble": "the schedule's own bubble",
}
REMEDIES = {
    "link": "try fewer stages, or larger micro-batches over a faster link",
    "imbalance": "try another split, so that the dearest stage gets fewer layers",
    "bubble": "try more micro-batches, or fewer stages",
}


@dataclass(frozen=True)
class WorkerReport:
    """One worker's share of the step; busy, wait and overhead together are the step time."""

    worker: int
    stages: tuple[int, ...]
    place: str  # say "host0 cuda:1"; "" where unknown
    busy: float  # seconds of forward, backward and optimizer work
    wait: float  # seconds: for another worker's action, before its own or after its last
    overhead: float  # seconds between actions in which all that was needed had been made: transfers, and the engine's own work
    sent_bytes: int | None  # None where nobody counted
    peak_bytes: int | None


@dataclass(frozen=True)
class Report:
    """What a step cost. `str(report)` is a table."""

    step_seconds: float
    bubble: float  # the share of the workers' time in which they were not busy
    workers: tuple[WorkerReport, ...]
    samples_per_second: float | None
    speed_up: float  # all stages' work together / step time: what one device that held all would take against this
    lost: Mapping[str, float]  # worker-seconds not busy, by cause: link, imbalance, bubble; empty where it cannot be told

    @classmethod
    def of(cls, trace: Trace, places: Sequence[str] = (), samples: int | None = None) -> Report:
        """The report of one step.

        Args:
            places: where each worker is.
            samples: rows of the mini-batch.
        """
        step = trace.makespan

        def row(w: int) -> WorkerReport:
            busy, overhead = trace.busy[w], trace.overhead[w]
            return WorkerReport(
                worker=w,
                stages=trace.schedule.stages_of(w),
                place=places[w] if w < len(places) else "",
                busy=busy,
                wait=max(0.0, step - busy - overhead),
                overhead=overhead,
                sent_bytes=trace.sent_bytes[w] if w < len(trace.sent_bytes) else None,
                peak_bytes=trace.peak_bytes[w] if w < len(trace.peak_bytes) else None,
            )

        return cls(
            step_seconds=step,
            bubble=trace.bubble,
            workers=tuple(map(row, range(trace.workers))),
            samples_per_second=samples / step if samples is not None and step else None,
            speed_up=sum(trace.busy) / step if step else 0.0,
            lost=_lost(trace),
        )

    @property
    def cause(self) -> str | None:
        """The cause to which most time was lost; None where nothing was lost or it cannot be told."""
        cause = max(self.lost, key=self.lost.__getitem__, default=None)
        return cause if cause is not None and self.lost[cause] > 0 else None

    @property
    def share(self) -> float:
        """The share of the workers' time that was lost to `cause`, 0 to 1."""
        return self.lost[self.cause] / (self.step_seconds * len(self.workers)) if self.cause else 0.0

    def __str__(self) -> str:
        head = f"step {_seconds(self.step_seconds)}, bubble {self.bubble:.1%}, speed-up over one device {self.speed_up:.2f}x"
        if self.samples_per_second is not None:
            head += f", {self.samples_per_second:.4g} samples/s"
        cause = f"{CAUSES[self.cause]}, {self.share:.1%} of the workers' time" if self.cause else "none"
        return "\n".join([head, *_table(self.workers), f"largest cause of lost time: {cause}"])


def advice(report: Report) -> str:
    """One line: the speed-up over one device; if there is none, also why and what to try."""
    line = f"speed-up over one device {report.speed_up:.2f}x"
    if report.speed_up >= 1 or not report.cause:
        return line
    why = f"most time is lost to {CAUSES[report.cause]} ({report.share:.0%})"
    remedy = f"{REMEDIES[report.cause]}, or one stage if the model fits one device"
    return f"warning: {line}: the pipeline is slower than one device; {why}: {remedy}"


def _lost(trace: Trace) -> Mapping[str, float]:
    """Worker-seconds not busy, by cause. They are told apart by simulating the same order again, each time with one cause less:

    trace --free links--> simulated with measured costs --equal stages--> simulated with the mean cost
          link                                          imbalance                                     bubble
    """
    try:
        runs = [_simulated(schedule, events) for schedule, events in _pipelines(trace)]
    except PlanError:  # not a whole step: nothing to compare it with
        return {}
    if not runs:
        return {}
    free, even = max(f for f, _ in runs), max(e for _, e in runs)
    busy = sum(trace.busy)
    link = max(0.0, trace.makespan - free) * trace.workers
    imbalance = max(0.0, free - even) * trace.workers
    return {"link": link, "imbalance": imbalance, "bubble": max(0.0, trace.makespan * trace.workers - busy - link - imbalance)}


def _pipelines(trace: Trace) -> list[tuple[Schedule, list[Event]]]:
    """Each replica's schedule with its micro-batches numbered from 0, and its events. Replicas have no micro-batch in common."""
    groups: list[tuple[set[int], list[int]]] = []  # micro-batches and workers
    for w, order in enumerate(trace.schedule.orders):
        mine, workers = {a.micro_batch for a in order}, [w]
        for group in [g for g in groups if g[0] & mine]:
            groups.remove(group)
            mine, workers = mine | group[0], group[1] + workers
        if mine:
            groups.append((mine, workers))
    found = []
    for micro_batches, workers in groups:
        number = {m: i for i, m in enumerate(sorted(micro_batches))}
        orders = (trace.schedule.orders[w] for w in sorted(workers))
        renumbered = Schedule(tuple(tuple(Action(a.op, number[a.micro_batch], a.stage) for a in order) for order in orders))
        found.append((renumbered, [e for w in workers for e in trace.by_worker[w]]))
    return found


def _simulated(schedule: Schedule, events: Sequence[Event]) -> tuple[float, float]:
    """The makespans with free links and the mean measured cost of each stage, and with the mean over the stages."""
    taken: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for e in events:
        taken[e.action.op, e.action.stage].append(e.seconds)

    means = {key: sum(seconds) / len(seconds) for key, seconds in taken.items()}
    own: dict[str, list[float]] = {}
    even: dict[str, list[float]] = {}
    for op, name in FIELDS.items():
        found = [means.get((op, s)) for s in range(schedule.stages)]  # None: that stage has no such action
        done = [seconds for seconds in found if seconds is not None]
        own[name] = [seconds or 0.0 for seconds in found]
        even[name] = [0.0 if seconds is None else sum(done) / len(done) for seconds in found]
    return simulate(schedule, Costs(**own)).makespan, simulate(schedule, Costs(**even)).makespan


def _table(workers: Sequence[WorkerReport]) -> list[str]:
    """Aligned lines; text to the left, numbers to the right."""
    rows: list[tuple[str, ...]] = [("worker", "stages", "place", "busy", "wait", "overhead", "sent", "peak memory")]
    for w in workers:
        times = map(_seconds, (w.busy, w.wait, w.overhead))
        rows.append((str(w.worker), ",".join(map(str, w.stages)), w.place or "-", *times, _bytes(w.sent_bytes), _bytes(w.peak_bytes)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(t.ljust(n) if i in (1, 2) else t.rjust(n) for i, (t, n) in enumerate(zip(row, widths))).rstrip() for row in rows]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def _bytes(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
