"""Schedule + costs -> Trace, without running anything."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipe.action import Action, Op, Schedule
from pipe.errors import PlanError
from pipe.trace import Event, Trace, peak_held

Amount = float | Sequence[float]
BOUNDARY = ("boundary_bytes", "latency", "bandwidth")


@dataclass(frozen=True)
class Costs:
    """What actions and transfers cost: seconds, bytes, bytes per second.

    One number for all, or a sequence with one a stage; for `boundary_bytes`, `latency` and `bandwidth` one a boundary, of which number b
    lies between stage b and the next and costs the same both ways.

    Raises:
        PlanError: a number is negative or not a number, or a bandwidth is not above zero.
    """

    forward: Amount = 1.0
    input_grad: Amount = 1.0
    weight_grad: Amount = 1.0
    backward: Amount | None = None  # of a whole backward; None: the sum of its two parts
    optimizer: Amount = 0.0
    boundary_bytes: Amount = 0
    activation_bytes: Amount = 0  # that a stage holds for one micro-batch in flight
    latency: Amount = 0.0  # one way
    bandwidth: Amount = math.inf

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            amount = getattr(self, name)
            for number in () if amount is None else amount if isinstance(amount, Sequence) else (amount,):
                if not number >= 0 or (name == "bandwidth" and not number > 0) or (name != "bandwidth" and math.isinf(number)):
                    raise PlanError(f"{name} holds {number!r}; a cost is finite and not negative, a bandwidth above zero: correct it")

    def spread(self, stages: int) -> dict[str, list[float]]:
        """Every field as a list with one number a stage, or one a boundary; `backward` filled in."""
        found = {}
        for name in (f.name for f in fields(self)):
            amount, wanted = getattr(self, name), max(0, stages - 1) if name in BOUNDARY else stages
            if amount is None:
                continue
            if isinstance(amount, Sequence) and len(amount) != wanted:
                what = "one a boundary" if name in BOUNDARY else "one a stage"
                raise PlanError(f"{name} has {len(amount)} numbers for {stages} stages; give one number, or {what}: {wanted}")
            found[name] = list(amount) if isinstance(amount, Sequence) else [amount] * wanted
        found.setdefault("backward", [i + w for i, w in zip(found["input_grad"], found["weight_grad"])])
        return found


def simulate(schedule: Schedule, costs: Costs | None = None) -> Trace:
    """The trace that the schedule would give: F = 1, I = W = 1 and free links where no costs are given.

    An action waits for what it needs and for its worker; computing never waits for a send. From one worker to another goes one
    transfer at a time, in the order in which they were made: each takes bytes / bandwidth on the link and arrives `latency` later.
    Between stages of one worker nothing is sent.

    Raises:
        ScheduleError: the schedule cannot run to its end.
        PlanError: a sequence of costs does not have one number a stage, or a boundary.
    """
    return _Run(schedule.check(), costs or Costs()).trace()


class _Run:
    """One simulation. What has arrived where is known as soon as the action that made it is placed in time."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs.spread(schedule.stages) if schedule.stages else {}
        self.seconds = {Op.F: "forward", Op.B: "backward", Op.I: "input_grad", Op.W: "weight_grad"}
        self.events: list[Event] = []
        self.arrived: dict[tuple[Action, int], float] = {}  # when an action's result is at a worker
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.worker_free = [0.0] * schedule.workers
        self.sent = [0.0] * schedule.workers

    def trace(self) -> Trace:
        self._do_all()
        self._optimize()
        self.events.sort(key=lambda e: (e.start, e.worker))
        peaks = [peak_held(order, lambda s: self.costs["activation_bytes"][s]) for order in self.schedule.orders]
        return Trace(
            tuple(self.events),
            self.schedule.workers,
            "simulated",
            peak_bytes=tuple(round(p) for p in peaks),
            sent_bytes=tuple(round(s) for s in self.sent),
        )

    def _do_all(self) -> None:
        at = [0] * self.schedule.workers
        ready = deque(range(self.schedule.workers))
        waiting: dict[tuple[Action, int], int] = {}
        while ready:
            w = ready.popleft()
            order = self.schedule.orders[w]
            while at[w] < len(order):
                needs = [(need, w) for need in self.schedule.needs(order[at[w]])]
                missing = next((n for n in needs if n not in self.arrived), None)
                if missing is not None:
                    waiting[missing] = w
                    break
                start = max([self.worker_free[w], *(self.arrived[n] for n in needs)])
                ready.extend(waiting.pop(there) for there in self._do(order[at[w]], w, start) if there in waiting)
                at[w] += 1

    def _do(self, action: Action, w: int, start: float) -> list[tuple[Action, int]]:
        """Places the action in time and its result on the links; gives where the result is now known to arrive."""
        end = start + self.costs[self.seconds[action.op]][action.stage]
        self.events.append(Event(action, w, start, end))
        self.worker_free[w] = end
        self.arrived[action, w] = end
        takers = self.schedule.feeds(action)
        for taker in takers:
            peer = self.schedule.home[taker]
            if (action, peer) not in self.arrived:
                self.arrived[action, peer] = self._send(w, peer, min(action.stage, taker.stage), end)
        return [(action, self.schedule.home[taker]) for taker in takers]

    def _send(self, w: int, peer: int, boundary: int, made: float) -> float:
        nbytes = self.costs["boundary_bytes"][boundary]
        free = max(made, self.link_free[w, peer]) + nbytes / self.costs["bandwidth"][boundary]
        self.link_free[w, peer] = free
        self.sent[w] += nbytes
        return free + self.costs["latency"][boundary]

    def _optimize(self) -> None:
        """One event a worker, after its last action: a step over all its stages. A schedule of forwards only has none."""
        for w, order in enumerate(self.schedule.orders):
            stages = self.schedule.stages_of(w)
            seconds = sum(self.costs["optimizer"][s] for s in stages)
            if seconds and any(a.op is not Op.F for a in order):
                start = self.worker_free[w]
                self.events.append(Event(Action(Op.OPTIMIZER, 0, stages[0]), w, start, start + seconds))
