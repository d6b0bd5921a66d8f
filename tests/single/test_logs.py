from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipe.action import Action
from pipe.logs import StepLog
from pipe.report import Report
from pipe.trace import Event, Trace


def trace_of(rows: dict[str, tuple[int, float, float]], workers: int = 2, **more) -> Trace:
    """A trace of actions, each with its worker, start and end."""
    return Trace(tuple(Event(Action.parse(name), *when) for name, when in rows.items()), workers, "wall", **more)


TWO = trace_of({"F0@0": (0, 0.0, 1.0), "F0@1": (1, 1.0, 2.0), "B0@1": (1, 2.0, 4.0), "B0@0": (0, 4.0, 8.0)}, peak_bytes=(100, 200))


def read(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(logdir)).Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_scalars_of_a_step(tmp_path: Path) -> None:
    with StepLog(tmp_path) as log:
        log.step(1, 0.5, 16, TWO)
        log.step(2, 0.25, 8, TWO)
    found = read(tmp_path)
    assert found == {
        "train/loss": [(1, 0.5), (2, 0.25)],
        "train/samples_per_second": [(1, 2.0), (2, 1.0)],
        "pipeline/bubble": [(1, 0.5), (2, 0.5)],  # 8 of 2 x 8 seconds
        "pipeline/stage 0/busy_seconds": [(1, 5.0), (2, 5.0)],
        "pipeline/stage 0/wait_seconds": [(1, 3.0), (2, 3.0)],
        "pipeline/stage 0/peak_bytes": [(1, 100), (2, 100)],
        "pipeline/stage 1/busy_seconds": [(1, 3.0), (2, 3.0)],
        "pipeline/stage 1/wait_seconds": [(1, 5.0), (2, 5.0)],
        "pipeline/stage 1/peak_bytes": [(1, 200), (2, 200)],
    }


def test_the_first_and_every_fiftieth_trace_is_kept(tmp_path: Path) -> None:
    with StepLog(tmp_path) as log:
        for step in range(1, 121):
            log.step(step, 0.5, 16, TWO)
    kept = sorted(path.name for path in (tmp_path / "pipeline").iterdir())
    assert kept == ["step-000001.jsonl", "step-000050.jsonl", "step-000100.jsonl"]
    assert Trace.load(tmp_path / "pipeline" / kept[1]) == TWO


def test_a_run_that_goes_on_keeps_its_own_first_step(tmp_path: Path) -> None:
    for first in (1, 7):
        with StepLog(tmp_path) as log:
            log.step(first, 0.5, 16, TWO)
            log.step(first + 1, 0.5, 16, TWO)
    assert sorted(path.name for path in (tmp_path / "pipeline").iterdir()) == ["step-000001.jsonl", "step-000007.jsonl"]


def test_a_report_gives_scalars_and_no_trace(tmp_path: Path) -> None:
    with StepLog(tmp_path / "new" / "folder") as log:
        log.step(1, 0.5, 16, Report.of(TWO))
    assert read(tmp_path / "new" / "folder")["train/samples_per_second"] == [(1, 2.0)]
    assert list((tmp_path / "new" / "folder" / "pipeline").iterdir()) == []


def test_workers_of_several_stages_and_replicas_have_names_of_their_own(tmp_path: Path) -> None:
    rows = {"F0@0": (0, 0.0, 1.0), "F0@1": (0, 1.0, 2.0), "F1@0": (1, 0.0, 1.0), "F1@1": (1, 1.0, 4.0)}
    with StepLog(tmp_path) as log:
        log.step(1, 0.5, 16, trace_of(rows))
    found = read(tmp_path)
    assert found["pipeline/stages 0+1/busy_seconds"] == [(1, 2.0)]
    assert found["pipeline/stages 0+1 replica 1/busy_seconds"] == [(1, 4.0)]


def test_what_was_logged_is_on_disk_after_close_and_close_may_come_twice(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.step(1, 0.5, 16, TWO)
    log.close()
    log.close()
    assert read(tmp_path)["train/loss"] == [(1, 0.5)]
