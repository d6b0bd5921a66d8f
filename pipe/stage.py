"""A stage: a module on a device, and what its forwards saved for their backwards.

It knows nothing of neighbours, schedules or transports.

    message --unpack--> Boundary [1] --> module --> output --pack--> message        (forward)
    gradients <--inbox-- Boundary <----- module <-- roots <-------- gradients        (backward)

A value goes from the stage that makes it straight to each that takes it. Its gradient comes back through these, from the last to the
first: each begins its own sum with what has come, which is the order of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipe import rng, wire
from pipe.action import Route
from pipe.aliases import Shared, Writes, moved
from pipe.ambient import Ambient
from pipe.batch_norm import PooledStatistics
from pipe.boundary import Inbox, enter_boundary
from pipe.bundle import Bundle
from pipe.errors import PipeError, PlanError
from pipe.loss import LossFn, loss_draws, loss_of, on_device
from pipe.partition.exported import place
from pipe.partition.sequence import Chain
from pipe.tied import tied_in
from pipe.wire import Message

Part = tuple[float, float | None]  # of a micro-batch: its part of the mini-batch's loss, or (sum, count)


@dataclass(frozen=True)
class Feed:
    """What the controller gives a stage for one micro-batch. Tensors are (micro-batch, *features)."""

    args: tuple[Any, ...] = ()  # of the first stage
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # those this stage's forward names
    target: Any = None  # of the last stage
    share: float = 1.0  # of this micro-batch's loss in the loss of the mini-batch
    shared: Shared = ()  # those of these tensors that later stages are given, too


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


@dataclass(frozen=True)
class _Value:
    """What a forward took from another stage, or gave to others."""

    source: int | None  # where its gradient goes; None: it was made here
    taker: int | None  # where its gradient comes from; None: no stage after this one takes it
    tensors: list[Tensor]
    inboxes: list[Inbox | None] = field(default_factory=list)


@dataclass
class _Saved:
    """What one forward keeps for its backward."""

    streams: rng.Streams | None
    values: list[_Value] = field(default_factory=list)  # in the order of the plan's routes
    loss: Tensor | None = None  # on the last stage


class Stage:
    """Forward and backward of consecutive layers."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: str,
        *,
        last: bool,
        loss_fn: LossFn | None = None,
        routes: Sequence[Route] = (),
        shared: Collection[str] = (),
    ) -> None:
        """Takes the module as it is, but for its device.

        Args:
            module: takes the values that routes bring, one after the other behind its other positional arguments, and gives those that
                routes take from here: one as it is, several as a tuple.
            routes: of all values that cross between stages.
            shared: modules in it that other stages call, too.
        """
        self.index = index
        self._taken = [route for route in routes if index in route[1:]]
        self._given = [route for route in routes if index == route[0]]
        self._shared = shared
        self.device = torch.device(device)
        self.module = module.to(self.device)
        if self.device.type != "cpu":
            place(self.module, self.device)
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

    def forward(self, micro_batch: int, arg: Mapping[int, Bundle]) -> Mapping[int, Bundle]:
        """What each later stage takes of this one; nothing from the last stage, which keeps its loss or its output.

        `arg`: what stages before gave, by stage; the model's own inputs are in this stage's feed.
        """
        feed, writes = self._run.feeds.get(micro_batch, Feed()), Writes(self.index, self.module)
        drawn = arg[self.index - 1].drawn if self.index else {}
        saved = _Saved(self._streams(micro_batch, drawn))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._run.trains))
            stack.enter_context(self._run.ambient.forward(self.device.type))
            if saved.streams is not None and self._draws:
                stack.enter_context(saved.streams)
                if isinstance(self.module, Chain):
                    self.module.surround(saved.streams.at)
            values = self._enter(arg, saved, writes)
            args, kwargs, shared = moved((feed.args, dict(feed.kwargs), feed.shared), self.device)
            for tensor, last in shared:
                writes.enter([tensor], last=last)
            writes.tied(tied_in(self.module))
            output = self.module(*args, *values, **kwargs)
            writes.check()
            if self.last:
                self._end(micro_batch, output, feed, saved)
                writes.check()  # loss_fn may write, too
        if self._run.trains:
            self._saved[micro_batch] = saved
        if self.last:
            return {}
        if saved.streams is not None:
            drawn = {**drawn, **saved.streams.drawn(self._shared)}
        bundles = self._give(output, saved, drawn)
        return writes.marked(bundles, self._given, [value.tensors for value in saved.values if value.source is None])

    def backward(self, micro_batch: int, arg: Mapping[int, Message]) -> Mapping[int, Message]:
        """The gradients of what was taken from other stages, by stage and in the order of the plan's routes.

        `arg`: the gradients of what was given, and of what later stages took, too. Weights' gradients are added to `.grad`. A tensor that
        got no gradient gives None, as in plain autograd. Frees what `forward` saved for this micro-batch.

        Raises:
            PipeError: no forward of this micro-batch is saved.
        """
        saved = self._saved.pop(micro_batch, None)
        if saved is None:
            raise PipeError(
                f"no forward of micro-batch {micro_batch} is saved on stage {self.index}; each backward follows its own forward, once"
            )
        wanted = self._wanted(saved, arg)
        if wanted:
            with ExitStack() as stack:
                if saved.streams is not None:
                    stack.enter_context(saved.streams)
                torch.autograd.backward([r for r, _ in wanted], [g for _, g in wanted])
        gradients: dict[int, list[Tensor | None]] = {self.index - 1: []} if self.index else {}
        for value in saved.values:
            if value.source is not None:
                gradients.setdefault(value.source, []).extend(None if inbox is None else inbox.gradient for inbox in value.inboxes)
        return {s: wire.pack_list(found) for s, found in gradients.items()}

    def _wanted(self, saved: _Saved, arg: Mapping[int, Message]) -> list[tuple[Tensor, Tensor | None]]:
        """Where a backward begins, each with the gradient that has come."""
        if saved.loss is not None:
            return [(saved.loss, None)] if saved.loss.requires_grad else []
        come = {s: iter(wire.unpack_list(message, self.device)) for s, message in arg.items()}
        pairs = [(root, next(come[value.taker])) for value in saved.values if value.taker is not None for root in value.tensors]
        return [(root, gradient) for root, gradient in pairs if root.requires_grad and gradient is not None]

    def _enter(self, arg: Mapping[int, Bundle], saved: _Saved, writes: Writes) -> list[Any]:
        """The values as the module's arguments; tensors that must not be written to are watched."""
        messages = {s: iter(bundle.messages) for s, bundle in arg.items()}
        found = []
        for route in self._taken:
            message, at = next(messages[route[0]]), route.index(self.index)
            value = _Value(route[at - 1], route[at + 1] if at + 1 < len(route) else None, [])
            found.append(wire.unpack(message, self.device, partial(self._enter_tensor, value)))
            saved.values.append(value)
            writes.enter(value.tensors, message.aliases, last=route[-1])
        return found

    def _enter_tensor(self, value: _Value, tensor: Tensor, needs_grad: bool) -> Tensor:
        inbox = Inbox() if needs_grad and self._run.trains else None
        value.inboxes.append(inbox)
        value.tensors.append(tensor if inbox is None else enter_boundary(tensor, inbox))  # [1] no leaf, so in-place first operations work
        return value.tensors[-1]

    def _give(self, output: Any, saved: _Saved, drawn: Mapping[str, int]) -> Mapping[int, Bundle]:
        """The bundles for later stages; what the values hold is saved as the roots of the backward."""
        values = [output] if len(self._given) == 1 else list(output)
        taken_out = [wire.take_out(value) for value in values]
        messages = wire.pack_all(taken_out)
        saved.values += [_Value(None, route[1], tensors) for route, (_, tensors) in zip(self._given, taken_out)]
        bundles = {self.index + 1: Bundle((), drawn)}  # the next one gets one in any case
        for s in {s for route in self._given for s in route[1:]}:
            own = tuple(message for route, message in zip(self._given, messages) if s in route)
            bundles[s] = replace(bundles.get(s, Bundle()), messages=own)
        return bundles

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
            saved.loss = loss if self._run.scale == 1.0 else loss * self._run.scale
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

    def _streams(self, micro_batch: int, drawn: Mapping[str, int]) -> rng.Streams | None:
        if not (self._draws or self._loss_draws):
            return None
        return rng.Streams(self._run.seed, self._run.call, micro_batch, drawn)


def _kept(output: Any) -> Any:
    """The output in tensors of its own: it may be a weight, or a buffer that the next micro-batch writes over."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)


def _on(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
