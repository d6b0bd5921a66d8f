"""Gradients that are multiplied by a factor at the end of a pass.

Two things make such a factor: a loss as (sum, count), whose total count is known only when the last micro-batch's loss is; and float16,
whose small gradients would vanish if the loss were not multiplied first. What earlier passes have accumulated is set aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LossScale:
    """By what the loss is multiplied in float16: halved when a gradient overflows, doubled after 2000 steps without.

    Source: `torch.amp.GradScaler`, whose rule and defaults these are.
    """

    START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000

    def __init__(self) -> None:
        self.value = self.START
        self._steps = 0  # since the last change
        self._overflowed = False  # gradients that are there still
        self._counted = False  # they have met an optimizer's step

    @property
    def state(self) -> tuple[float, int]:
        """What a checkpoint keeps."""
        return self.value, self._steps

    @state.setter
    def state(self, kept: tuple[float, int]) -> None:
        self.value, self._steps = kept

    def passed(self, finite: bool) -> None:
        """After each pass: whether all gradients are finite."""
        self._overflowed = self._overflowed or not finite
        self._counted = False

    def stepped(self) -> bool:
        """After each optimizer's step; False: it was left out, since a gradient was not finite."""
        taken = not self._overflowed
        self._steps = self._steps + 1 if taken else 0
        if not taken or self._steps == self.INTERVAL:
            self.value *= self.GROWTH if taken else self.BACKOFF
            self._steps = 0
        self._counted = True
        return taken

    def zeroed(self) -> bool:
        """When the gradients are forgotten; False: without a step, and one was not finite."""
        taken = not self._overflowed or self._counted or self.stepped()
        self._overflowed = False
        return taken


class Accumulated:
    """The gradients of earlier passes, while those of one pass wait for their factor."""

    def __init__(self) -> None:
        self.aside = False  # they have been taken from the parameters
        self._kept: dict[nn.Parameter, Tensor] = {}

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes them from the parameters."""
        self.aside = True
        for parameter in parameters:
            if parameter.grad is not None:
                self._kept[parameter] = parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def join(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiplies the parameters' gradients by the factor, and adds the earlier ones."""
        self.aside = False
        for parameter in parameters:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)
            earlier = self._kept.pop(parameter, None)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def drop(self) -> None:
        """Forgets them."""
        self.aside = False
        self._kept.clear()


def finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether no gradient holds a NaN or an infinity."""
    found = (p.grad for p in parameters if p.grad is not None)
    return all(bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in found)
