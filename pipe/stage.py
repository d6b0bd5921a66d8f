"""A stage: a module on a device, and what its forwards saved for their backwards.

It knows nothing of neighbours, schedules or transports.

    message --unpack--> Boundary [1] --> module --> output --pack--> message        (forward)
    gradients <--inbox-- Boundary <----- module <-- roots <-------- gradients        (backward)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipe import rng, wire
from pipe.aliases import Writes
from pipe.ambient import Ambient
from pipe.batch_norm import PooledStatistics
from pipe.boundary import Inbox, enter_boundary
from pipe.errors import PipeError, PlanError
from pipe.loss import LossFn, loss_draws, loss_of, on_device
from pipe.partition.sequence import Chain
from pipe.wire import Message

Part = tuple[float, float | None]  # of a micro-batch: its part of the mini-batch's loss, or (sum, count)


@dataclass(frozen=True)
class Feed:
    """What the controller gives a stage for one micro-batch. Tensors are (micro-batch, *features)."""

    args: tuple[Any, ...] = ()  # of the first stage
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # those this stage's forward names
    target: Any = None  # of the last stage
    share: float = 1.0  # of this micro-batch's loss in the loss of the mini-batch


@dataclass(frozen=True)
class Run:
    """One pass over a mini-batch, as a stage sees it: what kind, its feeds, and what keys its random streams."""

    kind: str  # "train", "eval" or "predict"
    feeds: Mapping[int, Feed]  # by micro-batch
    seed: int
    call: int  # number of the forward_backward call; below 0 for an evaluation
    reduction: str = "mean"  # of losses over the mini-batch: "mean" by rows, "weight" by loss_weight, or "sum"
    scale: float = 1.0  # of the loss, in its backward only
    ambient: Ambient = field(default_factory=Ambient)

    @property
    def trains(self) -> bool:
        """Whether backwards follow."""
        return self.kind == "train"


@dataclass
class _Saved:
    """What one forward keeps for its backward."""

    inboxes: list[Inbox | None]
    roots: list[Tensor]
    streams: rng.Streams | None


class Stage:
    """Forward and backward of consecutive layers."""

    def __init__(self, index: int, module: nn.Module, device: str, *, last: bool, loss_fn: LossFn | None = None) -> None:
        self.index = index
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.last = last
        self.loss_fn = on_device(loss_fn, self.device) if last else None
        self.on_losses: Callable[[dict[int, Part]], None] = lambda losses: None
        self.outputs: dict[int, Any] = {}
        self._statistics = PooledStatistics(module)
        self._draws = rng.draws(module)
        self._loss_draws = last and loss_draws(self.loss_fn)
        if self._draws:
            rng.watch(module)
        self._run = Run("predict", {}, 0, 0)
        self._saved: dict[int, _Saved] = {}
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, float] = {}

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Surrounds one pass: evaluation mode for "eval" and "predict" (each module's own mode comes back), BatchNorm statistics
        once a mini-batch, and nothing left over if it fails."""
        self._run = run
        modes = {} if run.trains else {module: module.training for module in self.module.modules()}
        if not run.trains:
            self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            self._saved.clear()
            self._losses.clear()
            self._counts.clear()
            self.outputs = {}
            self._statistics.drop()

    @property
    def saved(self) -> int:
        """How many micro-batches are held for their backward."""
        return len(self._saved)

    @property
    def count(self) -> float | None:
        """What the sums of this pass's losses are to be divided by; None where losses are means."""
        return sum(self._counts.values()) if self._counts else None

    @property
    def statistics(self) -> PooledStatistics:
        """BatchNorm's sums of this pass."""
        return self._statistics

    def forward(self, micro_batch: int, arg: Message | None) -> Message | None:
        """The output as a message, or None from the last stage, which keeps its loss or its output.

        `arg` is the output of the stage before; None for the first stage, whose arguments are in its feed.
        """
        feed, saved = self._run.feeds.get(micro_batch, Feed()), _Saved([], [], self._streams(micro_batch))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._run.trains))
            stack.enter_context(self._run.ambient.forward(self.device.type))
            if saved.streams is not None and self._draws:
                stack.enter_context(saved.streams)
                if isinstance(self.module, Chain):
                    self.module.at = saved.streams.at
            args, writes = (_on(feed.args, self.device), None) if arg is None else self._enter(arg, saved)
            output = self.module(*args, **_on(dict(feed.kwargs), self.device))
            if writes is not None:
                writes.check()
            if self.last:
                self._end(micro_batch, output, feed, saved)
                return None
        frame, tensors = wire.take_out(output)
        if self._run.trains:
            saved.roots = tensors
            self._saved[micro_batch] = saved
        return wire.pack_roots(frame, tensors)

    def backward(self, micro_batch: int, arg: Message | None) -> Message | None:
        """The gradients of this stage's input, in the order of the message that brought it; None from the first stage.

        Weights' gradients are added to `.grad`. A tensor that got no gradient gives None, as in plain autograd. Frees what
        `forward` saved for this micro-batch.

        Raises:
            PipeError: no forward of this micro-batch is saved.
        """
        saved = self._saved.pop(micro_batch, None)
        if saved is None:
            raise PipeError(
                f"no forward of micro-batch {micro_batch} is saved on stage {self.index}; each backward follows its own forward, once"
            )
        gradients: list[Tensor | None] = [None] * len(saved.roots) if arg is None else wire.unpack_list(arg, self.device)
        wanted = [(r, g) for r, g in zip(saved.roots, gradients) if r.requires_grad and (self.last or g is not None)]
        if wanted:
            with ExitStack() as stack:
                if saved.streams is not None:
                    stack.enter_context(saved.streams)
                torch.autograd.backward([r for r, _ in wanted], [g for _, g in wanted])
        if self.index == 0:
            return None
        return wire.pack_list([inbox.gradient if inbox is not None else None for inbox in saved.inboxes])

    def _enter(self, message: Message, saved: _Saved) -> tuple[tuple[Any], Writes | None]:
        """The value as the module's argument, and what watches tensors that should have shared memory."""
        entered: list[Tensor] = []

        def enter(tensor: Tensor, needs_grad: bool) -> Tensor:
            inbox = Inbox() if needs_grad and self._run.trains else None
            saved.inboxes.append(inbox)
            entered.append(tensor if inbox is None else enter_boundary(tensor, inbox))  # [1] no leaf, so in-place first operations work
            return entered[-1]

        value = wire.unpack(message, self.device, enter)
        return (value,), Writes(entered[i] for i in message.aliases) if message.aliases else None

    def _end(self, micro_batch: int, output: Any, feed: Feed, saved: _Saved) -> None:
        if self._run.kind == "predict":
            self.outputs[micro_batch] = _kept(output)
            return
        with saved.streams if saved.streams is not None and self._loss_draws and not self._draws else nullcontext():
            loss, count = loss_of(self.loss_fn, output, _on(feed.target, self.device))
        if count is not None and self._run.reduction != "sum":
            self._counts[micro_batch] = self._checked(count)
        else:
            loss = loss * feed.share
        if self._run.trains and not loss.requires_grad:
            raise PlanError("the loss has no graph, so nothing would be trained; it needs one to a parameter: do not detach it")
        if self._run.trains:
            saved.roots = [loss if self._run.scale == 1.0 else loss * self._run.scale]
            self._saved[micro_batch] = saved
        self._losses[micro_batch] = loss.detach()
        if len(self._losses) == len(self._run.feeds):  # known now, while most of the backward is still to come
            self.on_losses({m: (float(value), self._counts.get(m)) for m, value in self._losses.items()})

    def _checked(self, count: float) -> float:
        if self._run.reduction == "weight":
            raise PlanError("loss_fn returned (sum, count) and loss_weight is set; each gives what to divide by: leave loss_weight out")
        if len(self._losses) != len(self._counts):
            raise PlanError(
                "loss_fn returned (sum, count) for one micro-batch and a loss alone for another; it returns one form: choose one"
            )
        return count

    def _streams(self, micro_batch: int) -> rng.Streams | None:
        if not (self._draws or self._loss_draws):
            return None
        return rng.Streams(self._run.seed, self._run.call, micro_batch)


def _kept(output: Any) -> Any:
    """The output in tensors of its own: it may be a weight, or a buffer that the next micro-batch writes over."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)


def _on(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
