"""Where a value enters a stage: Boundary keeps the module off the leaf, and Inbox takes the gradient out.

A module may begin with an in-place operation, so it must not see a leaf; and a gradient must keep its strides, which `.grad`
of a leaf does not. Hence a node of our own between the message and the module:

    message --forward: detach [1]--> x --module--> output        gradient --backward: stored [2]--> sent to the producer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipe.errors import PlanError

_PROBES = (1, 255, 4096, 65_537, 1_048_579)  # bytes; odd sizes and ones beyond a page


class Inbox:
    """Where the gradient of one tensor that entered a stage is left; None until a backward has reached it."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class Boundary(torch.autograd.Function):
    """The identity: its result is no leaf, and its backward leaves the gradient in an Inbox, strides and all.

    Each tensor of a structure enters through a node of its own, so that one that is not used keeps None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inbox: Inbox) -> Tensor:
        ctx.inbox = inbox
        ctx.set_materialize_grads(False)  # no gradient stays None, and so do those of the stages before
        return x.detach()  # [1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        inbox, gradient = ctx.inbox, gradients[0]
        inbox.gradient = gradient if inbox.gradient is None or gradient is None else inbox.gradient + gradient  # [2]
        return None, None


def enter_boundary(x: Tensor, inbox: Inbox) -> Tensor:
    """`x` as the module may have it: in the graph, no leaf, free for in-place operations; its gradient goes to `inbox`."""
    entered: Tensor = Boundary.apply(x.detach().requires_grad_(), inbox)  # type: ignore[no-untyped-call]
    return entered


def check_device_copy(device: torch.device | str) -> None:
    """Sends a pattern of bytes to the device and back; does nothing on the CPU.

    Raises:
        PlanError: other bytes came back. Some PCIe set-ups (IOMMU, ACS, virtual machines) do that without an error.
    """
    if torch.device(device).type == "cpu":
        return
    for size in _PROBES:
        sent = (torch.arange(size, dtype=torch.int64) * 31 % 251).to(torch.uint8)
        back = sent.to(device).clone().cpu()
        if not torch.equal(sent, back):
            wrong = int((sent != back).sum())
            raise PlanError(
                f"{wrong} of {size} bytes changed on the way to {device} and back; a worker needs a device that keeps them: "
                f"check the driver and the IOMMU, or run with --device cpu"
            )
