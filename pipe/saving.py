"""Saving an engine's state as a checkpoint, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from pipe.checkpoint import Loading, Saved, Writer, find, opened, part_of, save_part
from pipe.controller import Controller
from pipe.errors import PipeError, PlanError
from pipe.front import Front
from pipe.model import Model
from pipe.optimizer import Groups


def save(controller: Controller, model: Model, front: Front | None, directory: Path) -> None:
    """Writes a checkpoint in place of what is there: each stage its own part, or the user's model where there are no workers yet.

    Raises:
        PlanError: it cannot be written there.
        StageError: a worker failed.
    """
    built = controller.has_weights()
    writer = Writer(directory, controller.assembly.plan.stages if built else 1)
    try:
        saved: Mapping[int, Saved]
        if built:
            saved = {w: each for w, each in controller.ask("save", writer.saving).items() if w < writer.saving.parts}
        else:
            state = front.optimizer.state if front is not None else {}
            saved = {0: save_part(writer.saving, 0, part_of([model.whole], (), dict(model.parameters), state))}
        groups = [] if front is None else _plain(front.groups())
        writer.finish(saved, {**controller.position(), "optimizer": _kind(front), "groups": groups})
    except BaseException:
        with suppress(PipeError):  # other workers may be writing still
            if built:
                controller.ask("idle", None)
        writer.drop()
        raise


def load(controller: Controller, model: Model, front: Front | None, directory: Path) -> None:
    """Takes over a checkpoint of any number of stages.

    Raises:
        PlanError: there is none, or it is another model's or another optimizer's.
        StageError: a worker failed.
    """
    folder = find(directory)
    engine, identity = opened(folder)
    if front is not None and engine["optimizer"] not in (None, _kind(front)):
        raise PlanError(
            f"the checkpoint {str(folder)!r} has the state of {engine['optimizer']} and the optimizer is {_kind(front)}: use the same one"
        )
    loading = Loading(str(folder), identity, model.sources(folder), engine["numbers"])
    built = controller.has_weights()
    if front is not None and engine["optimizer"] is not None:
        front.restore(engine["groups"], {} if built else loading.state(model.names))
    if built:
        for worker, needed in controller.ask("restore", loading).items():
            if needed is not None:
                controller.ask_one(worker, "load", loading.weights(needed[0]))
                controller.ask_one(worker, "load_optimizer", loading.state(needed[1]))
        controller.stale = True
    else:
        model.whole.load_state_dict(loading.weights(model.whole.state_dict()))
    controller.resume(engine)


def _kind(front: Front | None) -> str | None:
    return None if front is None else type(front.optimizer).__name__


def _plain(groups: Groups) -> Groups:
    """With numbers in place of tensors."""
    return [{key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups]
