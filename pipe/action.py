"""Action and Schedule: who does what, in which order; and the one dataflow rule, from which all else follows.

Pure: no torch, no processes. A schedule holds no gaps and no messages. What a worker waits for is `needs`, what it sends to
whom is `feeds`, and a gap is what the simulator or a run finds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from pipe.errors import ScheduleError


class Op(Enum):
    """What is done. The last three stand in traces only; a Schedule refuses them."""

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # backward, the input's gradient only
    W = "W"  # backward, the weights' gradient only
    OPTIMIZER = "O"
    RECOMPUTE = "R"
    SEND = "S"

    @property
    def scheduled(self) -> bool:
        """Whether a schedule may hold it."""
        return self in (Op.F, Op.B, Op.I, Op.W)


_WRITTEN = re.compile(r"([A-Z])(\d+)@(\d+)", re.ASCII)
IDLE = "-"  # the line of a worker that does nothing


@dataclass(frozen=True, slots=True, order=False)
class Action:
    """One unit of work, written `F3@1`: op F, micro-batch 3, stage 1."""

    op: Op
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads `F3@1` back.

        Raises:
            ScheduleError: the text is not an action.
        """
        found = _WRITTEN.fullmatch(text.strip())
        if not found or found[1] not in Op._value2member_map_:
            raise ScheduleError(f"{text!r} is not an action; one is written like F3@1: op F, B, I or W, micro-batch 3, stage 1")
        return cls(Op(found[1]), int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class Handover:
    """The result of an action on its way to another stage: what a message is known by."""

    made_by: Action
    stage: int

    def __str__(self) -> str:
        return str(self.made_by)


Route = tuple[int, ...]  # the stage that makes a value, then those that take it, ascending


@dataclass(frozen=True)
class Schedule:
    """What each worker does, in order: `orders[w]` is the work of worker w. Equal where the orders are equal.

    `routes` are those of values that skip stages; a value goes to the next stage in any case.
    """

    orders: tuple[tuple[Action, ...], ...]
    routes: tuple[Route, ...] = ()

    @cached_property
    def home(self) -> Mapping[Action, int]:
        """The worker of each action."""
        return {action: worker for worker, order in enumerate(self.orders) for action in order}

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.orders)

    @cached_property
    def stages(self) -> int:
        """How many stages there are: one more than the highest stage that works."""
        return 1 + max((action.stage for action in self.home), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches there are: one more than the highest that is worked on."""
        return 1 + max((action.micro_batch for action in self.home), default=-1)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds, ascending."""
        return tuple(sorted({action.stage for action in self.orders[worker]}))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """THE rule: the actions whose results this one needs.

        A forward needs the forward of the stage before, and of those that make what skips to it. A backward (B or I) needs its own
        forward and, unless it is the last stage, the backward (B or I) of the stage after, and of the next on the routes through it:
        a gradient comes back as a running sum from the last stage that takes a value. W needs I.
        """
        m, s = action.micro_batch, action.stage
        if action.op is Op.F:
            return tuple(Action(Op.F, m, r) for r in sorted(self._before[s]))
        if action.op is Op.W:
            return (Action(Op.I, m, s),)
        split = (Action(Op.I, m, r) for r in sorted(self._after[s]))
        return Action(Op.F, m, s), *(each if each in self.home else Action(Op.B, m, each.stage) for each in split)

    @cached_property
    def _before(self) -> Mapping[int, set[int]]:
        """The stages whose forward a stage's forward needs."""
        found = {s: {s - 1} if s else set() for s in range(self.stages)}
        for made, *taken in self.routes:
            for s in taken:
                found[s].add(made)
        return found

    @cached_property
    def _after(self) -> Mapping[int, set[int]]:
        """The stages whose backward a stage's backward needs."""
        found = {s: {s + 1} if s < self.stages - 1 else set() for s in range(self.stages)}
        for route in self.routes:
            for s, following in pairwise(route):
                found[s].add(following)
        return found

    @cached_property
    def _takers(self) -> Mapping[Action, tuple[Action, ...]]:
        takers: dict[Action, list[Action]] = defaultdict(list)
        for action in self.home:
            for need in self.needs(action):
                if need.stage != action.stage:
                    takers[need].append(action)
        return {action: tuple(found) for action, found in takers.items()}

    def feeds(self, action: Action) -> tuple[Action, ...]:
        """The actions of other stages that need this one's result: the inverse of `needs`, between stages."""
        return self._takers.get(action, ())

    @property
    def ascending(self) -> bool:
        """Whether every stage's backwards come in ascending micro-batch order, so that gradients are summed as in a plain loop."""
        last: dict[tuple[int, bool], int] = {}
        for order in self.orders:
            for a in order:
                if a.op is Op.F:
                    continue
                weights = a.op is not Op.I  # what B and W add to is the same
                if last.get((a.stage, weights), -1) > a.micro_batch:
                    return False
                last[a.stage, weights] = a.micro_batch
        return True

    def forwards(self) -> Schedule:
        """The same without backwards: what `predict` and `eval_step` run."""
        return replace(self, orders=tuple(tuple(a for a in order if a.op is Op.F) for order in self.orders))

    def check(self) -> Schedule:
        """The schedule itself, if it can run to its end.

        Raises:
            ScheduleError: an action stands there twice, needs what nobody does, is lost, or waits in a circle; the message
                names the culprits.
        """
        self._check_actions()
        self._check_routes()
        self._check_complete()
        self._check_order()
        return self

    def _check_actions(self) -> None:
        counts = Counter(action for order in self.orders for action in order)
        _refuse("may not stand in a schedule, which holds F, B, I and W only: remove", (a for a in counts if not a.op.scheduled))
        _refuse("is done more than once; each action stands once over all workers: remove", (a for a, n in counts.items() if n > 1))
        _refuse(
            "has a number below 0; micro-batches and stages are counted from 0: renumber",
            (a for a in counts if a.micro_batch < 0 or a.stage < 0),
        )
        homes: dict[int, set[int]] = defaultdict(set)
        for action, worker in self.home.items():
            homes[action.stage].add(worker)
        for stage, workers in sorted(homes.items()):
            if len(workers) > 1:
                raise ScheduleError(f"stage {stage} works on workers {sorted(workers)}; a stage lives on one worker: keep it on one")

    def _check_routes(self) -> None:
        for route in self.routes:
            if len(route) < 2 or route[0] < 0 or route[-1] >= self.stages or any(s >= following for s, following in pairwise(route)):
                raise ScheduleError(
                    f"a value has the route {route} and there are {self.stages} stages; it is the stage that makes the value and then "
                    "those that take it, ascending: correct it"
                )

    def _check_complete(self) -> None:
        if not self.home:
            return
        trains = any(a.op is not Op.F for a in self.home)
        lost: list[Action] = []
        for m in range(self.micro_batches):
            for s in range(self.stages):
                here = {op for op in (Op.F, Op.B, Op.I, Op.W) if Action(op, m, s) in self.home}
                if Op.F not in here:
                    lost.append(Action(Op.F, m, s))
                elif Op.B in here and here & {Op.I, Op.W}:
                    raise ScheduleError(
                        f"B{m}@{s} stands beside I or W of the same micro-batch and stage; a backward is whole or split: keep one form"
                    )
                elif trains and Op.B not in here:
                    split = here & {Op.I, Op.W}
                    lost += [Action(op, m, s) for op in ((Op.I, Op.W) if split else (Op.B,)) if op not in here]
        _refuse("is lost: nobody does it, and every micro-batch passes every stage once each way: add", lost)

    def _check_order(self) -> None:
        done: set[Action] = set()
        at = [0] * self.workers
        ready = deque(range(self.workers))
        waiting: dict[Action, list[int]] = defaultdict(list)
        while ready:
            w = ready.popleft()
            while at[w] < len(self.orders[w]):
                action = self.orders[w][at[w]]
                missing = next((n for n in self.needs(action) if n not in done), None)
                if missing is not None:
                    waiting[missing].append(w)
                    break
                done.add(action)
                at[w] += 1
                ready.extend(waiting.pop(action, ()))
        if waiting:
            stuck = ", ".join(f"{self.orders[w][at[w]]} on worker {w} waits for {need}" for need, ws in waiting.items() for w in ws)
            raise ScheduleError(f"deadlock: {stuck}; an action stands after all that it needs: move the awaited actions forward")

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, order)) or IDLE for order in self.orders)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads `str(schedule)` back: one line a worker, `-` for one that does nothing; lines that start with # are notes.

        Raises:
            ScheduleError: a word is not an action.
        """
        lines = [line for line in text.strip().splitlines() if not line.lstrip().startswith("#")]
        return cls(tuple(() if line.strip() == IDLE else tuple(map(Action.parse, line.split())) for line in lines))


def _refuse(rule: str, culprits: Iterable[Action]) -> None:
    named = list(culprits)
    if named:
        listed = ", ".join(map(str, named[:8])) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        raise ScheduleError(f"{listed}: {rule} {'it' if len(named) == 1 else 'them'}")
