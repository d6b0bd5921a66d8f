"""Actions, schedules and the one dataflow rule."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import valid_orders

from pipe.action import Action, Op, Schedule
from pipe.errors import PlanError, ScheduleError
from pipe.simulator import simulate

TWO = "F0@0 F1@0 B0@0 B1@0\nF0@1 B0@1 F1@1 B1@1"


def acts(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@given(st.sampled_from(Op), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_action_is_read_back(op: Op, micro_batch: int, stage: int) -> None:
    action = Action(op, micro_batch, stage)
    assert Action.parse(str(action)) == action
    assert pickle.loads(pickle.dumps(action)) == action


def test_an_action_is_written_with_at() -> None:
    assert str(Action(Op.F, 3, 1)) == "F3@1"


@pytest.mark.parametrize("text", ["", "F", "F3", "3@1", "X3@1", "f3@1", "F-1@0", "F3@1@2", "F3 @1", "F\u0663@1"])
def test_what_is_no_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert repr(text) in str(error.value)
    assert "F3@1" in str(error.value)


def test_the_rule() -> None:
    schedule = Schedule.parse(
        """
        F0@0 B0@0
        F0@1 I0@1 W0@1
        F0@2 B0@2
        """
    ).check()
    assert {str(a): " ".join(map(str, schedule.needs(a))) for a in schedule.home} == {
        "F0@0": "",
        "F0@1": "F0@0",
        "F0@2": "F0@1",
        "B0@2": "F0@2",
        "I0@1": "F0@1 B0@2",
        "W0@1": "I0@1",
        "B0@0": "F0@0 I0@1",
    }


def test_the_rule_for_values_that_skip_stages() -> None:
    """One from stage 0 to 1 and 3, one from 1 to 3: their gradients come from 3 to 1, and from there to 0."""
    schedule = Schedule(Schedule.parse("F0@0 B0@0\nF0@1 B0@1\nF0@2 I0@2 W0@2\nF0@3 I0@3 W0@3").orders, ((0, 1, 3), (1, 3))).check()
    assert {str(a): " ".join(map(str, schedule.needs(a))) for a in schedule.home} == {
        "F0@0": "",
        "F0@1": "F0@0",
        "F0@2": "F0@1",
        "F0@3": "F0@0 F0@1 F0@2",
        "I0@3": "F0@3",
        "W0@3": "I0@3",
        "I0@2": "F0@2 I0@3",
        "W0@2": "I0@2",
        "B0@1": "F0@1 I0@2 I0@3",
        "B0@0": "F0@0 B0@1",
    }
    assert schedule.forwards().check().routes == schedule.routes
    simulate(schedule)


@pytest.mark.parametrize("route", [(0,), (1, 1), (2, 1), (0, 4), (-1, 2), (0, 2, 1)])
def test_a_route_goes_forward(route: tuple[int, ...]) -> None:
    orders = Schedule.parse("F0@0 B0@0\nF0@1 B0@1\nF0@2 B0@2\nF0@3 B0@3").orders
    with pytest.raises(ScheduleError, match=re.escape(f"a value has the route {route} and there are 4 stages") + ".*: correct it"):
        Schedule(orders, (route,)).check()


@given(valid_orders())
def test_feeds_is_the_inverse_of_needs_between_stages(schedule: Schedule) -> None:
    down = {(need, a) for a in schedule.home for need in schedule.needs(a) if need.stage != a.stage}
    up = {(a, taker) for a in schedule.home for taker in schedule.feeds(a)}
    assert down == up


def test_what_a_schedule_tells_of_itself() -> None:
    schedule = Schedule.parse("F0@0 F0@2 B0@2 B0@0\nF0@1 B0@1").check()
    assert (schedule.workers, schedule.stages, schedule.micro_batches) == (2, 3, 1)
    assert schedule.stages_of(0) == (0, 2)
    assert schedule.home[Action(Op.B, 0, 1)] == 1
    assert str(schedule.forwards()) == "F0@0 F0@2\nF0@1"
    assert schedule.forwards().check().micro_batches == 1


@given(valid_orders())
def test_a_valid_order_passes_and_is_read_back(schedule: Schedule) -> None:
    assert schedule.check() is schedule
    assert Schedule.parse(str(schedule)).orders == schedule.orders
    assert schedule.forwards().check()


@pytest.mark.parametrize("orders", [((),), ((), ()), ((), acts("F0@0 B0@0")), (acts("F0@0 B0@0"), ())])
def test_idle_workers_are_read_back(orders: tuple[tuple[Action, ...], ...]) -> None:
    schedule = Schedule(orders)
    assert Schedule.parse(str(schedule)) == schedule.check()
    assert schedule.workers == len(orders)


def test_notes_are_skipped() -> None:
    assert Schedule.parse(f"# by hand\n{TWO}\n  # end\n") == Schedule.parse(TWO)


@given(valid_orders(), st.data())
def test_an_action_taken_out_is_missed(schedule: Schedule, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(sorted(schedule.home, key=str)))
    orders = tuple(tuple(a for a in order if a != lost) for order in schedule.orders)
    left = Schedule(orders)
    gone = (left.stages, left.micro_batches) != (schedule.stages, schedule.micro_batches)
    if gone or left == left.forwards():  # it was the last of its stage or micro-batch, or the only backward: nothing tells
        return
    with pytest.raises(ScheduleError, match=r"lost|\bF\d"):
        left.check()


@given(valid_orders(), st.data())
def test_an_action_done_twice_is_named(schedule: Schedule, data: st.DataObject) -> None:
    again = data.draw(st.sampled_from(sorted(schedule.home, key=str)))
    worker = data.draw(st.integers(0, schedule.workers - 1))
    orders = [order + (again,) if w == worker else order for w, order in enumerate(schedule.orders)]
    with pytest.raises(ScheduleError, match=f"^{again}: is done more than once"):
        Schedule(tuple(orders)).check()


@given(valid_orders(), st.data())
def test_a_backward_before_its_own_forward_is_a_deadlock(schedule: Schedule, data: st.DataObject) -> None:
    moved = data.draw(st.sampled_from(sorted((a for a in schedule.home if a.op in (Op.B, Op.I)), key=str)))
    worker = schedule.home[moved]
    rest = tuple(a for a in schedule.orders[worker] if a != moved)
    orders = [(moved, *rest) if w == worker else order for w, order in enumerate(schedule.orders)]
    with pytest.raises(ScheduleError, match=f"deadlock: .*{moved} on worker {worker} waits for F{moved.micro_batch}@{moved.stage}"):
        Schedule(tuple(orders)).check()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0@0 B0@0 F0@0", "F0@0: is done more than once"),
        ("F0@0 B0@0 O0@0", "O0@0: may not stand in a schedule"),
        ("F0@0 R0@0 S0@0 B0@0", "R0@0, S0@0: may not stand in a schedule, .* remove them"),
        ("F0@0 B0@0\nF1@0 B1@0", r"stage 0 works on workers \[0, 1\]"),
        ("F0@0\nF0@1 B0@1", "B0@0: is lost"),
        ("B0@0", "F0@0: is lost"),
        ("F0@0 I0@0", "W0@0: is lost"),
        ("F0@0 W0@0", "I0@0: is lost"),
        ("F0@0 B0@0 W0@0", "B0@0 stands beside I or W"),
        ("F1@0 B1@0", "F0@0: is lost"),
        ("F0@1 B0@1", "F0@0: is lost"),
        ("F10@0", "F0@0, .*F7@0 and 2 more: is lost"),
        ("F0@0 B0@0 F1@0", "B1@0: is lost"),
        ("B0@0 F0@0", "deadlock: B0@0 on worker 0 waits for F0@0"),
        ("F0@0 F1@0 B1@0 B0@0\nF0@1 F1@1 B0@1 B1@1", ""),
        ("F0@0 B0@0 F1@0 B1@0\nF0@1 F1@1 B0@1 B1@1", "deadlock: B0@0 on worker 0 waits for B0@1, F1@1 on worker 1 waits for F1@0"),
    ],
)
def test_culprits_are_named(text: str, says: str) -> None:
    schedule = Schedule.parse(text)
    if not says:
        assert schedule.check()
        return
    with pytest.raises(ScheduleError, match=says) as error:
        schedule.check()
    assert str(error.value).isascii()
    assert isinstance(error.value, PlanError)


def test_numbers_below_zero_are_refused() -> None:
    with pytest.raises(ScheduleError, match="F-1@0: has a number below 0"):
        Schedule(((Action(Op.F, -1, 0), *acts("F0@0 B0@0 B0@0")[:2]),)).check()


@pytest.mark.parametrize(
    ("text", "ascending"),
    [
        (TWO, True),
        ("F0@0 F1@0 B1@0 B0@0", False),
        ("F0@0 F1@0 I1@0 W1@0 B0@0", False),
        ("F0@0 F1@0 I0@0 I1@0 W0@0 W1@0", True),
        ("F0@0 F1@0 I0@0 I1@0 W1@0 W0@0", False),
        ("F0@0 F1@0 I0@0 B1@0 W0@0", False),
        ("F0@0 F1@0", True),
    ],
)
def test_ascending_tells_whether_gradients_are_summed_as_in_a_loop(text: str, ascending: bool) -> None:
    assert Schedule.parse(text).check().ascending is ascending
