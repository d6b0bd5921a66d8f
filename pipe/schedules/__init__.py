"""Schedules by name: one file each, one row of NAMES each."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipe.action import Schedule
from pipe.errors import PlanError
from pipe.schedules.gpipe import gpipe
from pipe.schedules.one_f_one_b import one_f_one_b

NAMES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}
LATER = ("1f1b-doubled", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "search")


def schedule(name: str, workers: int, micro_batches: int, stages_per_worker: int | None = None, **options: Any) -> Schedule:
    """The schedule of that name: what each worker does, in order.

    Args:
        stages_per_worker: None leaves it to the schedule: 1 for those in which a worker holds one stage.
        options: what the schedule's own function takes beside these.

    Raises:
        PlanError: the name is unknown, a number is out of range, or the schedule does not take an option.
    """
    make = _find(name)
    for what, number, least in (("workers", workers, 1), ("micro_batches", micro_batches, 0)):
        if not isinstance(number, int) or number < least:
            raise PlanError(f"schedule {name!r} got {what}={number!r}; it must be a whole number of at least {least}")
    takes = [p for p in inspect.signature(make).parameters if p not in ("workers", "micro_batches")]
    if "stages_per_worker" in takes:
        options["stages_per_worker"] = stages_per_worker
    elif stages_per_worker not in (None, 1):
        raise PlanError(
            f"schedule {name!r} got stages_per_worker={stages_per_worker!r}; a worker holds one stage in it: leave it out or give 1"
        )
    unknown = sorted(set(options) - set(takes))
    if unknown:
        listed = f"it takes {', '.join(takes)}" if takes else "it takes none"
        raise PlanError(f"schedule {name!r} got the option {', '.join(unknown)}; {listed}: remove it")
    return make(workers, micro_batches, **options)


def _find(name: str) -> Callable[..., Schedule]:
    if name in NAMES:
        return NAMES[name]
    known = ", ".join(map(repr, NAMES))
    if name in LATER:
        raise PlanError(f"schedule {name!r} is not available in this version; use one of {known}")
    near = difflib.get_close_matches(str(name).lower(), [*NAMES, *LATER], n=3)
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise PlanError(f"schedule {name!r} is unknown; {guess}use one of {known}")
