"""Which device a worker computes on, and with how many threads: decided from numbers that are passed in.

CUDA has applied CUDA_VISIBLE_DEVICES before anything here runs: "cuda:0" is the first device of that list, whatever
its index, order or UUID on the machine. Its text is needed only to tell "no GPU on purpose" and to explain an error.
"""

from __future__ import annotations

import re

from pipe.errors import PlanError

INSTEAD = "share them with --share-gpus, or compute on the CPU with --device cpu"
_UNITS = {unit: 1024**power for power, units in enumerate(("B", "K KiB KB", "M MiB MB", "G GiB GB", "T TiB TB")) for unit in units.split()}


def device_for(local_rank: int, local_world: int, wanted: str, visible: str | None, count: int, share: bool = False) -> str:
    """ "cpu", or "cuda:i" with i among the visible devices: worker i of a host takes the i-th.

    Args:
        local_rank, local_world: this worker among those of its host, and their number.
        wanted: "auto" (GPUs where the host has any), "cpu", "cuda", or one device for all the host's workers, "cuda:1".
        visible: the text of CUDA_VISIBLE_DEVICES, None where it is not set; "" is a host without GPUs.
        count: GPUs that CUDA reports.
        share: several workers may have the same GPU.

    Raises:
        PlanError: fewer GPUs than workers and not `share`; GPUs asked for where there are none; an unknown `wanted`.
    """
    asked = re.fullmatch(r"(auto|cpu|cuda)|cuda:(\d+)", wanted)
    if asked is None:
        raise PlanError(f"device is {wanted!r}; it is one of auto, cpu, cuda, cuda:INDEX: pass --device auto")
    gpus = _usable(visible, count)
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return "cpu"
    seen = f"this host has {_several(gpus, 'visible GPU')}" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})")
    if gpus == 0:
        raise PlanError(f"device is {wanted!r}, but {seen}; a worker needs one: compute on the CPU with --device cpu")
    if asked[2] is not None:
        return _named(int(asked[2]), gpus, local_world, share, seen)
    if gpus < local_world and not share:
        raise PlanError(f"{seen} for {_several(local_world, 'worker')}; each needs its own: {INSTEAD}")
    return f"cuda:{local_rank % gpus}"


def threads_for(local_world: int, cores: int, wanted: str | None) -> int:
    """Threads of one worker inside an operation: the cores of the host divided among its workers, at least 1.

    Args:
        wanted: the text of OMP_NUM_THREADS, which wins; of a list ("4,2") the first number, the outermost level.

    Raises:
        PlanError: `wanted` is no positive number.
    """
    if wanted is None or not wanted.strip():
        return max(1, cores // max(1, local_world))
    first = wanted.split(",")[0].strip()
    if not re.fullmatch("[0-9]+", first) or int(first) < 1:
        raise PlanError(f"OMP_NUM_THREADS is {wanted!r}; it is a number of threads, at least 1: correct it or unset it")
    return int(first)


def _usable(visible: str | None, count: int) -> int:
    """Devices a process can open: like CUDA, reads the list up to the first entry that is negative."""
    if visible is None:
        return max(0, count)
    listed = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        listed += 1
    return max(0, min(listed, count))


def _named(index: int, gpus: int, local_world: int, share: bool, seen: str) -> str:
    if index >= gpus:
        raise PlanError(f"device is 'cuda:{index}', but {seen}, numbered from 0: pass --device cuda:{gpus - 1} or less, or --device cuda")
    if local_world > 1 and not share:
        raise PlanError(f"device is 'cuda:{index}' for all {local_world} workers here; each needs its own: pass --device cuda, {INSTEAD}")
    return f"cuda:{index}"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def size(given: str | int) -> int:
    """Bytes, of a number or of a text such as "8GiB"; K, M, G and T are powers of 1024.

    Raises:
        PlanError: it is neither, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(given))
    unit = _UNITS.get((found[2] or "B").upper().replace("I", "i")) if found else None
    if found is None or unit is None or float(found[1]) <= 0 or isinstance(given, bool):
        raise PlanError(f"memory is {given!r}; it is the bytes that a worker may use, above 0: a number, or a text such as '8GiB'")
    return int(float(found[1]) * unit)
