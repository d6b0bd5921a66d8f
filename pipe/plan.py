"""The plan: what every process agrees on, and why. Choosing one is pure; it reads counts and sizes, never a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from pipe.action import Action, Route, Schedule
from pipe.errors import PlanError
from pipe.schedules import schedule as make_schedule

STRATEGIES = ("auto", "single", "naive", "pipeline", "ddp", "hybrid")
MICRO_BATCHES_PER_WORKER = 4  # a bubble of at most (S-1)/(5S-1), under 20 %


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None where nothing was said."""

    stages: int | None = None
    stages_per_worker: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    schedule: str | Schedule | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "stages_per_worker", "replicas", "micro_batches"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PlanError(f"{name} is {value!r}; it is a whole number of at least 1: leave it out to have it chosen")
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise PlanError(f"strategy {self.strategy!r} is not known; it is one of {', '.join(STRATEGIES)}: leave it out for 'auto'")
        if self.stages_per_worker not in (None, 1):
            raise PlanError(f"stages_per_worker is {self.stages_per_worker}; this version runs one stage a worker: leave it out")
        if isinstance(self.schedule, str):
            make_schedule(self.schedule, 1, 1)  # an unknown name is said here
        elif self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise PlanError(f"schedule is a {type(self.schedule).__name__}; it is a name such as 'gpipe' or '1f1b', or a pipe.Schedule")


@dataclass(frozen=True)
class Part:
    """What one stage holds: its layers or modules in words, and what it costs for one micro-batch, where that was measured."""

    layers: str
    parameters: int
    seconds: float | None = None  # forward and backward, on the device of worker 0
    bytes_out: int | None = None  # that cross to later stages, one way


@dataclass(frozen=True)
class Plan:
    """Which strategy, on how many workers, cut how, in what order, and the reason in words.

    `split` is the number of layers of each stage (empty until the cut is known, or where the model is not cut); `places` is
    one text a worker: "host device".
    """

    strategy: str
    stages: int
    replicas: int
    micro_batches: int
    schedule: str = "gpipe"
    stages_per_worker: int = 1
    split: tuple[int, ...] = ()
    reason: str = ""
    places: tuple[str, ...] = ()
    orders: str | None = None  # of a schedule that the user gave
    routes: tuple[Route, ...] = ()  # of each value that crosses between stages; none: one, from each stage to the next

    parts: tuple[Part, ...] = ()  # one a stage, when the cut is known

    @property
    def workers(self) -> int:
        """How many workers it uses."""
        return self.stages * self.replicas // self.stages_per_worker

    def counts(self, pieces: int) -> tuple[int, ...]:
        """How many of a mini-batch's micro-batches each replica gets."""
        return tuple(pieces // self.replicas + (r < pieces % self.replicas) for r in range(self.replicas))

    def order(self, pieces: int) -> Schedule:
        """The schedule for a mini-batch in this many micro-batches, over all replicas.

        Raises:
            PlanError: the user's own schedule is for another number of micro-batches.
        """
        skips = tuple(sorted({route for route in self.routes if route != (route[0], route[0] + 1)}))
        return _order(self.schedule, self.orders, self.stages, self.counts(pieces), skips)

    @property
    def values(self) -> tuple[Route, ...]:
        """The routes of all values that cross between stages."""
        return self.routes or tuple((s, s + 1) for s in range(self.stages - 1))

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads `to_json` back."""
        found: dict[str, Any] = json.loads(text)
        routes = tuple(map(tuple, found["routes"]))
        parts = tuple(Part(**part) for part in found["parts"])
        return cls(**{**found, "split": tuple(found["split"]), "places": tuple(found["places"]), "routes": routes, "parts": parts})

    def table(self) -> str:
        """The stages, one a line: what each holds, its parameters, its time for one micro-batch, and the bytes that leave it."""
        rows = [("stage", "layers", "parameters", "ms a micro-batch", "bytes out")]
        for s, part in enumerate(self.parts):
            ms = "not measured" if part.seconds is None else f"{part.seconds * 1e3:.3g}"
            out = "not measured" if part.bytes_out is None else f"{part.bytes_out:,}"
            rows.append((str(s), part.layers, f"{part.parameters:,}", ms, out))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join([str(self), *("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)])

    def __str__(self) -> str:
        shape = f"{self.stages} stage{'s' * (self.stages > 1)}" + (f" x {self.replicas} replicas" if self.replicas > 1 else "")
        order = f", {self.schedule}" if self.stages > 1 else ""
        return f"{self.strategy}: {shape}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}{order}; {self.reason}"


@lru_cache(maxsize=64)
def _order(name: str, orders: str | None, stages: int, counts: tuple[int, ...], skips: tuple[Route, ...]) -> Schedule:
    """Replicas are more workers: replica r's micro-batches are numbered on from the replica before, so one rule serves them all."""
    if orders is not None:
        own = Schedule.parse(orders)
        if any(count != own.micro_batches for count in counts):
            raise PlanError(
                f"the batch makes {' and '.join(map(str, counts))} micro-batches a replica and the schedule given is for "
                f"{own.micro_batches}; they are equal: give batches of as many rows as before, or name a schedule, such as 'gpipe', "
                "which takes any number"
            )
    placed: list[tuple[Action, ...]] = []
    first = 0
    for count in counts:
        base = make_schedule(name, stages, count) if orders is None else own
        placed += [tuple(Action(a.op, a.micro_batch + first, a.stage) for a in order) for order in base.orders]
        first += count
    return Schedule(tuple(placed), skips)


def decide(wish: Wish, *, layers: int | None, world: int | None = None, launched: bool = False) -> Plan:
    """The plan for a wish: the strategy that was asked for, or the one that fits, with its reason.

    Args:
        layers: how many the model can be cut into; None: that is known when it has been captured.
        world: how many workers the launcher started; None: a script run without it, or with one worker, whose stages are threads.
        launched: whether there is a launcher, for the reason.

    Raises:
        PlanError: the wish cannot be met.
    """
    replicas = wish.replicas or 1
    stages = wish.stages or (max(1, world // replicas) if world is not None else 1)
    _check_workers(wish, stages, replicas, world)
    strategy = wish.strategy or "auto"
    chosen = _ordered(Plan("pipeline", stages, replicas, wish.micro_batches or 0), wish.schedule)
    if strategy == "single":
        return _single(
            chosen, f"asked for{'' if stages * replicas == 1 else f'; {stages * replicas - 1} of {stages * replicas} workers stay idle'}"
        )
    if strategy == "ddp":
        return _ddp(chosen, "asked for", world)
    if stages * replicas == 1 and strategy == "auto":
        return _single(chosen, "one worker" if launched or world is not None else "started without pipe-launch and without stages")
    few = layers is not None and layers < stages
    if few and stages > 1:
        return _uncut(chosen, strategy, f"it has {layers} layer{'s' * (layers != 1)}, fewer than the stages", world)
    if strategy == "naive":
        return replace(chosen, strategy="naive", micro_batches=1, reason="asked for: stages work one after the other")
    if stages == 1 and strategy in ("auto", "hybrid"):
        return _ddp(chosen, "replicas asked for, with one stage each", world)
    if strategy == "hybrid" and replicas == 1:
        raise PlanError(
            f"strategy 'hybrid' got {stages} stages and 1 replica; it is replicas of a pipeline: use --replicas 2, or strategy 'pipeline'"
        )
    kind = "pipeline" if replicas == 1 else "hybrid"
    micro_batches = chosen.micro_batches or MICRO_BATCHES_PER_WORKER * stages
    what = f"{layers} layers in {stages} stages" if layers is not None else f"captured, and cut into {stages} stages"
    reason = "asked for" if strategy != "auto" else what
    return replace(chosen, strategy=kind, micro_batches=micro_batches, reason=reason)


def _ordered(plan: Plan, schedule: str | Schedule | None) -> Plan:
    """The plan with its schedule: by name, or the user's own, which then says how many micro-batches there are."""
    if not isinstance(schedule, Schedule):
        return replace(plan, schedule=schedule or "gpipe")
    schedule.check()
    if (schedule.workers, schedule.stages) != (plan.stages, plan.stages):
        raise PlanError(
            f"the schedule given is for {schedule.workers} workers and {schedule.stages} stages, and the job has {plan.stages} workers "
            f"with one stage each; they are equal: use --stages {schedule.workers}, or another schedule"
        )
    if plan.micro_batches not in (0, schedule.micro_batches):
        raise PlanError(
            f"micro_batches={plan.micro_batches} and the schedule given is for {schedule.micro_batches}; they are equal: leave it out"
        )
    return replace(plan, schedule="given", orders=str(schedule), micro_batches=schedule.micro_batches)


def _check_workers(wish: Wish, stages: int, replicas: int, world: int | None) -> None:
    if world is None:
        if replicas > 1:
            raise PlanError(
                f"replicas={replicas} without pipe-launch; replicas are processes of their own: start it as "
                f"'pipe-launch --stages {stages} --replicas {replicas} script.py'"
            )
    elif stages * replicas > world:
        raise PlanError(
            f"stages={stages} x replicas={replicas} needs {stages * replicas} workers and pipe-launch started {world}: use "
            f"'pipe-launch --stages {stages} --replicas {replicas}'"
        )


def _single(plan: Plan, reason: str) -> Plan:
    return replace(plan, strategy="single", stages=1, replicas=1, micro_batches=plan.micro_batches or 1, schedule="gpipe", reason=reason)


def _ddp(plan: Plan, reason: str, world: int | None) -> Plan:
    workers = plan.stages * plan.replicas
    if world is None and workers > 1:
        raise PlanError(
            f"strategy 'ddp' with {workers} workers without pipe-launch; replicas are processes: use "
            f"'pipe-launch --strategy ddp --replicas {workers} script.py'"
        )
    if plan.stages > 1:
        reason = f"{reason}; {workers} workers became {workers} replicas"
    return replace(plan, strategy="ddp", stages=1, replicas=workers, micro_batches=plan.micro_batches or 1, schedule="gpipe", reason=reason)


def uncut(wish: Wish, plan: Plan, why: str, world: int | None) -> Plan:
    """The plan for a model that turned out to be one that cannot be cut.

    Raises:
        PlanError: the wish leaves nothing else.
    """
    return _uncut(replace(plan, micro_batches=wish.micro_batches or 0), wish.strategy or "auto", why, world)


def _uncut(plan: Plan, strategy: str, why: str, world: int | None) -> Plan:
    if strategy != "auto" or world is None:
        raise PlanError(
            f"the model cannot be cut into {plan.stages} stages: {why}; give fewer stages, or the model as nn.Sequential or a list of "
            f"modules with at least {plan.stages} layers" + ("" if world is None else ", or strategy 'auto', which falls back to ddp")
        )
    return _ddp(plan, f"the model cannot be cut into {plan.stages} stages: {why}", world)
