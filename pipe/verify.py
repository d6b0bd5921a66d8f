"""Recomputes the first steps in one process, and compares: loss, every gradient, every weight.

engine's controller --the same commands--> a controller of one stage, in a thread of this process --its numbers--> compare
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipe.announce import logger
from pipe.assembly import Assembly
from pipe.controller import Controller
from pipe.errors import PipeError
from pipe.loss import LossFn
from pipe.model import Model
from pipe.options import Options
from pipe.passes import Pass
from pipe.plan import Plan
from pipe.settings import Settings

_MIRRORED = ("optimizer_step", "zero_grad", "clip_grad_norm", "mode", "load", "freeze", "load_optimizer")
_CLOSE = 4500  # times the type's epsilon, 1e-12 in float64: where sums have another order than in one process


@dataclass(frozen=True)
class Difference:
    """Two tensors under one name; `size` is the largest difference, `relative` is that over the largest value."""

    what: str
    name: str
    size: float
    relative: float


class Verifier:
    """The engine's shadow for its first steps.

    Memory: the whole model once more, with gradients and optimizer state, beside worker 0.
    """

    def __init__(self, steps: int, model: Model, options: Options, loss_fn: LossFn | None, settings: Settings) -> None:
        """`steps`: how many passes of training are compared."""
        self._steps = steps
        self._done = 0
        self._largest = 0.0
        self._make: Callable[[Plan], Controller] = lambda plan: Controller(
            model, Assembly(model, _alone(plan), replace(options, world=None), "auto", loss_fn), settings, None, None, quiet=True
        )
        self._shadow: Controller | None = None

    def begin(self, controller: Controller, example: Any) -> None:
        """Makes the shadow; when the engine's workers are made, from the same weights."""
        self._shadow = self._make(controller.assembly.plan)
        self._shadow.shell = controller.shell
        self._shadow.training = controller.training
        self._shadow.ready(example)

    def told(self, name: str, payload: Any) -> None:
        """A command of the engine, which the shadow obeys, too."""
        if self._shadow is not None and name in _MIRRORED:
            self._shadow.ask(name, payload)

    def trained(self, controller: Controller, asked: Pass, loss: float) -> None:
        """A pass of training of the engine, which the shadow does, too; then they are compared.

        Raises:
            PipeError: they differ.
        """
        if self._shadow is None:
            return
        want = self._shadow.train(asked)
        self._done += 1
        order = _other_order(controller)
        found = [*_compare(controller, self._shadow, "gradients", "gradient of")]
        found += [] if order else _compare(controller, self._shadow, "state", "value of")
        found.append(_difference("", "the loss", torch.tensor(loss, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)))
        close = _tolerance(controller) if order else 0.0
        wrong = next((each for each in found if not each.relative <= close), None)
        if wrong is not None:
            self._end()
            raise PipeError(_text(self._done, wrong, controller, order))
        self._largest = max([self._largest, *(each.relative for each in found)])
        if order:  # differences in the last bits grow from step to step: each begins anew
            self._shadow.ask("load", controller.gather("state"))
            self._shadow.ask("load_optimizer", controller.gather("optimizer"))
        if self._done == self._steps:
            much = (
                f"within {self._largest:.1e} of one process, relative, since {order}"
                if self._largest
                else "equal to one process, bit for bit"
            )
            what = "loss and gradients are" if order else "loss, gradients and weights are"
            logger.info(f"verify: {self._done} step{'s' * (self._done > 1)}: {what} {much}")
            self._end()

    def close(self) -> None:
        """Ends the shadow; says so if it had not seen all steps."""
        if self._shadow is not None:
            logger.info(
                f"verify: the end came after {self._done} of {self._steps} steps" + ", which were equal to one process" * (self._done > 0)
            )
            self._end()

    def _end(self) -> None:
        if self._shadow is not None:
            self._shadow.close()
        self._shadow = None


def _alone(plan: Plan) -> Plan:
    return Plan("single", 1, 1, plan.micro_batches * plan.replicas, reason="the reference of --verify")


def _other_order(controller: Controller) -> str:
    """Why sums may have another order than in one process; empty if they have the same."""
    assembly = controller.assembly
    if assembly.plan.replicas > 1:
        return "replicas sum their gradients at the end"
    if assembly.ties:
        return "tied weights sum their gradients at the end"
    if any("cuda" in place for place in assembly.plan.places):
        return "GPU kernels may choose another order"
    return "" if assembly.plan.order(assembly.plan.micro_batches).ascending else "the schedule's backwards do not come in ascending order"


def _compare(controller: Controller, shadow: Controller, what: str, said: str) -> list[Difference]:
    own, want = controller.gather(what), shadow.gather(what)
    return [_difference(said, name, own.get(name), value) for name, value in want.items() if isinstance(value, (Tensor, type(None)))]


def _difference(what: str, name: str, own: Tensor | None, want: Tensor | None) -> Difference:
    if own is None or want is None or own.shape != want.shape:
        return Difference(what, name, *((0.0, 0.0) if own is want else (float("inf"),) * 2))
    one, other = own.to_dense().double(), want.to_dense().double()
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return Difference(what, name, 0.0, 0.0)
    size = float((one - other)[~same].abs().max())
    return Difference(what, name, size, size / max(float(other.abs().max()), torch.finfo(torch.float64).tiny))


def _tolerance(controller: Controller) -> float:
    types = {value.dtype for value in controller.gather("state").values() if isinstance(value, Tensor) and value.is_floating_point()}
    return _CLOSE * max((torch.finfo(dtype).eps for dtype in types), default=0.0)


def _text(step: int, wrong: Difference, controller: Controller, order: str) -> str:
    place = "" if not wrong.what else f" on stage {controller.assembly.stage_of(wrong.name)}"
    rule = "but for the order of sums" if order else "bit for bit"
    much = f"{wrong.size:.3g} (relative {wrong.relative:.3g})"
    return (
        f"verify: step {step}: {f'{wrong.what} {wrong.name!r}'.lstrip()}{place} differs by {much} from the same micro-batches "
        f"in one process; they are equal {rule}: look for what the model does "
        "outside of its stages (global state, numpy's random numbers, threads), or report it with the model"
    )
