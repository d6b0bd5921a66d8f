"""The loss of a micro-batch: from a loss function, or from what the model returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipe.copying import copy_module
from pipe.errors import PipeError, PlanError
from pipe.silent import draws


class Loss(float):
    """The loss of a step, a number; its gradients are on the stages already."""

    def item(self) -> float:
        """The number, as of a tensor."""
        return float(self)

    def backward(self, *_: object, **__: object) -> None:
        """Refused: the engine has done it.

        Raises:
            PipeError: always.
        """
        raise PipeError(
            f"backward() was called on the loss {float(self):g}; train_step and forward_backward have run the backward on the stages, and "
            "keep no graph for a second one: remove the call, and put several losses into one loss_fn"
        )


LossFn = Callable[[Any, Any], Any]


def loss_of(loss_fn: LossFn | None, output: Any, target: Any) -> tuple[Tensor, float | None]:
    """The 0-dim loss, `loss_fn(output, target)` or, without one, the model's own; and the count that it is a sum over, if `loss_fn` gave
    (sum, count).

    A model's own loss is its 0-dim output, `.loss`, `["loss"]` or the first of a tuple.

    Raises:
        PlanError: it is not a 0-dim tensor, or the count is no number of at least 0.
    """
    loss = _own_loss(output) if loss_fn is None else loss_fn(output, target)
    count = None
    if loss_fn is not None and isinstance(loss, tuple) and len(loss) == 2:
        loss, count = loss[0], _number(loss[1])
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        source = "the model returned" if loss_fn is None else "loss_fn returned"
        raise PlanError(
            f"{source} {found} as its loss; a loss is a 0-dim tensor, or (sum, count): reduce it with .mean() or .sum(), or pass loss_fn="
        )
    return loss, count


def _number(count: Any) -> float:
    try:
        number = float(count)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise PlanError(f"loss_fn returned (sum, {count!r}); the second is how many the sum is over, a number of at least 0: count them")
    return number


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output


def loss_draws(loss_fn: LossFn | None) -> bool:
    """Whether it may draw random numbers; False only where that is sure."""
    if loss_fn is None or str(getattr(loss_fn, "__module__", "")).startswith("torch.nn.functional"):
        return False
    return draws(loss_fn) if isinstance(loss_fn, torch.nn.Module) else True


def on_device(loss_fn: LossFn | None, device: torch.device) -> LossFn | None:
    """The loss function with its own tensors (class weights, say) on the last stage's device; a module is copied."""
    if isinstance(loss_fn, torch.nn.Module):
        copied: LossFn = copy_module(loss_fn).to(device)
        return copied
    return loss_fn
