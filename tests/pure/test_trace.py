"""What a trace tells, draws and stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import valid_orders

from pipe.action import Action, Schedule
from pipe.clock import WallClock
from pipe.errors import PipeError
from pipe.schedules.gpipe import gpipe
from pipe.schedules.one_f_one_b import one_f_one_b
from pipe.simulator import Costs, simulate
from pipe.trace import Event, Trace

# Two workers, by the wall clock, worker 1 late at B0@1 by 0.5 s; a step over both at the end.
#
#       10    11    12    13    14    15    16
#     0 | F0    .......................B0  ..O
#     1 |     ..F0    ...B0    B0        ....O
RUN = Trace(
    events=(
        Event(Action.parse("F0@0"), 0, 10.0, 11.0),
        Event(Action.parse("F0@1"), 1, 11.25, 12.0),
        Event(Action.parse("B0@1"), 1, 12.5, 14.0),
        Event(Action.parse("B0@0"), 0, 14.0, 15.0),
        Event(Action.parse("O0@0"), 0, 15.25, 16.0),
        Event(Action.parse("O0@1"), 1, 15.5, 16.0),
        Event(Action.parse("S0@0"), 0, 11.0, 11.2),
    ),
    workers=2,
    clock="wall",
    plan={"stages": 2, "schedule": "gpipe", "split": [1, 2]},
    step=7,
    peak_bytes=(5, 6),
    sent_bytes=(7, 8),
)


def test_times() -> None:
    assert RUN.makespan == 6
    assert RUN.span == 6
    assert RUN.busy == (2.75, 2.75)
    assert RUN.bubble == pytest.approx(1 - 5.5 / 12)


def test_a_gap_is_starvation_up_to_the_end_of_the_last_need_and_overhead_after_it() -> None:
    """Worker 0: B0@0 waits 11-14 for B0@1; then 0.25 of its own. Worker 1: waits 10-11 for F0@0, 0.25 late; 0.5 late; waits 14-15."""
    assert RUN.starved == (3.0, 2.0)
    assert RUN.overhead == (0.25, 1.25)


def test_a_simulation_with_free_links_has_no_overhead() -> None:
    trace = simulate(one_f_one_b(4, 6), Costs(optimizer=1))
    assert trace.overhead == (0, 0, 0, 0)
    assert trace.starved[0] + trace.busy[0] == trace.makespan


@given(valid_orders())
def test_a_workers_time_is_busy_starved_overhead_and_the_end(schedule: Schedule) -> None:
    trace = simulate(schedule, Costs(latency=0.25))
    for w, order in enumerate(trace.by_worker):
        last = order[-1].end if order else 0
        assert trace.busy[w] + trace.starved[w] + trace.overhead[w] == pytest.approx(last)


@pytest.mark.parametrize(
    ("text", "peaks"),
    [
        ("F0@0 F1@0 B0@0 F2@0 B1@0 B2@0", (2,)),
        ("F0@0 I0@0 F1@0 I1@0 W0@0 W1@0", (2,)),
        ("F0@0 F0@1 B0@1 B0@0", (2,)),
        ("F0@0 F1@0 F2@0", (1,)),
    ],
)
def test_in_flight_is_from_the_forward_to_the_backward_or_w(text: str, peaks: tuple[int, ...]) -> None:
    assert simulate(Schedule.parse(text)).peak_in_flight == peaks


def test_chart_of_one_f_one_b() -> None:
    assert simulate(one_f_one_b(3, 4)).chart() == (
        "0 | F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3\n"
        "1 | .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..\n"
        "2 | .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. .."
    )


def test_chart_names_the_stage_where_a_worker_has_several() -> None:
    assert simulate(Schedule.parse("F0@0 F0@2\nF0@1")).chart() == "0 | F0@0 .... F0@2\n1 | .... F0@1 ...."


def test_chart_finds_the_grid_of_uneven_costs() -> None:
    assert simulate(gpipe(1, 1), Costs(1, 0, 0, backward=1.5)).chart() == "0 | F0 F0 B0 B0 B0"


def test_chart_keeps_its_columns_with_two_digit_micro_batches() -> None:
    rows = simulate(gpipe(2, 11), Costs(1, 1, 0, optimizer=1)).chart().splitlines()
    assert rows[0].startswith("0 | F0  F1  ")
    assert rows[0].endswith(" B9  B10 O")
    assert rows[1].index("F10") == rows[0].index("F10") + 4


def test_chart_of_a_run_is_scaled_to_fit() -> None:
    chart = simulate(one_f_one_b(4, 8), Costs(1.017, 0.93, 1.1234, latency=0.0321)).chart(width=130)
    *rows, scale = chart.splitlines()
    assert len(rows) == 4
    assert max(map(len, rows)) <= 130
    assert all(f"F{m}" in row for row in rows for m in range(8))
    assert scale == "one column is 0.816 s"


def test_chart_narrower_than_the_grid_is_scaled() -> None:
    assert simulate(gpipe(1, 4)).chart(width=16) == "0 | F1 B0 B1 B3\none column is 3 s"


def test_chart_of_a_wall_clock_run() -> None:
    assert RUN.chart(width=41).splitlines()[:2] == [
        "0 | F0 F0 .. .. .. .. .. .. B0 B0 O  O",
        "1 | .. .. F0 F0 .. B0 B0 B0 .. .. .. O",
    ]


def test_chart_of_nothing() -> None:
    assert simulate(gpipe(2, 0)).chart() == "0 |\n1 |"


def test_a_file_is_read_back(tmp_path: Path) -> None:
    RUN.save(tmp_path / "trace.jsonl")
    assert Trace.load(tmp_path / "trace.jsonl") == RUN


@given(valid_orders(), st.floats(0, 3))
def test_every_simulation_is_read_back(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, latency: float) -> None:
    trace = simulate(schedule, Costs(latency=latency))
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    trace.save(path)
    assert Trace.load(path) == trace


def test_a_file_is_json_lines_with_a_head(tmp_path: Path) -> None:
    RUN.save(tmp_path / "trace.jsonl")
    head, *rows = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert (head["clock"], head["unit"], head["plan"]["schedule"]) == ("wall", "seconds", "gpipe")
    assert rows[1] == {"action": "F0@1", "worker": 1, "start": 11.25, "end": 12.0}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: "", "line 1 is not of a trace"),
        (lambda text: "hello\n", "line 1 is not of a trace"),
        (lambda text: "[1]\n", "line 1 is not of a trace"),
        (lambda text: text[:-9], "line 8 is not of a trace"),
        (lambda text: text.replace("F0@1", "F0"), "line 3 is not of a trace .*'F0' is not an action"),
        (lambda text: text.rsplit("\n", 2)[0], "holds 6 events of 7; the file is cut short"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2; this version reads 1"),
        (lambda text: text.replace('"workers": 2', '"workers": 1'), "F0@1 is on worker 1; the trace has workers 0 to 0"),
    ],
)
def test_a_spoiled_file_is_refused(tmp_path: Path, spoil: object, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    RUN.save(path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(PipeError, match=says):
        Trace.load(path)


def test_chrome_has_a_track_a_worker_and_an_arrow_a_message(tmp_path: Path) -> None:
    trace = simulate(gpipe(2, 2))
    trace.chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = [e["ph"] for e in events]
    assert {k: kinds.count(k) for k in "MXsf"} == {"M": 3, "X": 8, "s": 4, "f": 4}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["worker 0", "worker 1"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (slices["B1@1"]["ts"], slices["B1@1"]["dur"], slices["B1@1"]["tid"]) == (5e6, 2e6, 1)
    for begin, end in zip((e for e in events if e["ph"] == "s"), (e for e in events if e["ph"] == "f")):
        made = slices[begin["name"]]
        assert begin["id"] == end["id"]
        assert begin["tid"] == made["tid"] != end["tid"]
        assert made["ts"] <= begin["ts"] <= made["ts"] + made["dur"] <= end["ts"]


def test_wall_clock_counts_from_the_beginning_of_the_step() -> None:
    ticks = iter([12.5, 14.0])
    clock = WallClock(began=10.0, now=lambda: next(ticks))
    marks = [clock.mark(), clock.mark()]
    assert [clock.seconds(m) for m in marks] == [2.5, 4.0]
    assert clock.name == "wall"
