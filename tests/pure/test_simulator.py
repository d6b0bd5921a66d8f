"""Schedule + costs -> Trace, against closed forms and numbers worked by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import valid_orders

from pipe.action import Op, Schedule
from pipe.errors import PlanError, ScheduleError
from pipe.schedules import NAMES, schedule
from pipe.schedules.gpipe import gpipe
from pipe.schedules.one_f_one_b import one_f_one_b
from pipe.simulator import Costs, simulate

exact = pytest.approx


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m", "makespan"), [(2, 4, 15), (4, 8, 33), (8, 16, 69)])
def test_unit_times(name: str, p: int, m: int, makespan: float) -> None:
    assert simulate(schedule(name, p, m)).makespan == makespan


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_bubble_is_the_formula(name: str, p: int, m: int) -> None:
    assert simulate(schedule(name, p, m)).bubble == exact((p - 1) / (m + p - 1))


@pytest.mark.parametrize("m", [8, 9, 16])
def test_peak_in_flight(m: int) -> None:
    assert simulate(gpipe(4, m)).peak_in_flight == (m,) * 4
    assert simulate(one_f_one_b(4, m)).peak_in_flight == (4, 3, 2, 1)


def test_unequal_stages() -> None:
    forward = [1, 1, 2, 1]
    costs = Costs(forward, forward, forward)
    assert simulate(gpipe(4, 8), costs).makespan == 57
    assert simulate(one_f_one_b(4, 8), costs).makespan == 55


@pytest.mark.parametrize(("latency", "all_first", "in_turn"), [(0.1, 57.6, 59.8), (1.0, 63, 85), (2.0, 69, 113)])
def test_latency(latency: float, all_first: float, in_turn: float) -> None:
    costs = Costs(latency=latency)
    assert simulate(gpipe(4, 16), costs).makespan == exact(all_first, abs=1e-9)
    assert simulate(one_f_one_b(4, 16), costs).makespan == exact(in_turn, abs=1e-9)


@given(p=st.integers(2, 8), m=st.integers(2, 40), latency=st.floats(0, 0.1))
def test_latency_closed_form_of_one_f_one_b(p: int, m: int, latency: float) -> None:
    """Each crossing of the warm-up and of the end is seen once, and each turn that finds no slack twice."""
    times = 2 * (p - 1) + 2 * (m - 2 - (m - 2) // p)
    without = simulate(one_f_one_b(p, m)).makespan
    assert simulate(one_f_one_b(p, m), Costs(latency=latency)).makespan - without == exact(times * latency, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w", "c", "rate"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
        (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
        (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
    ],
)
def test_zero_bubble_paper_one_f_one_b(p: int, m: int, f: float, b: float, w: float, c: float, rate: float) -> None:
    """Tables 9 and 5 of Qi et al. 2024; cost is the longest stage span."""
    cost = simulate(one_f_one_b(p, m), Costs(f, b, w, latency=c)).span
    assert (cost - m * (f + b + w)) / cost == exact(rate, abs=5e-5)


@given(
    p=st.integers(1, 6),
    m=st.integers(1, 12),
    f=st.floats(0.1, 3),
    x=st.floats(0.1, 3),
    nbytes=st.integers(0, 100),
    latency=st.floats(0, 5),
)
def test_slow_links_closed_form_of_gpipe(p: int, m: int, f: float, x: float, nbytes: int, latency: float) -> None:
    bandwidth = 20.0
    tx = nbytes / bandwidth if p > 1 else 0.0
    costs = Costs(f, 0, 0, backward=x, boundary_bytes=nbytes, latency=latency, bandwidth=bandwidth)
    expected = p * (f + x) + 2 * (p - 1) * (tx + latency) + (m - 1) * (max(f, tx) + max(x, tx))
    assert simulate(gpipe(p, m), costs).makespan == exact(expected)


def test_a_link_carries_one_transfer_at_a_time_each_way() -> None:
    """Both stages of worker 1 feed worker 0: their transfers queue on one link; those the other way have their own.

    F0@0 0-1, tx 2 -> F0@1 3-4 and F0@2 at once 4-5, tx 2 -> F0@3 7-8.
    """
    text = "F0@0 F1@0 F0@3 F1@3\nF0@1 F0@2 F1@1 F1@2"
    trace = simulate(Schedule.parse(text), Costs(boundary_bytes=2, bandwidth=1))
    starts = {str(e.action): e.start for e in trace.events}
    assert starts == {"F0@0": 0, "F1@0": 1, "F0@1": 3, "F0@2": 4, "F1@1": 5, "F1@2": 6, "F0@3": 7, "F1@3": 9}
    assert trace.sent_bytes == (4, 4)


def test_each_boundary_has_its_own_costs_both_ways() -> None:
    costs = Costs(1, 1, 1, boundary_bytes=[1, 10], latency=[0, 5], bandwidth=[1, 10])
    trace = simulate(gpipe(3, 1), costs)
    assert [e.start for e in trace.events] == [0, 2, 9, 10, 18, 21]
    assert trace.sent_bytes == (1, 11, 10)


def test_a_schedule_that_cannot_end_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.parse("B0@0 F0@0"))


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 numbers for 2 stages; .* one a stage: 2"),
        ({"latency": [1, 2]}, "latency has 2 numbers for 2 stages; .* one a boundary: 1"),
        ({"forward": -1}, "forward holds -1"),
        ({"input_grad": [1, math.nan]}, "input_grad holds nan"),
        ({"bandwidth": 0}, "bandwidth holds 0"),
        ({"latency": math.inf}, "latency holds inf"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        simulate(gpipe(2, 2), Costs(**costs))


def test_a_whole_backward_may_cost_less_than_its_parts() -> None:
    assert simulate(gpipe(1, 2), Costs(1, 2, 3)).makespan == 12
    assert simulate(gpipe(1, 2), Costs(1, 2, 3, backward=4)).makespan == 10
    assert simulate(Schedule.parse("F0@0 I0@0 W0@0"), Costs(1, 2, 3, backward=4)).makespan == 6


def test_the_optimizer_steps_all_stages_of_a_worker_after_its_last_action() -> None:
    trace = simulate(Schedule.parse("F0@0 F0@2 B0@2 B0@0\nF0@1 B0@1"), Costs(optimizer=[1, 2, 4]))
    steps = [(str(e.action), e.worker, e.start, e.end) for e in trace.events if e.action.op is Op.OPTIMIZER]
    assert steps == [("O0@1", 1, 7, 9), ("O0@0", 0, 9, 14)]
    assert trace.busy == (11, 5)


def test_no_optimizer_without_a_backward() -> None:
    assert simulate(gpipe(2, 3).forwards(), Costs(optimizer=1)).makespan == 4


def test_peak_bytes_are_activations_held() -> None:
    assert simulate(gpipe(2, 3), Costs(activation_bytes=[10, 7])).peak_bytes == (30, 21)
    assert simulate(one_f_one_b(2, 3), Costs(activation_bytes=[10, 7])).peak_bytes == (20, 7)
    assert simulate(gpipe(2, 3).forwards(), Costs(activation_bytes=[10, 7])).peak_bytes == (10, 7)


def test_no_micro_batches_take_no_time() -> None:
    trace = simulate(gpipe(3, 0), Costs(forward=[1, 2, 3], optimizer=1))
    assert (trace.events, trace.makespan, trace.span, trace.bubble) == ((), 0, 0, 0)
    assert trace.peak_in_flight == (0, 0, 0)


def test_a_large_schedule() -> None:
    trace = simulate(one_f_one_b(64, 512))
    assert trace.makespan == 3 * (512 + 63)
    assert len(trace.events) == 2 * 64 * 512


@given(valid_orders(), st.data())
def test_every_valid_order_obeys_the_rule_in_time(schedule: Schedule, data: st.DataObject) -> None:
    seconds = st.lists(st.floats(0, 4), min_size=schedule.stages, max_size=schedule.stages)
    links = st.floats(0, 2)
    costs = Costs(
        data.draw(seconds), data.draw(seconds), data.draw(seconds), latency=data.draw(links), boundary_bytes=data.draw(links), bandwidth=1
    )
    trace = simulate(schedule, costs)
    ended = {e.action: e.end for e in trace.events}
    sent = costs.latency + costs.boundary_bytes
    assert trace.schedule.orders == schedule.orders
    for order in trace.by_worker:
        assert all(a.end <= b.start for a, b in pairwise(order))
    for e in trace.events:
        for need in schedule.needs(e.action):
            travels = sent if schedule.home[need] != e.worker else 0.0
            assert e.start >= ended[need] + travels - 1e-9
    assert trace.makespan >= max(trace.busy)
    assert min(e.start for e in trace.events) == 0
