"""The controller: sends steps and commands to the workers, one message each, and settles them.

train --one command a worker--> workers: forwards, backwards, agree, optimizer
      <------- losses --------- (early: the tail of the backward goes on meanwhile)
next  <-------- done ---------- settles the step before: its failure, if any, is raised here
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from pipe.ambient import Ambient
from pipe.announce import logger
from pipe.arguments import check_call, check_grad_mode
from pipe.assembly import Assembly
from pipe.captured import bind
from pipe.cutting import Example
from pipe.errors import BatchError, PlanError, StageError
from pipe.logs import StepLog
from pipe.micro_batch import Batch, count_rows, cut
from pipe.model import Model
from pipe.optimizer import Shell
from pipe.passes import Pass, Pending, total_loss
from pipe.report import Report, advice
from pipe.scaling import LossScale
from pipe.settings import Settings
from pipe.stage import Feed, Run
from pipe.trace import Trace
from pipe.worker import Done, Step

_ADVICE_AFTER = 20  # steps


class Verifies(Protocol):
    """What the controller tells who verifies it; see verify.py."""

    def begin(self, controller: Controller, example: Any) -> None:
        """The workers have been made."""

    def told(self, name: str, payload: Any) -> None:
        """All workers get a command."""

    def trained(self, controller: Controller, asked: Pass, loss: float) -> None:
        """A pass of training has its loss."""

    def close(self) -> None:
        """The engine ends."""


class Controller:
    """One engine's workers, as they are told what to do."""

    def __init__(
        self, model: Model, assembly: Assembly, settings: Settings, example: Example | None, log: StepLog | None, *, quiet: bool = False
    ) -> None:
        """`quiet`: announces nothing, and leaves the user's model alone."""
        self.assembly = assembly
        self.verifier: Verifies | None = None
        self.stale = False  # the user's model has older weights than the stages
        self.closed = False
        self.broken: StageError | None = None
        self.shell: Callable[[], Shell | None] = lambda: None
        self.training: bool | None = None  # mode to set when the workers are made
        self._model = model
        self._settings = settings
        self._example = example
        self._log = log
        self._quiet = quiet
        self._planned = assembly.plan
        self._step = 0  # of training
        self._number = 0  # of everything that uses the transport
        self._pending: Pending | None = None
        self._last: tuple[Trace, int] | None = None  # and rows
        self._said: set[str] = set()
        self._trainable: dict[str, bool] = {}
        self._scale = LossScale() if settings.precision == "fp16" else None

    def train(self, asked: Pass) -> float:
        """The loss of a training pass, as soon as it is known.

        Raises:
            BatchError, PlanError, StageError: see Engine.train_step.
        """
        check_grad_mode()
        batch, ticket = self._start(asked)
        self._step += 1
        self._pending = pending = Pending(ticket, batch, self._step, asked.update is not None)
        self.stale = True
        try:
            losses = self.assembly.desk.early(ticket, self.assembly.loss_workers(len(batch.pieces)))
        except StageError as error:
            self._fail(error)
            raise
        pending.loss, told = total_loss(losses)
        if not told:  # nothing counts, which the workers refuse
            self.settle()
        if self.verifier is not None:
            self.verifier.trained(self, asked, pending.loss)
        return pending.loss

    def evaluate(self, asked: Pass) -> float:
        """The loss in eval mode, without gradients."""
        batch, ticket = self._start(asked)
        try:
            losses = dict(self.assembly.desk.early(ticket, self.assembly.loss_workers(len(batch.pieces))))
            self._keep(self.assembly.desk.done(ticket), batch)
        except StageError as error:
            self._fail(error)
            raise
        return total_loss(losses)[0]

    def predict(self, asked: Pass) -> Any:
        """The merged output in eval mode, without gradients."""
        batch, ticket = self._start(asked)
        try:
            done = self.assembly.desk.done(ticket)
        except StageError as error:
            self._fail(error)
            raise
        self._keep(done, batch)
        outputs = {m: value for each in done.values() for m, value in each.outputs.items()}
        return batch.merge([outputs[m] for m in sorted(outputs)])

    def ask(self, name: str, payload: Any) -> Mapping[int, Any]:
        """Every worker's answer to a command, after the step before is settled.

        Raises:
            StageError: a worker failed.
        """
        self.settle()
        self.ready()
        if name == "zero_grad":
            self._zeroed()
        if self.verifier is not None:
            self.verifier.told(name, payload)
        ticket = self.assembly.crew.tell(name, dict.fromkeys(sorted(self.assembly.workers), payload))
        try:
            return self.assembly.desk.done(ticket)
        except StageError as error:
            self._fail(error)
            raise

    def ask_one(self, worker: int, name: str, payload: Any) -> Any:
        """One worker's answer to a command.

        Raises:
            StageError: it failed.
        """
        ticket = self.assembly.crew.tell(name, {worker: payload})
        try:
            return self.assembly.desk.done(ticket)[worker]
        except StageError as error:
            self._fail(error)
            raise

    def has_weights(self) -> bool:
        """Whether the stages hold the weights; they are made where the user's model has none. The step before is settled."""
        self.settle()
        if not self._model.origin.is_own:
            self.ready()
        return self.assembly.built

    def position(self) -> dict[str, Any]:
        """Where training is, as a checkpoint keeps it: what keys the random streams, and the scale of the loss."""
        scale = None if self._scale is None else self._scale.state
        return {"step": self._step, "seed": self._settings.seed, "scale": scale}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._step = position["step"]
        self._settings = replace(self._settings, seed=position["seed"])
        if self._scale is not None and position["scale"] is not None:
            self._scale.state = tuple(position["scale"])

    def gather(self, what: str) -> dict[str, Any]:
        """What the workers of the first replica hold, by full name, in the model's order."""
        found = self.ask("collect", (self.number(), what))
        return self._model.in_order({name: value for w in range(self.assembly.plan.stages) for name, value in found[w].items()})

    def stepped(self) -> None:
        """After an optimizer's step, or one that was left out since a gradient was not finite."""
        if self._scale is not None and not self._scale.stepped():
            logger.info(f"a gradient was not finite: the step is left out, and the loss is scaled by {self._scale.value:g} from now on")

    def _zeroed(self) -> None:
        """Before the gradients are forgotten."""
        if self._scale is not None and not self._scale.zeroed():
            logger.info(f"a gradient was not finite: the loss is scaled by {self._scale.value:g} from now on")

    def number(self) -> int:
        """The number of the next pass or command that uses the transport."""
        self._number += 1
        return self._number

    def settle(self) -> None:
        """Waits for the tail of the step before, and logs it.

        Raises:
            StageError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            done = self.assembly.desk.done(pending.ticket)
        except StageError as error:
            self._fail(error)
            raise
        self._keep(done, pending.batch)
        if self._scale is not None:
            self._scale.passed(done[0].finite)
        if pending.updates:
            self.stepped()
        trace, rows = self.last()
        if self._log is not None:
            self._log.step(pending.step, pending.loss, rows, trace)
        if pending.step == _ADVICE_AFTER and self.assembly.plan.workers > 1:
            self.say(advice(Report.of(trace, self.assembly.plan.places, rows)))

    def last(self) -> tuple[Trace, int]:
        """The trace of the last pass, and the rows of its batch.

        Raises:
            PlanError: there has been none.
        """
        self.settle()
        if self._last is None:
            raise PlanError("there is no trace yet; each pass makes one: call train_step or predict first")
        return self._last

    def ready(self, batch: Example | None = None) -> None:
        """Makes the workers, if need be.

        Raises:
            PlanError: the engine is closed, or the model does not fit the plan.
            StageError: a worker is gone.
        """
        if self.broken is not None:
            raise StageError(self.broken.failure)
        if self.closed:
            raise PlanError("the engine is closed; it runs until close() or the end of its with block: make a new one")
        if self.assembly.built:
            return
        example = self._example or batch
        if example is not None and self.assembly.captures:
            example = (), bind(self._model.whole, *example)
        self.assembly.build(self.shell(), example, lambda example: self._cut(*example, None).pieces[0])
        if self.verifier is not None:
            self.verifier.begin(self, example)
        self._planned = self.assembly.plan
        self._trainable = {name: parameter.requires_grad for name, parameter in self._model.parameters}
        if not self._quiet:
            self._model.follow(lambda: self.stale, self._load)
        if self.training is not None:
            self.ask("mode", self.training)
        for line in self.assembly.announcement():
            self.say(line)

    @property
    def provisional(self) -> bool:
        """Whether an example is at hand to make the workers with, and they are not made yet."""
        return not self.assembly.built and self._example is not None and not self.closed

    def say(self, line: str) -> None:
        """Announces it, once."""
        if line not in self._said and not self._quiet:
            self._said.add(line)
            logger.info(line)

    def close(self) -> None:
        """Ends the workers."""
        self.closed = True
        if self.verifier is not None:
            self.verifier.close()
        self.assembly.close()
        if self._log is not None:
            self._log.close()

    @torch.inference_mode(False)  # what is copied here may be trained on later, though the caller infers
    def _start(self, asked: Pass) -> tuple[Batch, int]:
        """Cuts the batch and sends every worker its part of the pass; gives the ticket."""
        kwargs, target = dict(asked.kwargs), asked.target
        if self._settings.target_is_argument and target is not None:
            kwargs, target = {**kwargs, "target": target}, None
        check_call(self._model, self._settings, asked.args, target, kwargs, loss=asked.kind != "predict")
        args = asked.args
        if self.assembly.captures:
            args, kwargs = (), bind(self._model.whole, args, kwargs)
        if self._pending is None:
            self.ready((args, kwargs))
        if self.assembly.captures and self._model.captured is not None:
            self._model.captured.check(kwargs)
        batch = self._cut(args, kwargs, target)
        if asked.trains and batch.needs_grad:
            raise BatchError(
                f"{batch.needs_grad[0]!r} requires grad, and gradients of inputs do not come back from the stages: pass it with .detach()"
            )
        self.settle()  # cut meanwhile
        self.ready()
        self._follow_user(asked.trains)
        if self.assembly.captures and self._model.captured is not None:
            for piece in batch.pieces:
                self._model.captured.check_sizes(piece.kwargs)
        self._judge(batch)
        if asked.zero:
            self._zeroed()
        return batch, self.assembly.crew.tell("step", self._steps(asked, batch))

    def _steps(self, asked: Pass, batch: Batch) -> dict[int, Step]:
        """Every worker's part of the pass."""
        feeds = [Feed(p.args, p.kwargs, p.target, share) for p, share in zip(batch.pieces, self._settings.shares(batch))]
        number = self.number()
        call = self._step if asked.trains else -number
        scale = self._scale.value if self._scale is not None and asked.trains else 1.0
        ambient = Ambient.capture(self._settings.precision)
        base = Run(asked.kind, {}, self._settings.seed, call, self._settings.reduction, scale, ambient)
        began, steps = time.perf_counter(), {}
        for w in sorted(self.assembly.workers):
            runs = {s: replace(base, feeds=own) for s, own in self.assembly.feeds(w, feeds, asked.kind).items()}
            clock = began + self.assembly.crew.offsets[w]
            steps[w] = Step(number, len(feeds), runs, asked.kind, clock, asked.zero, asked.update, scale)
        return steps

    def _cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Batch:
        """The batch in the plan's micro-batches, or in fewer where a micro-batch would have too few rows."""
        pieces, least = self._planned.micro_batches * self._planned.replicas, self._settings.least_rows
        how: Any = {"batch_dim": self._settings.batch_dim, "names": self._model.forward_names}
        if least > 1:
            pieces = max(1, min(pieces, count_rows(args, kwargs, **how) // least))
        return cut(args, kwargs, target, pieces=pieces, **how)

    def _load(self, state: dict[str, Any]) -> None:
        if not self.closed:
            self.ask("load", state)
            self._model.written()

    def _follow_user(self, trains: bool) -> None:
        """What the user froze or unfroze in the model since, the stages freeze, too; what was written there, they do not see."""
        trainable = {name: parameter.requires_grad for name, parameter in self._model.parameters}
        if trainable != self._trainable:
            self.ask("freeze", trainable)
            self._trainable = trainable
        if trains and (name := self._model.written()):
            self.say(
                f"{name} of the model was written to in place, and the stages train their own copies: "
                "load it with engine.load_state_dict(), or change the model before the first step"
            )

    def _judge(self, batch: Batch) -> None:
        """Says, once, where a pipeline cannot help since the batch stays whole, and notes it in the plan."""
        plan = self._planned
        if not self._settings.auto or plan.strategy != "pipeline":
            return
        if len(batch.pieces) == 1:
            why = batch.why_whole or ("it has one row" if batch.size == 1 else "micro_batches=1")
            reason = f"the batch cannot be cut, since {why}; stages work one after the other"
            plan = replace(plan, strategy="naive", micro_batches=1, reason=reason)
        if plan != self.assembly.plan:
            self.assembly.plan = plan
            self.say(str(plan))

    def _keep(self, done: Mapping[int, Done], batch: Batch) -> None:
        workers = sorted(done)
        trace = Trace(
            events=tuple(event for w in workers for event in done[w].events),
            workers=len(workers),
            clock=done[workers[0]].clock,
            plan=self.assembly.plan_facts(),
            step=self._step,
            peak_bytes=tuple(done[w].peak_bytes for w in workers),
            sent_bytes=tuple(done[w].sent_bytes for w in workers),
        )
        self._last = (trace, batch.size)

    def _fail(self, error: StageError) -> None:
        """Nobody waits on for what will not come; a lost worker ends the engine."""
        self._pending = None
        self.assembly.crew.abort(self._number, str(error.failure))
        if error.failure.kind.endswith("PeerLost"):
            self.broken = error
