"""Checks of an Engine's arguments, at the door."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pipe.errors import PlanError
from pipe.micro_batch import BatchDim


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
