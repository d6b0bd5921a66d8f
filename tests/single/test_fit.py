import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from pipe import fit as fitting
from pipe.errors import BatchError, PlanError
from pipe.fit import EpochResult, arguments, fit

torch.set_num_threads(1)


class Recorder:
    """An engine that trains nothing: a step's loss is the mean of its first input, as a mean loss is."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def train_step(self, *args: Any, **kwargs: Any) -> float:
        self.calls.append(("train", args, kwargs))
        return float((args or tuple(kwargs.values()))[0].float().mean())

    def eval_step(self, *args: Any, **kwargs: Any) -> float:
        self.calls.append(("eval", args, kwargs))
        return float((args or tuple(kwargs.values()))[0].float().mean())

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.calls]


class Steps:
    def __init__(self, engine: Recorder) -> None:
        self.engine = engine
        self.at: list[int] = []

    def step(self) -> None:
        self.at.append(len(self.engine.calls))


def loader_of(n: int, batch: int = 8) -> DataLoader:
    x = torch.arange(float(n))
    return DataLoader(TensorDataset(x[:, None], x.long()), batch_size=batch)


def test_a_last_small_batch_counts_for_what_it_holds() -> None:  # C07
    engine = Recorder()
    results = fit(engine, loader_of(21), epochs=2, val_loader=loader_of(5, 2), progress=False)
    assert [(r.epoch, r.samples) for r in results] == [(0, 21), (1, 21)]
    assert [r.loss for r in results] == [pytest.approx(10.0)] * 2  # the mean of 0..20; the mean of the batches' means would be 11
    assert [r.val_loss for r in results] == [pytest.approx(2.0)] * 2
    assert engine.kinds() == (["train"] * 3 + ["eval"] * 3) * 2
    assert [len(args[0]) for _, args, _ in engine.calls[:3]] == [8, 8, 5]
    assert engine.calls[2][2]["target"].tolist() == [16, 17, 18, 19, 20]
    assert all(r.seconds > 0 for r in results)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (("x", "y"), ("x",), {"target": "y"}),
        (["x", "y"], ("x",), {"target": "y"}),
        (("a", "b", "y"), ("a", "b"), {"target": "y"}),
        ({"ids": "i", "labels": "l"}, (), {"ids": "i", "labels": "l"}),
        (("x",), ("x",), {}),
        ("x", ("x",), {}),
    ],
)
def test_what_a_step_gets_for_a_batch(batch, args, kwargs) -> None:
    assert arguments(batch) == (args, kwargs)


def test_dicts_and_lone_tensors_reach_the_engine_and_are_counted() -> None:
    engine = Recorder()
    result = fit(engine, [{"ids": torch.zeros(3, 2), "target": torch.ones(9)}, torch.ones(1, 2)], progress=False)[0]
    assert (result.samples, result.loss) == (4, 0.25)
    assert [sorted(kwargs) for _, _, kwargs in engine.calls] == [["ids", "target"], []]


def test_rows_may_be_counted_by_the_engine() -> None:
    seen: list[Any] = []

    def rows(args: tuple[Any, ...], kwargs: Any) -> int:
        seen.append((len(args), dict(kwargs)))
        return args[0].shape[1]

    result = fit(Recorder(), [(torch.zeros(5, 2), torch.zeros(2)), (torch.ones(5, 6), torch.zeros(6))], progress=False, rows=rows)[0]
    assert (result.samples, result.loss) == (8, 0.75)
    assert seen == [(1, {}), (1, {})]


def test_a_scheduler_goes_by_the_step_or_the_epoch() -> None:
    for every, at in [("step", [1, 2, 3, 5, 6, 7]), ("epoch", [4, 8])]:  # each epoch has three steps and one validation
        engine = Recorder()
        steps = Steps(engine)
        fit(engine, loader_of(21), epochs=2, val_loader=loader_of(2), scheduler=steps, scheduler_every=every, progress=False)
        assert steps.at == at


@pytest.mark.parametrize(("validate", "best"), [(True, 0.5), (False, 10.0)])
def test_reduce_on_plateau_goes_by_the_epoch_and_sees_the_validation_loss(validate: bool, best: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    fit(Recorder(), loader_of(21), 3, val_loader=loader_of(2) if validate else None, scheduler=scheduler, progress=False)
    assert scheduler.best == pytest.approx(best)
    assert optimizer.param_groups[0]["lr"] == 0.25  # the loss stood still in two of three epochs


def test_the_sampler_learns_the_epoch() -> None:
    class Sampler(list):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    epochs: list[int] = []
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    fit(Recorder(), DataLoader(data, sampler=Sampler(range(4))), epochs=3, progress=False)
    assert epochs == [0, 1, 2]


def test_on_epoch_gets_each_result_as_it_comes() -> None:
    engine, seen = Recorder(), []
    results = fit(engine, loader_of(8), epochs=2, progress=False, on_epoch=lambda r: seen.append((r, len(engine.calls))))
    assert seen == [(results[0], 1), (results[1], 2)]
    with pytest.raises(AttributeError):
        results[0].loss = 0.0


def test_no_epochs_no_results() -> None:
    assert fit(Recorder(), loader_of(8), epochs=0) == []


def test_options_that_do_not_fit_are_refused_before_the_first_step() -> None:
    for options, why in [
        ({"epochs": -1}, "epochs=-1"),
        ({"scheduler_every": "batch"}, "'batch'"),
        ({"checkpoint_dir": "c"}, "checkpoint_dir='c': checkpoints are not in this version"),
        ({"checkpoint_every": 5}, "checkpoint_every=5: checkpoints are not in this version"),
    ]:
        engine = Recorder()
        with pytest.raises(PlanError, match=why):
            fit(engine, loader_of(8), **options)
        assert engine.calls == []


def test_a_loader_that_is_used_up_says_so() -> None:
    engine = Recorder()
    with pytest.raises(BatchError, match=r"0 samples in epoch 2;.*not a generator"):
        fit(engine, ((x, y) for x, y in loader_of(8)), epochs=2, progress=False)
    assert len(engine.calls) == 1
    with pytest.raises(BatchError, match="0 samples to validate"):
        fit(engine, loader_of(8), val_loader=[], progress=False)


def test_without_a_terminal_one_line_an_epoch_goes_to_the_logger(caplog, capsys) -> None:
    with caplog.at_level(logging.INFO, logger="pipe"):
        fit(Recorder(), loader_of(21), epochs=2, val_loader=loader_of(5))
    assert [record.getMessage().split(" samples in")[0] for record in caplog.records] == [
        "epoch 1/2: loss 10, val loss 2, 21",
        "epoch 2/2: loss 10, val loss 2, 21",
    ]
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What stderr gets from here on; called in the test itself, since pytest sets stderr anew after the fixtures."""
    out = Terminal()
    for name in ("TTY_COMPATIBLE", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", out)
    return out


def test_on_a_terminal_there_is_a_bar_with_loss_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    fit(Recorder(), loader_of(21), epochs=2)
    text = terminal.getvalue()
    assert "epoch 1/2: loss 10, 21 samples" in text
    assert "epoch 2/2: loss 10, 21 samples" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again


def test_the_bars_columns() -> None:
    out = io.StringIO()
    with fitting._shown(True, 3, Console(file=out, force_terminal=True, width=120, color_system=None, _environ={"TERM": "xterm"})) as view:
        show = view.begin(1, 4)
        assert show is not None
        show(8, 0.5)
        view.bar.refresh()  # type: ignore[attr-defined]
        view.end(EpochResult(1, 0.5, None, 8, 2.0))
    text = out.getvalue()
    assert "epoch 2/3" in text
    assert "1/4" in text
    assert "loss 0.5" in text
    assert "samples/s" in text
    assert "epoch 2/3: loss 0.5, 8 samples in 2.0 s, 4 samples/s" in text


def test_ctrl_c_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    def interrupted(*args: Any, **kwargs: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(SimpleNamespace(train_step=interrupted, eval_step=interrupted), loader_of(8))
    assert terminal.getvalue().count("\x1b[?25h") == 1
    assert sys.stderr is terminal


def test_progress_false_is_quiet_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    fit(Recorder(), loader_of(8), progress=False)
    assert terminal.getvalue() == ""
