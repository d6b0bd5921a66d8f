"""The training loop over a loader: epochs, validation, a learning-rate scheduler, and what it shows meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipe.errors import BatchError, PlanError
from pipe.micro_batch import count_rows

log = logging.getLogger("pipe")


class Trains(Protocol):
    """What the loop asks of an engine."""

    def train_step(self, *args: Any, **kwargs: Any) -> float:
        """The loss of one step, the optimizer's included."""
        ...

    def eval_step(self, *args: Any, **kwargs: Any) -> float:
        """The loss of one mini-batch, without training."""
        ...


class Schedules(Protocol):
    """A learning-rate scheduler."""

    def step(self) -> None:
        """Goes on by one step or epoch."""
        ...


Rows = Callable[[tuple[Any, ...], Mapping[str, Any]], int]
Show = Callable[[int, float], None]  # (samples, loss) after each step


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave. Losses are means over samples, so a last small batch counts for what it holds."""

    epoch: int  # from 0
    loss: float
    val_loss: float | None
    samples: int
    seconds: float  # of the training, without the validation


def fit(
    engine: Trains,
    loader: Iterable[Any],
    epochs: int = 1,
    val_loader: Iterable[Any] | None = None,
    scheduler: Schedules | ReduceLROnPlateau | None = None,
    scheduler_every: str = "step",
    checkpoint_dir: Any = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: Any = "auto",
    progress: bool = True,
    on_epoch: Callable[[EpochResult], None] | None = None,
    *,
    rows: Rows = count_rows,
) -> list[EpochResult]:
    """Trains for some epochs and gives one result an epoch.

    A batch (x, y) becomes `train_step(x, target=y)`, (a, b, y) becomes `train_step(a, b, target=y)`, a dict `train_step(**batch)`,
    anything else `train_step(batch)`; validation the same with `eval_step`. A sampler's `set_epoch` is called with the epoch.

    Args:
        scheduler_every: "step" or "epoch". ReduceLROnPlateau goes by the epoch and gets the validation loss, or else the loss.
        progress: a bar on stderr if that is a terminal; otherwise one line an epoch goes to the logger "pipe".
        on_epoch: gets each result as it comes.
        rows: samples in a batch, from (args, kwargs) without the target.

    Raises:
        PlanError: an option does not fit, or is not in this version.
        BatchError: a loader gave nothing.
    """
    _check(epochs, scheduler_every, checkpoint_dir, checkpoint_every)
    by_epoch = scheduler_every == "epoch" or isinstance(scheduler, ReduceLROnPlateau)
    results: list[EpochResult] = []
    with _shown(progress, epochs) as view:
        for epoch in range(epochs):
            _set_epoch(loader, epoch)
            began = time.perf_counter()
            after = None if by_epoch else scheduler
            loss, samples = _pass(engine.train_step, loader, rows, f"in epoch {epoch + 1}", view.begin(epoch, _length(loader)), after)
            seconds = time.perf_counter() - began
            val_loss = None if val_loader is None else _pass(engine.eval_step, val_loader, rows, "to validate")[0]
            if by_epoch and scheduler is not None:
                _step_epoch(scheduler, loss if val_loss is None else val_loss)
            results.append(EpochResult(epoch, loss, val_loss, samples, seconds))
            view.end(results[-1])
            if on_epoch is not None:
                on_epoch(results[-1])
    return results


def _check(epochs: int, scheduler_every: str, checkpoint_dir: Any, checkpoint_every: int | None) -> None:
    if epochs < 0:
        raise PlanError(f"epochs={epochs}; it is how often the loader is gone through: use 0 or more")
    if scheduler_every not in ("step", "epoch"):
        raise PlanError(f'scheduler_every={scheduler_every!r}; a scheduler goes by the step or by the epoch: use "step" or "epoch"')
    for name, value in (("checkpoint_dir", checkpoint_dir), ("checkpoint_every", checkpoint_every)):
        if value is not None:
            raise PlanError(
                f"{name}={value!r}: checkpoints are not in this version: leave it out, and save engine.state_dict() and "
                f"engine.optimizer_state_dict() with torch.save in on_epoch"
            )


def _pass(
    step: Callable[..., float], loader: Iterable[Any], rows: Rows, what: str, show: Show | None = None, scheduler: Any = None
) -> tuple[float, int]:
    """Goes through the loader once: the mean loss over samples, and their number."""
    total, samples = 0.0, 0
    for batch in loader:
        args, kwargs = arguments(batch)
        count = rows(args, {name: value for name, value in kwargs.items() if name != "target"})
        loss = step(*args, **kwargs)
        total += loss * count
        samples += count
        if scheduler is not None:
            scheduler.step()
        if show is not None:
            show(count, loss)
    if not samples:
        raise BatchError(
            f"the loader gave 0 samples {what}; it is gone through once an epoch: give a DataLoader or a list, not a generator"
        )
    return total / samples, samples


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a step gets for a loader's batch: positional and keyword arguments, the target among the latter."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1]), {"target": batch[-1]}
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def _step_epoch(scheduler: Schedules | ReduceLROnPlateau, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        begin = getattr(sampler, "set_epoch", None)
        if begin is not None:
            begin(epoch)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # an iterable data set has none
        return None


# --- what is shown ---


class _Lines:
    """One line an epoch, to the logger."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def begin(self, epoch: int, steps: int | None) -> Show | None:
        return None

    def end(self, result: EpochResult) -> None:
        log.info("%s", self.line(result))

    def line(self, result: EpochResult) -> str:
        val = "" if result.val_loss is None else f", val loss {result.val_loss:.4g}"
        speed = result.samples / result.seconds if result.seconds else 0.0
        head = f"epoch {result.epoch + 1}/{self.epochs}: loss {result.loss:.4g}{val}"
        return f"{head}, {result.samples} samples in {result.seconds:.1f} s, {speed:.4g} samples/s"


class _Bar(_Lines):
    """A bar over the steps of the epoch; the lines of past epochs stay above it."""

    def __init__(self, epochs: int, bar: Progress) -> None:
        super().__init__(epochs)
        self.bar = bar
        self.task = bar.add_task("", total=None, loss="-", speed="-")

    def begin(self, epoch: int, steps: int | None) -> Show:
        self.bar.reset(self.task, total=steps, description=f"epoch {epoch + 1}/{self.epochs}", loss="-", speed="-")
        began, samples = time.perf_counter(), 0

        def show(count: int, loss: float) -> None:
            nonlocal samples
            samples += count
            speed = samples / max(time.perf_counter() - began, 1e-9)
            self.bar.update(self.task, advance=1, loss=f"{loss:.4g}", speed=f"{speed:.4g}")

        return show

    def end(self, result: EpochResult) -> None:
        self.bar.console.print(self.line(result), highlight=False)


@contextmanager
def _shown(progress: bool, epochs: int, console: Console | None = None) -> Iterator[_Lines]:
    """The bar, taken off the terminal again however the loop ends; or lines where there is no terminal."""
    console = console or Console(stderr=True)
    if not progress or not console.is_terminal or console.is_dumb_terminal:
        yield _Lines(epochs)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TextColumn("{task.fields[speed]} samples/s"), TimeRemainingColumn(), console=console, transient=True) as bar:
        yield _Bar(epochs, bar)
