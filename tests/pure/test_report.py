"""What a step cost, in a table and in a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import valid_orders

from pipe.action import Action, Schedule
from pipe.report import Report, advice
from pipe.schedules.gpipe import gpipe
from pipe.schedules.one_f_one_b import one_f_one_b
from pipe.simulator import Costs, simulate
from pipe.trace import Event, Trace


def of(schedule: Schedule, **costs: object) -> Report:
    return Report.of(simulate(schedule, Costs(**costs)))


def test_numbers_of_a_step() -> None:
    trace = simulate(gpipe(2, 3), Costs(boundary_bytes=100, activation_bytes=2048))
    report = Report.of(trace, places=("cpu", "cuda:1"), samples=24)
    assert report.step_seconds == 12
    assert report.bubble == pytest.approx(1 / 4)
    assert report.samples_per_second == 2
    assert report.speed_up == 18 / 12
    first, second = report.workers
    assert (first.stages, first.place, first.busy, first.wait, first.overhead) == ((0,), "cpu", 9, 3, 0)
    assert (second.worker, second.place, second.sent_bytes, second.peak_bytes) == (1, "cuda:1", 300, 6144)


@given(valid_orders(), st.floats(0, 2))
def test_a_workers_time_is_all_accounted_for(schedule: Schedule, latency: float) -> None:
    report = of(schedule, latency=latency)
    for w in report.workers:
        assert w.busy + w.wait + w.overhead == pytest.approx(report.step_seconds)
    assert sum(report.lost.values()) == pytest.approx(report.bubble * report.step_seconds * len(report.workers), abs=1e-6)


@pytest.mark.parametrize(
    ("report", "lost"),
    [
        (of(gpipe(2, 3)), {"link": 0, "imbalance": 0, "bubble": 6}),
        (of(gpipe(2, 3), latency=1), {"link": 4, "imbalance": 0, "bubble": 6}),
        # makespan 17: one stage three times the other; equal stages of 2 would take 4 * 4 = 16 in a whole backward of twice
        (of(gpipe(2, 3), forward=[1, 3], input_grad=0, weight_grad=0), {"link": 0, "imbalance": 4, "bubble": 4}),
    ],
)
def test_lost_time_is_split_by_cause(report: Report, lost: dict[str, float]) -> None:
    assert report.lost == pytest.approx(lost)


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (of(one_f_one_b(4, 4)), "bubble"),
        (of(one_f_one_b(4, 64), latency=5), "link"),
        (of(one_f_one_b(4, 64), boundary_bytes=50, bandwidth=10), "link"),
        (of(one_f_one_b(4, 64), forward=[1, 1, 9, 1]), "imbalance"),
        (of(gpipe(1, 4)), None),
        (of(gpipe(2, 0)), None),
    ],
)
def test_the_largest_cause(report: Report, cause: str | None) -> None:
    assert report.cause == cause


def test_table() -> None:
    trace = simulate(gpipe(2, 3), Costs(0.01, 0.01, 0.01, boundary_bytes=1000, activation_bytes=2**20))
    assert str(Report.of(trace, places=("cpu", "host1 cuda:1"), samples=24)) == (
        "step 120.00 ms, bubble 25.0%, speed-up over one device 1.50x, 200 samples/s\n"
        "worker  stages  place             busy      wait  overhead     sent  peak memory\n"
        "     0  0       cpu           90.00 ms  30.00 ms   0.00 ms  2.9 KiB      3.0 MiB\n"
        "     1  1       host1 cuda:1  90.00 ms  30.00 ms   0.00 ms  2.9 KiB      3.0 MiB\n"
        "largest cause of lost time: the schedule's own bubble, 25.0% of the workers' time"
    )


def test_table_of_a_run_in_which_nobody_counted_bytes() -> None:
    text = str(Report.of(Trace((Event(Action.parse("F0@0"), 0, 1.0, 3.5),), workers=2, clock="wall")))
    assert "step 2.500 s, bubble 50.0%, speed-up over one device 1.00x\n" in text
    assert text.splitlines()[2].split() == ["0", "0", "-", "2.500", "s", "0.00", "ms", "0.00", "ms", "-", "-"]
    assert text.isascii()


def test_advice_gives_the_speed_up() -> None:
    assert advice(of(gpipe(4, 8))) == "speed-up over one device 2.91x"
    assert advice(of(gpipe(1, 1))) == "speed-up over one device 1.00x"


def test_advice_warns_below_one_and_names_the_cause_and_what_to_try() -> None:
    line = advice(of(gpipe(2, 4), latency=50))
    assert line == (
        "warning: speed-up over one device 0.21x: the pipeline is slower than one device; most time is lost to transfers and work "
        "between the actions (87%): try fewer stages, or larger micro-batches over a faster link, or one stage if the model fits one device"
    )


def test_two_replicas_are_compared_each_with_its_own_schedule() -> None:
    """Micro-batches and workers are numbered through: the second replica has 3 to 5 on workers 2 and 3, and starts one second late."""
    one = simulate(gpipe(2, 3))
    two = [Event(Action(e.action.op, e.action.micro_batch + 3, e.action.stage), e.worker + 2, e.start + 1, e.end + 1) for e in one.events]
    report = Report.of(Trace((*one.events, *two), workers=4, clock="wall"))
    assert report.lost == pytest.approx({"link": 4, "imbalance": 0, "bubble": 12})
    assert report.speed_up == pytest.approx(36 / 13)
    assert [w.stages for w in report.workers] == [(0,), (1,), (0,), (1,)]


def test_a_step_that_broke_off_has_no_causes() -> None:
    events = simulate(gpipe(2, 3)).events[:-1]
    report = Report.of(Trace(events, workers=2, clock="wall"))
    assert report.lost == {}
    assert "largest cause of lost time: none" in str(report)
