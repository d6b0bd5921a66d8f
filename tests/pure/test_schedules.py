"""Schedules by name, and their orders."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.action import Op
from pipe.errors import PlanError
from pipe.schedules import LATER, NAMES, schedule
from pipe.schedules.gpipe import gpipe
from pipe.schedules.one_f_one_b import one_f_one_b

SIZES = st.integers(1, 9), st.integers(0, 20)


def test_gpipe_two_workers_three_micro_batches() -> None:
    assert str(gpipe(2, 3)) == "F0@0 F1@0 F2@0 B0@0 B1@0 B2@0\nF0@1 F1@1 F2@1 B0@1 B1@1 B2@1"


def test_one_f_one_b_two_workers_three_micro_batches() -> None:
    assert str(one_f_one_b(2, 3)) == "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0\nF0@1 B0@1 F1@1 B1@1 F2@1 B2@1"


@given(*SIZES)
def test_gpipe_is_all_forwards_then_all_backwards(workers: int, micro_batches: int) -> None:
    for order in gpipe(workers, micro_batches).orders:
        assert [a.op for a in order] == [Op.F] * micro_batches + [Op.B] * micro_batches


@given(*SIZES)
def test_one_f_one_b_is_warm_up_pairs_and_the_rest(workers: int, micro_batches: int) -> None:
    for s, order in enumerate(one_f_one_b(workers, micro_batches).orders):
        ahead = min(micro_batches, workers - 1 - s)
        ops = [Op.F] * ahead + [Op.F, Op.B] * (micro_batches - ahead) + [Op.B] * ahead
        assert [a.op for a in order] == ops


@pytest.mark.parametrize("name", NAMES)
@given(*SIZES)
def test_every_schedule_can_run_and_sums_gradients_as_a_loop(name: str, workers: int, micro_batches: int) -> None:
    made = schedule(name, workers, micro_batches).check()
    assert made.workers == workers
    assert made.micro_batches == micro_batches
    assert made.ascending
    assert made == schedule(name, workers, micro_batches, stages_per_worker=1)
    if micro_batches:
        assert [made.stages_of(w) for w in range(workers)] == [(w,) for w in range(workers)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpip", "'gpip' is unknown; did you mean 'gpipe'"),
        ("1F1B", "did you mean '1f1b'"),
        ("nonsense", "'nonsense' is unknown; use one of 'gpipe', '1f1b'"),
        *((name, f"'{name}' is not available in this version; use one of 'gpipe', '1f1b'") for name in LATER),
    ],
)
def test_other_names_are_refused_with_those_there_are(name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        schedule(name, 2, 4)


@pytest.mark.parametrize(
    ("numbers", "more", "says"),
    [
        ((0, 4), {}, "workers=0; .* at least 1"),
        ((2, -1), {}, "micro_batches=-1; .* at least 0"),
        ((2, 1.5), {}, "micro_batches=1.5; .* whole number"),
        ((2, 4, 2), {}, "stages_per_worker=2; .* give 1"),
        ((2, 4), {"depth": 3}, "option depth; it takes none"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[int, ...], more: dict[str, int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        schedule("gpipe", *numbers, **more)


def test_planning_needs_no_torch() -> None:
    modules = ["action", "errors", "schedules", "trace", "chart", "simulator", "report", "clock", "partition.balance"]
    code = "import sys; " + "".join(f"import pipe.{m}; " for m in modules) + "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
