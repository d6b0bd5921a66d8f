"""Checks of an Engine's arguments, at the door."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pipe.errors import BatchError, PlanError
from pipe.micro_batch import BatchDim
from pipe.model import Model
from pipe.settings import Settings


def check(*, loss_fn: Any, loss_reduction: Any, loss_weight: Any, precision: Any, max_grad_norm: Any, example: Any, seed: Any) -> None:
    """Checks what needs no model.

    Raises:
        PlanError: one does not fit.
    """
    for name, value in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
        if value is not None and not callable(value):
            raise PlanError(f"{name} is {value!r}; it is a function, or a module, or None: pass say nn.CrossEntropyLoss()")
    if isinstance(loss_fn, type):
        raise PlanError(f"loss_fn is the class {loss_fn.__name__}; it is a function or an instance: write loss_fn={loss_fn.__name__}()")
    if getattr(loss_fn, "reduction", loss_reduction) == "sum" and loss_reduction == "mean":
        raise PlanError(
            f"loss_fn {type(loss_fn).__name__} sums over a micro-batch and loss_reduction is 'mean'; both are the same, or the loss would "
            "depend on the number of micro-batches: pass loss_reduction='sum', or a loss_fn that takes the mean"
        )
    if loss_reduction not in ("mean", "sum"):
        raise PlanError(f"loss_reduction is {loss_reduction!r}; it is 'mean' or 'sum', over the mini-batch")
    if precision not in ("fp32", "bf16", "fp16"):
        raise PlanError(f"precision is {precision!r}; it is 'fp32', 'bf16' or 'fp16': choose one of them")
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm >= 0):
        raise PlanError(f"max_grad_norm is {max_grad_norm!r}; it is a number of at least 0: use say 1.0, or None for no clipping")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise PlanError(f"seed is {seed!r}; it is a whole number: leave it out to take torch.initial_seed()")
    if example is not None and not (
        isinstance(example, (tuple, list))
        and len(example) == 2
        and isinstance(example[0], (tuple, list))
        and isinstance(example[1], Mapping)
    ):
        raise PlanError(f"example is a {type(example).__name__}; it is (args, kwargs) of the model: write example=((x,), {{}})")


def check_later(**arguments: tuple[object, object]) -> None:
    """Arguments of the full contract whose other values come later; each is (value, the value that this version has).

    Raises:
        PlanError: another value.
    """
    for name, (value, only) in arguments.items():
        if value != only:
            raise PlanError(f"{name}={value!r} is not in this version, which has {name}={only!r} only: leave it out")


def check_batch_dim(batch_dim: BatchDim, names: Iterable[str] | None) -> None:
    """Checks the names of a mapping against those that the model's forward takes; None: it takes any.

    Raises:
        PlanError: one is unknown.
    """
    if not isinstance(batch_dim, Mapping) or names is None:
        return
    known = [*names, "target"]
    unknown = [name for name in batch_dim if name not in known and not str(name).startswith("args[")]
    if unknown:
        raise PlanError(
            f"batch_dim has {unknown[0]!r}, which is no argument of the model; it has {', '.join(map(str, known))}: check the name"
        )


def check_loss_fn(loss_fn: Any, model: Model) -> None:
    """Checks that a loss module has no part of the model, since the last stage gets a copy of it.

    Raises:
        PlanError: it has.
    """
    if isinstance(loss_fn, nn.Module):
        names = {id(parameter): name for name, parameter in model.parameters}
        for parameter in loss_fn.parameters():
            if id(parameter) in names:
                raise PlanError(
                    f"loss_fn holds the model's {names[id(parameter)]}, and works with a copy; a weight is trained where the model has "
                    "it: make loss_fn the model's last layer, with loss_fn=None"
                )


def check_grad_mode() -> None:
    """Checks that the caller of a training pass has not switched gradients off.

    Raises:
        PlanError: it has.
    """
    if not torch.is_grad_enabled():
        raise PlanError(
            "training was called under torch.no_grad() or inference_mode(), and it needs gradients: call it outside, or use eval_step"
        )


def check_call(model: Model, settings: Settings, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any], *, loss: bool) -> None:
    """Checks what a pass was given, as far as that can be told before anything is sent; `loss`: it makes one.

    Raises:
        PlanError, BatchError: it cannot be done.
    """
    if graph := [name for name in ("retain_graph", "create_graph") if name in kwargs and not model.takes_keyword(name)]:
        raise PlanError(
            f"{graph[0]} was given, and the graph of a step is on its stages, where the backward frees each micro-batch's; "
            "a step has one backward: leave it out, and put several losses into one loss_fn"
        )
    if lost := model.lost_keywords(kwargs):
        if settings.target_is_argument and "target" in kwargs:
            lost = f"target was given and loss_fn is None, so it is forward's: pass loss_fn, such as nn.CrossEntropyLoss()\n{lost}"
        raise PlanError(lost)
    most = model.most_arguments
    if most is not None and len(args) > most:
        raise PlanError(
            f"{len(args)} positional arguments for a forward that takes {most} ({', '.join(model.forward_names)}); "
            "the target goes by name: write train_step(x, target=y)"
        )
    if loss and target is None and settings.needs_target:
        raise BatchError("target is None, and loss_fn compares the output with it: write train_step(x, target=y)")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
