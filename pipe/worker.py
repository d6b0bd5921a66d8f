"""A worker: its stages, its part of the optimizer, and the commands of the controller, obeyed one after another.

controller --command--> worker --early: losses--> controller        while the backward goes on
                               --done: events --> controller
                               --failed: where--> controller        and abort to the other workers
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipe.action import Action, Op, Schedule
from pipe.blueprint import Build, Built
from pipe.boundary import check_device_copy
from pipe.checkpoint import Loading, Saved, Saving, part_of, save_part
from pipe.clock import Clock, WallClock
from pipe.clock_cuda import CudaClock
from pipe.copying import load_module
from pipe.errors import Aborted, Failure, PlanError, StageError
from pipe.failing import failure_of
from pipe.loop import run_order
from pipe.memory import PeakMemory
from pipe.optimizer import apply_groups, state_on
from pipe.plan import Plan
from pipe.replicas import Replicas
from pipe.scaling import Accumulated, finite
from pipe.stage import Run, Stage
from pipe.tied import SharedBuffers, TiedWeights
from pipe.trace import Event
from pipe.transport.deferred import Deferred
from pipe.transport.protocol import Transport
from pipe.update import Update, Vote, agree, clip, judge, step

Early = Callable[[Any], None]  # sends a command's first answer before its last
Answer = Callable[[int, str, Any], None]  # ticket, "early" | "done" | "failed", value


@dataclass(frozen=True)
class Step:
    """One pass over a mini-batch, for one worker."""

    number: int  # of this pass, over all kinds
    pieces: int  # micro-batches over all replicas
    runs: Mapping[int, Run]  # by stage
    kind: str
    began: float  # by this worker's clock
    zero: bool = False
    update: Update | None = None
    scale: float = 1.0  # of the loss


@dataclass(frozen=True)
class Done:
    """What a worker tells at the end of a pass."""

    clock: str
    events: tuple[Event, ...]
    sent_bytes: int
    peak_bytes: int
    outputs: Mapping[int, Any]  # by micro-batch; of a predict, from the last stage
    finite: bool = True  # all workers' gradients, where the loss is scaled


class Worker:
    """Obeys; each method without an underscore is a command."""

    def __init__(self, index: int, transport: Transport, answer: Answer) -> None:
        self.index = index
        self.transport = transport
        self.doing: tuple[str, float] | None = None  # what, and since when by time.monotonic
        self._answer = answer
        self._stages: dict[int, Stage] = {}
        self._accumulated = Accumulated()
        self._counted = False  # the loss function gives (sum, count)
        self._passes = 0  # of training, since the last zero_grad
        self._finite = True  # gradients since the last zero_grad

    def obey(self, ticket: int, name: str, payload: Callable[[], Any]) -> None:
        """Does a command and answers it, with a Failure if it raised, or if its payload could not be read."""
        try:
            with self._placed(name.replace("_", " ")):
                value = getattr(self, name)(payload(), lambda early: self._answer(ticket, "early", early))
        except Aborted as error:
            self._answer(ticket, "failed", self.failure(name, error))
        except StageError as error:
            self._answer(ticket, "failed", error.failure)
        else:
            self._answer(ticket, "done", value)

    def build(self, order: Build, early: Early) -> Built:
        """Builds its stages on the device, and its part of the optimizer."""
        device = order.seat.device()
        check_device_copy(device)
        if device != "cpu":
            torch.cuda.set_device(device)  # of this thread
            self.transport = Deferred(self.transport)
        self._names = order.names
        self._memory = PeakMemory(torch.device(device))
        loss_fn = load_module(order.loss_fn) if isinstance(order.loss_fn, bytes) else order.loss_fn
        for index, blueprint in order.blueprints.items():
            module, state = blueprint.build()
            last = index == order.plan.stages - 1
            self._stages[index] = Stage(
                index, module, device, last=last, loss_fn=loss_fn, routes=order.plan.values, shared=order.shared_modules
            )
        held = {n: p for stage in self._stages.values() for n, p in stage.module.named_parameters(remove_duplicate=False)}
        self._tied = TiedWeights(order.ties, held, self.index, order.plan.stages)
        self._buffers = SharedBuffers(order.shared_buffers, {s: stage.module for s, stage in self._stages.items()})
        self._parameters = self._tied.owned(held, order.names)
        self._all = {**self._parameters, **self._tied.borrowed}
        self._copies = self._copied_from_others(order)
        self._shell = order.shell
        self._optimizer = order.shell.build(self._parameters) if order.shell is not None else None
        return Built(socket.gethostname(), device, state)

    def join(self, plan: Plan, early: Early) -> None:
        """Takes the plan in its last form; joins the other replicas, at the same time on all workers."""
        self.plan = plan
        self._replicas = Replicas(plan, self.index, next(iter(self._stages.values())).device)

    def step(self, order: Step, early: Early) -> Done:
        """One pass: forwards, and for "train" backwards and, if the order says so, the optimizer's step on all workers or on none."""
        self.doing = None  # waiting for another worker is not doing
        schedule = self.plan.order(order.pieces)
        schedule = schedule if order.kind == "train" else schedule.forwards()
        self.transport.begin(order.number, schedule)
        clock = self._clock(order.began)
        try:
            with ExitStack() as stack:
                self._memory.begin()
                for index, run in order.runs.items():
                    run.ambient.apply()
                    self._stages[index].on_losses = early
                    stack.enter_context(self._stages[index].running(run))
                if order.zero:
                    self.zero_grad(True, early)
                self._replicas.begin(self._parameters, order.kind)
                if order.kind == "train" and (self._counted or order.scale != 1.0):
                    self._accumulated.set_aside(self._all.values())
                events = run_order(self.index, schedule, self._stages, self.transport, clock, self._action)
                self._buffers.check()
                outputs = {m: value for stage in self._stages.values() for m, value in stage.outputs.items()}
                if order.kind == "train":
                    events += self._commit(order, clock)
                self.transport.finish()
        except BaseException as error:
            if not isinstance(error, Aborted):
                self.transport.abort(str(error))
            if order.kind == "train":
                self.zero_grad(True, early)  # half a gradient is worse than none
            raise
        return Done(clock.name, tuple(events), self.transport.sent_bytes, self._memory.peak(), outputs, self._finite)

    def optimizer_step(self, order: tuple[int, Update], early: Early) -> None:
        """Takes over the front's groups and steps, all workers or none; none if a gradient is not finite."""
        number, update = order
        self.transport.begin(number, Schedule(()))
        self._agree(Vote())
        self._update(update)

    def clip_grad_norm(self, order: tuple[int, float, float], early: Early) -> float:
        """Scales the gradients by the norm over all workers, and gives the norm."""
        number, max_norm, norm_type = order
        self.transport.begin(number, Schedule(()))
        self._reduce()
        return clip(self.transport, self.index, self.plan, self._parameters, self._names, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool, early: Early) -> None:
        """Forgets the gradients, or sets those that are there to zero."""
        self._accumulated.drop()
        self._finite, self._passes = True, 0
        for parameter in self._all.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)
        self._replicas.forget()

    def freeze(self, trainable: Mapping[str, bool], early: Early) -> None:
        """Sets which parameters require a gradient, by full name."""
        for name, parameter in self._all.items():
            parameter.requires_grad_(trainable[name])

    def mode(self, training: bool, early: Early) -> None:
        """Train or eval mode on every module."""
        for stage in self._stages.values():
            stage.module.train(training)

    def collect(self, order: tuple[int, str], early: Early) -> dict[str, Any]:
        """Copies by full name, on the CPU: "state" (state_dict), "tensors" (parameters and all buffers), "gradients", "optimizer"."""
        number, what = order
        if what == "gradients":
            self.transport.begin(number, Schedule(()))
            self._reduce()
            return {name: None if p.grad is None else _copied(p.grad) for name, p in self._parameters.items()}
        found: dict[str, Any] = {}
        for stage in self._stages.values():
            module = stage.module
            if what == "state":
                found |= module.state_dict()
            elif what == "tensors":
                found |= dict(_tensors(module))
        if what == "optimizer" and self._optimizer is not None:
            state = self._optimizer.state
            found = {name: {k: _copied(v) for k, v in state[p].items()} for name, p in self._parameters.items() if p in state}
        return {name: _copied(value) for name, value in found.items()}

    def load(self, state: Mapping[str, Any], early: Early) -> None:
        """Takes over values of the state_dict's keys that this worker holds; shapes have been checked."""
        for stage in self._stages.values():
            own = stage.module.state_dict().keys()
            stage.module.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
        self._buffers.settled()

    def idle(self, nothing: None, early: Early) -> None:
        """Does nothing: its answer tells that what was told before is done."""

    def save(self, order: Saving, early: Early) -> Saved:
        """Writes its part of a checkpoint, or gives it; the first replica's does for all."""
        if self.index >= self.plan.stages:
            return Saved()
        state = self._optimizer.state if self._optimizer is not None else {}
        modules = [stage.module for stage in self._stages.values()]
        return save_part(order, self.index, part_of(modules, self._copies, self._parameters, state))

    def restore(self, order: Loading, early: Early) -> tuple[list[str], list[str]] | None:
        """Takes over its part of a checkpoint; where its host does not see that, gives the names that it needs, of weights and state."""
        names = [name for stage in self._stages.values() for name in stage.module.state_dict()]
        if not order.is_here:
            return names, list(self._parameters)
        self.load(order.weights(names), early)
        self.load_optimizer(order.state(self._parameters), early)
        return None

    def load_optimizer(self, state: Mapping[str, Mapping[str, Any]], early: Early) -> None:
        """Takes over the optimizer's state of the parameters that this worker holds; an empty one is forgotten."""
        if self._optimizer is not None:
            held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
            for name, parameter in self._parameters.items():
                if name in state:
                    self._optimizer.state.pop(parameter, None)
                    if state[name] and id(parameter) in held:
                        self._optimizer.state[parameter] = state_on(state[name], parameter)

    def _copied_from_others(self, order: Build) -> list[int]:
        """Ids of the tensors that other workers own."""
        ties = [tie for tie in (*order.ties, *order.shared_buffers) if tie.owner not in self._stages]
        held = {s: dict(_tensors(stage.module)) for s, stage in self._stages.items()}
        return [id(own[tie.names[s]]) for tie in ties for s, own in held.items() if s in tie.names]

    def _clock(self, began: float) -> Clock:
        device = self._memory.device
        return CudaClock(began, device) if device.type == "cuda" else WallClock(began)

    def _commit(self, order: Step, clock: Clock) -> list[Event]:
        """What lasts of a training pass, once every worker has done its part: gradients in their final scale, BatchNorm's statistics,
        and the optimizer's step."""
        counts = [stage.count for stage in self._stages.values() if stage.count is not None]
        is_finite = order.scale == 1.0 or finite(self._all.values())
        verdict = self._agree(Vote(sum(counts) if counts else None, is_finite))
        self._counted = verdict.count is not None
        self._finite = self._finite and verdict.finite
        if self._counted and self._passes and not self._accumulated.aside:
            raise PlanError(
                "loss_fn returned (sum, count), and a loss alone in an earlier pass whose gradients are still there; what is added up has "
                "one form: choose one, or call zero_grad() between"
            )
        self._passes += 1
        if self._counted or self._accumulated.aside:
            self._accumulated.join(self._all.values(), 1.0 / (order.scale * (verdict.count or 1.0)))
        for stage in self._stages.values():
            stage.statistics.apply(self._replicas.sum_moments(stage.statistics))
        if order.update is None:
            return []
        start = clock.mark()
        self._update(order.update)
        action = Action(Op.OPTIMIZER, 0, min(self._stages, default=0))
        return [Event(action, self.index, clock.seconds(start), clock.seconds(clock.mark()))]

    def _agree(self, vote: Vote) -> Vote:
        """Waits until no worker can fail any more; before the replicas' sums, which would wait for ever for one that has."""
        verdict: Vote = agree(self.transport, self.index, self.plan.workers, vote, judge)
        return verdict

    def _reduce(self) -> None:
        """Sums what belongs together: the gradients of tied weights, then those of replicas."""
        self._tied.gather(self.transport)
        self._replicas.reduce(self._parameters)

    def _update(self, update: Update) -> None:
        self._reduce()
        if not self._finite:
            return
        if self._optimizer is not None:
            apply_groups(self._optimizer, update.groups, self._parameters)
        elif self._shell is not None:  # it held no parameter of this worker so far
            self._optimizer = replace(self._shell, groups=update.groups).build(self._parameters)
        step(self.transport, self.index, self.plan, self._parameters, self._names, update, self._optimizer)
        self._tied.spread(self.transport)

    def _action(self, action: Action) -> Any:
        return self._placed(str(action), action)

    @contextmanager
    def _placed(self, where: str, action: Action | None = None) -> Iterator[None]:
        """An error from inside says where; meanwhile `doing` tells a watcher."""
        self.doing = (where, time.monotonic())
        try:
            yield
        except (Aborted, StageError):
            raise
        except BaseException as error:
            raise StageError(self.failure(where, error, action)) from error
        finally:
            self.doing = None

    def failure(self, where: str, error: BaseException, action: Action | None = None) -> Failure:
        """An error of this worker as data."""
        module = self._stages[action.stage].module if action is not None and action.op is Op.F else None
        return failure_of(error, where, self.index, action, getattr(module, "current", None))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
