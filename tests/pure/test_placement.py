from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.errors import PlanError
from pipe.placement import device_for, threads_for


@pytest.mark.parametrize("visible", [None, "2,3", "3,2", "GPU-1a2b,GPU-3c4d", " 2, 3 ", "MIG-aa,MIG-bb"])
def test_worker_i_takes_the_ith_visible_device(visible):
    assert [device_for(i, 2, "auto", visible, 2) for i in range(2)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0,1"])
def test_an_empty_list_of_devices_means_cpu(visible):
    assert device_for(0, 2, "auto", visible, 4) == "cpu"
    with pytest.raises(PlanError, match=r"0 visible GPUs.*--device cpu"):
        device_for(0, 2, "cuda", visible, 4)


def test_the_list_limits_a_count_of_the_whole_machine():
    assert device_for(0, 1, "auto", "GPU-uuid", 4) == "cuda:0"
    assert device_for(1, 2, "auto", "2,3,-1,0", 4) == "cuda:1"
    with pytest.raises(PlanError, match=r"1 visible GPU \(CUDA_VISIBLE_DEVICES='GPU-uuid'\) for 2 workers"):
        device_for(1, 2, "auto", "GPU-uuid", 4)


def test_cuda_counts_less_than_the_list_where_an_entry_is_no_device():
    with pytest.raises(PlanError, match="1 visible GPU "):
        device_for(1, 2, "auto", "0,17", 1)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_fewer_devices_than_workers_is_an_error_with_both_ways_out(wanted):
    with pytest.raises(PlanError, match=r"2 visible GPUs for 3 workers.*--share-gpus.*--device cpu"):
        device_for(0, 3, wanted, None, 2)
    assert [device_for(i, 5, wanted, None, 2, share=True) for i in range(5)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


def test_no_gpu():
    assert device_for(3, 4, "auto", None, 0) == "cpu"
    assert device_for(3, 4, "auto", None, 0, share=True) == "cpu"
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(PlanError, match=f"'{wanted}'.*0 visible GPUs.*--device cpu"):
            device_for(0, 1, wanted, None, 0, share=True)


def test_cpu_is_cpu_whatever_there_is():
    assert device_for(1, 2, "cpu", "0", 1) == "cpu"


def test_one_named_device():
    assert device_for(0, 1, "cuda:1", "3,2", 2) == "cuda:1"
    assert device_for(1, 2, "cuda:1", None, 2, share=True) == "cuda:1"
    with pytest.raises(PlanError, match=r"all 2 workers.*--share-gpus"):
        device_for(0, 2, "cuda:1", None, 2)
    with pytest.raises(PlanError, match=r"'cuda:2'.*2 visible GPUs.*cuda:1 or less"):
        device_for(0, 1, "cuda:2", None, 2)


@pytest.mark.parametrize("wanted", ["gpu", "", "cuda:", "cuda:-1", "cuda:one", "CUDA", "cuda:1\n"])
def test_an_unknown_device(wanted):
    with pytest.raises(PlanError, match="one of auto, cpu, cuda"):
        device_for(0, 1, wanted, None, 2)


@given(st.integers(1, 16), st.integers(1, 16), st.booleans())
def test_workers_of_a_host_share_a_device_only_if_allowed_and_then_evenly(workers, gpus, share):
    if workers > gpus and not share:
        with pytest.raises(PlanError):
            device_for(0, workers, "cuda", None, gpus, share)
        return
    taken = [device_for(i, workers, "cuda", None, gpus, share) for i in range(workers)]
    loads = [taken.count(f"cuda:{i}") for i in range(gpus)]
    assert sum(loads) == workers
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("workers", "cores", "wanted", "threads"),
    [(1, 8, None, 8), (2, 8, None, 4), (3, 8, None, 2), (4, 2, None, 1), (2, 8, "3", 3), (2, 8, "4,2", 4), (2, 8, "", 4), (2, 8, " 5 ", 5)],
)
def test_threads(workers, cores, wanted, threads):
    assert threads_for(workers, cores, wanted) == threads


@pytest.mark.parametrize("wanted", ["0", "-2", "many", ",3", "2.5"])
def test_threads_that_are_no_number(wanted):
    with pytest.raises(PlanError, match="OMP_NUM_THREADS"):
        threads_for(2, 8, wanted)


def test_placement_does_not_import_torch():
    code = "import sys, pipe.placement; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
