"""What `logdir` holds: TensorBoard scalars of every step, and under pipeline/ the traces of the steps that are kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pipe.report import Report
from pipe.trace import Trace

EVERY = 50  # steps between two traces that are kept
FLUSH = 10  # seconds


class StepLog:
    """Writes steps to a folder that `tensorboard --logdir` reads. Also: `with StepLog(logdir) as log`."""

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        self.logdir = Path(logdir)
        self._traces = self.logdir / "pipeline"
        self._traces.mkdir(parents=True, exist_ok=True)
        self._writer = _writer(self.logdir)
        self._first = True

    def step(self, step: int, loss: float, samples: int, measured: Trace | Report) -> None:
        """Logs one step, and keeps its trace if it is the first here or a 50th one.

        Args:
            step: its number, from 1.
            samples: rows of the mini-batch.
            measured: of a report only the scalars are logged; give the trace if there is one.
        """
        if isinstance(measured, Trace):
            report = Report.of(measured, samples=samples)
            if self._first or step % EVERY == 0:
                self._keep(step, measured)
            self._first = False
        else:
            report = measured
        self._writer.add_scalar("train/loss", loss, step)
        for tag, value in _scalars(report, samples):
            self._writer.add_scalar(tag, value, step)

    def _keep(self, step: int, trace: Trace) -> None:
        """Writes beside and renames, so that a reader never sees half a file."""
        path = self._traces / f"step-{step:06d}.jsonl"
        part = path.with_suffix(".part")
        trace.save(part)
        part.replace(path)

    def close(self) -> None:
        """Writes what is left; once is enough, twice does no harm."""
        self._writer.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _writer(logdir: Path) -> Any:
    with warnings.catch_warnings():  # tensorboard's imports warn of their own dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(logdir), flush_secs=FLUSH)  # type: ignore[no-untyped-call]


def _scalars(report: Report, samples: int) -> Iterator[tuple[str, float]]:
    speed = report.samples_per_second
    if speed is None and report.step_seconds:
        speed = samples / report.step_seconds
    if speed is not None:
        yield "train/samples_per_second", speed
    yield "pipeline/bubble", report.bubble
    seen: dict[str, int] = {}
    for worker in report.workers:
        name = f"stage{'s' * (len(worker.stages) > 1)} {'+'.join(map(str, worker.stages))}"
        replica = seen.setdefault(name, 0)
        seen[name] += 1
        place = f"pipeline/{name}" + (f" replica {replica}" if replica else "")
        yield f"{place}/busy_seconds", worker.busy
        yield f"{place}/wait_seconds", worker.wait
        if worker.peak_bytes is not None:
            yield f"{place}/peak_bytes", worker.peak_bytes
