"""The loop with numbers for tensors: any valid schedule gives the right sums, and a failure stops every worker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.action import Action, Op, Route, Schedule
from pipe.errors import Aborted, PipeError, TransportTimeout
from pipe.loop import DO, run_order
from pipe.schedules import schedule
from pipe.trace import Event
from pipe.transport.local import LocalTransport
from pipe.transport.mailbox import Mailbox
from tests.pure.orders import valid_orders


class Ticks:
    """A clock that counts its marks."""

    name = "wall"

    def __init__(self) -> None:
        self._count = itertools.count()

    def mark(self) -> int:
        return next(self._count)

    def seconds(self, mark: Any) -> float:
        return float(mark)


def values(plan: Schedule) -> list[Route]:
    """The routes of all values: one from each stage to the next, and those that skip."""
    return [*((s, s + 1) for s in range(plan.stages - 1)), *plan.routes]


class Numbers:
    """Stage s: forward multiplies the sum of what it takes by s + 2; backward multiplies the gradient by it, and adds gradient x input to
    the weight's. What it gives is one value for each route from here."""

    def __init__(self, index: int, plan: Schedule) -> None:
        self.index, self.factor, self.last = index, index + 2, index == plan.stages - 1
        self.routes = [route for route in values(plan) if index in route]
        self.weight_gradient = 0
        self.losses: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._gradients: dict[int, int] = {}

    def forward(self, micro_batch: int, arg: Mapping[int, list[int]]) -> Mapping[int, list[int]]:
        x = sum(sum(given) for given in arg.values()) if self.index else micro_batch + 1
        self._saved[micro_batch] = x
        if self.last:
            self.losses[micro_batch] = x * self.factor
        takers = {s for route in self.routes if route[0] == self.index for s in route[1:]}
        return {s: [x * self.factor for route in self.routes if route[0] == self.index and s in route] for s in takers}

    def backward_input(self, micro_batch: int, arg: Mapping[int, list[int]]) -> Mapping[int, list[int]]:
        come = {s: iter(given) for s, given in arg.items()}
        sums = [next(come[route[at + 1]]) if (at := route.index(self.index)) + 1 < len(route) else 0 for route in self.routes]
        own = 1 if self.last else sum(part for route, part in zip(self.routes, sums) if route[0] == self.index)
        self._gradients[micro_batch] = own
        back: dict[int, list[int]] = {}
        for route, part in zip(self.routes, sums):
            if (at := route.index(self.index)) > 0:
                back.setdefault(route[at - 1], []).append(part + own * self.factor)
        return back

    def backward_weights(self, micro_batch: int, arg: Mapping[int, list[int]]) -> Mapping[int, list[int]]:
        assert not arg
        self.weight_gradient += self._gradients.pop(micro_batch) * self._saved.pop(micro_batch)
        return {}

    def backward(self, micro_batch: int, arg: Mapping[int, list[int]]) -> Mapping[int, list[int]]:
        gradient = self.backward_input(micro_batch, arg)
        self.backward_weights(micro_batch, {})
        return gradient

    @property
    def held(self) -> int:
        return len(self._saved) + len(self._gradients)


Placed = Callable[[int, Action], Any]


@contextmanager
def quietly(worker: int, action: Action) -> Iterator[None]:
    yield


class Job:
    """Workers in threads on one set of mailboxes, with an abort by the one that fails, as a worker does it."""

    def __init__(self, plan: Schedule, timeout: float = 60.0) -> None:
        self.plan = plan
        self.mailboxes = [Mailbox() for _ in range(plan.workers)]
        self.transports = [LocalTransport(w, self.mailboxes, timeout) for w in range(plan.workers)]
        self.stages = {s: Numbers(s, plan) for s in range(plan.stages)}
        self.events: dict[int, list[Event]] = {}
        self.errors: dict[int, BaseException] = {}
        self.step = 0

    def run(self, placed: Placed = quietly, plan: Schedule | None = None) -> None:
        self.step += 1
        self.events, self.errors = {}, {}
        threads = [threading.Thread(target=self._work, args=(w, placed, plan or self.plan), daemon=True) for w in range(self.plan.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

    def _work(self, w: int, placed: Placed, plan: Schedule) -> None:
        transport = self.transports[w]
        transport.begin(self.step, plan)
        own = {s: self.stages[s] for s in plan.stages_of(w)}
        try:
            self.events[w] = run_order(w, plan, own, transport, Ticks(), lambda action: placed(w, action))
        except BaseException as error:
            self.errors[w] = error
            if not isinstance(error, Aborted):
                transport.abort(str(error))

    @property
    def left_over(self) -> list[Any]:
        return [key for mailbox in self.mailboxes for found in mailbox._messages.values() for key in found]


def check_sums(job: Job) -> None:
    stages, pieces, routes = job.plan.stages, range(job.plan.micro_batches), values(job.plan)
    factors, inputs, gradients = [s + 2 for s in range(stages)], [1] * stages, [1] * stages  # for an input of 1 and a loss's gradient of 1
    for s in range(1, stages):
        inputs[s] = sum(inputs[route[0]] * factors[route[0]] for route in routes if s in route[1:])
    for s in reversed(range(stages - 1)):
        gradients[s] = sum(gradients[r] * factors[r] for route in routes if route[0] == s for r in route[1:])
    assert job.stages[stages - 1].losses == {m: (m + 1) * inputs[-1] * factors[-1] for m in pieces}
    for s in range(stages):
        assert job.stages[s].weight_gradient == sum((m + 1) * inputs[s] * gradients[s] for m in pieces)
        assert job.stages[s].held == 0


@settings(max_examples=120, deadline=None)
@given(plan=valid_orders())
def test_any_valid_schedule_gives_the_right_sums(plan: Schedule) -> None:
    job = Job(plan.check())
    job.run()
    assert not job.errors
    check_sums(job)
    assert not job.left_over
    for w, order in enumerate(plan.orders):
        assert [event.action for event in job.events[w]] == list(order)
        assert all(event.worker == w and event.start < event.end for event in job.events[w])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 1), (2, 1), (2, 5), (4, 2), (4, 8)])
def test_the_schedules(name: str, workers: int, micro_batches: int) -> None:
    job = Job(schedule(name, workers, micro_batches))
    job.run()
    assert not job.errors
    check_sums(job)
    assert not job.left_over


def test_forwards_alone() -> None:
    job = Job(schedule("gpipe", 3, 4))
    job.run(plan=job.plan.forwards())
    assert not job.errors
    assert job.stages[2].losses == {m: (m + 1) * 24 for m in range(4)}
    assert not job.left_over


def test_an_idle_worker_does_nothing() -> None:
    job = Job(Schedule(((Action(Op.F, 0, 0),), ())))
    job.run()
    assert not job.errors
    assert job.events[1] == []


@settings(max_examples=80, deadline=None)
@given(data=st.data(), plan=valid_orders())
def test_a_failure_stops_every_worker_and_the_next_step_is_clean(data: st.DataObject, plan: Schedule) -> None:
    culprit = data.draw(st.sampled_from(list(plan.home)))

    @contextmanager
    def fails(worker: int, action: Action) -> Iterator[None]:
        yield
        if action == culprit:
            raise PipeError(f"{action} on worker {worker}: broken")

    job = Job(plan)
    job.run(fails)
    failed = plan.home[culprit]
    assert type(job.errors[failed]) is PipeError
    for w, error in job.errors.items():
        if w != failed:  # stopped while it waited, with the reason of the one that failed; or it had all it needed and ended
            assert isinstance(error, Aborted)
            assert str(error) == f"{culprit} on worker {failed}: broken"
    assert set(job.events) | set(job.errors) == set(range(plan.workers))
    job.stages = {s: Numbers(s, plan) for s in range(plan.stages)}
    job.run()
    assert not job.errors
    check_sums(job)
    assert not job.left_over


def test_who_waits_for_what_never_comes_says_so() -> None:
    job = Job(schedule("gpipe", 2, 1), timeout=0.05)
    job.transports[0].begin(1, job.plan)
    job.transports[1].begin(1, job.plan)
    with pytest.raises(TransportTimeout, match=r"F0@0 of step 1 did not come within 0.05 s.*--timeout"):
        run_order(1, job.plan, {1: job.stages[1]}, job.transports[1], Ticks(), lambda action: quietly(1, action))


def test_an_action_is_placed_and_timed_without_its_waiting() -> None:
    """Between a mark and the next lies the action alone: the message is taken before, the result sent after."""
    seen: list[str] = []
    plan = Schedule((tuple(Action(op, 0, s) for op, s in ((Op.F, 0), (Op.F, 1), (Op.B, 1), (Op.B, 0))),)).check()

    class Logs(Ticks):
        def mark(self) -> int:
            seen.append("mark")
            return super().mark()

    @contextmanager
    def placed(action: Action) -> Iterator[None]:
        seen.append(f"({action}")
        yield
        seen.append(")")

    mailbox = Mailbox()
    stages = {s: Numbers(s, plan) for s in range(2)}
    events = run_order(0, plan, stages, LocalTransport(0, [mailbox]), Logs(), placed)
    assert seen == [text for action in plan.orders[0] for text in ("mark", f"({action}", ")", "mark")]
    assert [(event.start, event.end) for event in events] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert not mailbox._messages  # what stays on a worker is not sent


def test_every_scheduled_op_has_its_method() -> None:
    assert set(DO) == {op for op in Op if op.scheduled}
    assert all(callable(getattr(Numbers, method)) for method in DO.values())
