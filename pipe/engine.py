"""Engine: what a user holds. A single-process training script calls it; it runs the stages.

    train_step --one command a worker--> workers: forwards, backwards, agree, optimizer
               <-------- losses -------- (early: the tail of the backward goes on meanwhile)
    next call  <--------- done --------- settles the step before: its failure, if any, is raised here
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipe import session
from pipe.ambient import Ambient
from pipe.assembly import Assembly
from pipe.errors import BatchError, OptimizerError, PlanError, StageError
from pipe.fit import EpochResult
from pipe.fit import fit as run_fit
from pipe.logs import StepLog
from pipe.loss import LossFn
from pipe.micro_batch import Batch, BatchDim, cut
from pipe.model import Model
from pipe.optimizer import Front
from pipe.options import merge
from pipe.partition.spec import Layer
from pipe.plan import Plan, Wish, decide
from pipe.report import Report, advice
from pipe.stage import Feed, Run
from pipe.trace import Trace
from pipe.update import Update
from pipe.worker import Done, Step

logger = logging.getLogger("pipe")


class _Stderr(logging.Handler):
    """To what sys.stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"pipe: {record.getMessage()}", file=sys.stderr, flush=True)


def _be_heard() -> None:
    """What is announced reaches the user also where the script configures no logging."""
    if not logger.hasHandlers():
        logger.addHandler(_Stderr())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_open: weakref.WeakSet[Engine] = weakref.WeakSet()
_ADVICE_AFTER = 20  # steps
OptimizerLike = torch.optim.Optimizer | Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None


class Engine:
    """Trains a model in stages.

    Gradients and losses are those of the same micro-batches one after the other in one process (DESIGN: bit for bit on one
    kind of CPU). Use it as a context manager, or call `close()` at the end, which writes the weights back into the model.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Layer],
        optimizer: OptimizerLike,
        loss_fn: LossFn | None = None,
        *,
        stages: int | None = None,
        stages_per_worker: int | None = None,
        replicas: int | None = None,
        micro_batches: int | None = None,
        schedule: Any = None,
        strategy: str | None = None,
        split: object = "auto",
        example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
        batch_dim: BatchDim = 0,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: Callable[[Any], float] | None = None,
        recompute: object = "never",
        precision: str = "fp32",
        wire_dtype: str | None = None,
        offload: str | None = None,
        weights: object = None,
        device: str | None = None,
        memory: str | int | None = None,
        timeout: float | None = None,
        max_grad_norm: float | None = None,
        seed: int | None = None,
        logdir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Checks what was asked; the workers are made at the first use.

        Args:
            model: an nn.Sequential, a list of modules or of LayerSpec, which can be cut; another module runs whole.
            optimizer: over the model's parameters, or a callable from (full name, parameter) pairs to one; None: no training.
            loss_fn: (output, target) -> 0-dim loss; None: the model returns it.
            stages, replicas, micro_batches, schedule, strategy, device, timeout, logdir: pipe-launch's flags win over these.
            example: (args, kwargs) to measure the layers with before the first batch.
            loss_weight: target -> number, in place of the rows of a micro-batch (say its valid tokens): exact token means.
            timeout: seconds that one action, or one wait for a message, may take; 0: for ever; None: 1800.
            max_grad_norm: clip to it inside train_step.

        Raises:
            PlanError: it cannot be met, with the remedy.
            OptimizerError: the optimizer cannot be carried to the stages.
        """
        _be_heard()
        _refuse_unknown(loss_reduction, recompute, precision, wire_dtype, offload, weights, memory)
        self._session = session.current()
        if self._session is not None:
            self._session.used = True
        options = merge(
            self._session,
            {
                "stages": stages,
                "replicas": replicas,
                "micro_batches": micro_batches,
                "schedule": schedule,
                "strategy": strategy,
                "device": device,
                "timeout": timeout,
                "logdir": logdir,
            },
        )
        self._model = Model(model)
        wish = Wish(options.stages, stages_per_worker, options.replicas, options.micro_batches, options.schedule, options.strategy)
        layers = len(self._model.layers) if self._model.layers is not None else None
        self._plan = decide(wish, layers=layers, why_uncut=self._model.why_uncut, world=options.world)
        self._wish = wish
        self._assembly = Assembly(self._model, self._plan, options, split, loss_fn)
        self._loss_fn = loss_fn
        self._example = example
        self._batch_dim = batch_dim
        self._mean = loss_reduction == "mean"
        self._loss_weight = loss_weight
        self._precision = precision
        self._max_grad_norm = max_grad_norm
        self._seed = torch.initial_seed() if seed is None else seed
        self._front = self._make_front(optimizer)
        self._step = 0  # of train_step and forward_backward
        self._number = 0  # of everything that uses the transport
        self._steps_taken = 0
        self._pending: _Pending | None = None
        self._last: tuple[Trace, int] | None = None  # trace and rows
        self._stale = False
        self._closed = False
        self._broken: StageError | None = None
        self._log = StepLog(options.logdir) if options.logdir is not None else None
        self._said: set[str] = set()
        self._training: bool | None = None
        if self._has_weights:
            self._model.warn_when_used(lambda: self._stale)
        _open.add(self)

    # --- training ---

    def train_step(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """The loss of the mini-batch; zeroes the gradients, runs forward and backward, clips, and steps the optimizer.

        Returns as soon as the loss is known. All workers take the optimizer's step, or none does.

        Raises:
            BatchError: the batch cannot be cut.
            StageError: a stage raised, in this step or in the tail of the one before; the step's gradients are dropped.
        """
        front = self._need_front("train_step")
        loss = self._run_training(args, target, kwargs, zero=True, update=Update(front.groups(), self._max_grad_norm))
        front.stepped()
        return loss

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """The loss of the mini-batch; adds to the gradients, never zeroes them.

        Raises:
            BatchError, StageError: as train_step. After a failure all gradients are dropped: half a gradient is worse than none.
        """
        return self._run_training(args, target, kwargs, zero=False, update=None)

    def optimizer_step(self) -> None:
        """Steps the optimizer on all workers with the gradients that they hold; same as `engine.optimizer.step()`."""
        self._need_front("optimizer_step").optimizer.step()

    def zero_grad(self) -> None:
        """Forgets all gradients; same as `engine.optimizer.zero_grad()`."""
        if self._front is not None:
            self._front.optimizer.zero_grad()
        else:
            self._zero_workers()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """The norm of all gradients over all stages, which are then scaled so that it is at most `max_norm`."""
        self._settle()
        self._ready()
        self._number += 1
        norms = self._ask("clip_grad_norm", (self._number, float(max_norm), float(norm_type)))
        norm: float = norms[0]
        return norm

    def train(self, mode: bool = True) -> Engine:
        """Sets train mode (or eval mode) on every module of every stage, for forward_backward and train_step."""
        self._settle()
        self._training = mode
        if self._assembly.built:
            self._ask("mode", mode)
        return self

    def eval(self) -> Engine:
        """Sets eval mode on every stage; stays until `train()`."""
        return self.train(False)

    # --- evaluation ---

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, merged on the controller, on the input's device; eval mode, no gradients.

        Tensors are concatenated on the batch dimension, 0-dim tensors averaged by rows, equal other values given once, else listed.
        """
        batch, _, done = self._run_evaluation(args, None, kwargs, "predict")
        outputs = {m: value for each in done.values() for m, value in each.outputs.items()}
        device = next((t.device for t in _tensors((args, kwargs))), torch.device("cpu"))
        return _on(batch.merge([outputs[m] for m in sorted(outputs)]), device)

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """The loss of the batch in eval mode, without gradients."""
        return self._run_evaluation(args, target, kwargs, "eval")[1]

    def fit(self, loader: Any, epochs: int = 1, **options: Any) -> list[EpochResult]:
        """Trains for some epochs; one result an epoch. Options: see `pipe.fit.fit`."""
        return run_fit(self, loader, epochs, **options)

    # --- state ---

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; its groups are the source of truth, and schedulers attach here."""
        return self._need_front("optimizer").optimizer

    def state_dict(self) -> dict[str, Any]:
        """The unsplit model's state_dict, from the stages, on the CPU."""
        if self._unbuilt_module:
            return dict(self._model.whole.state_dict())
        return self._gather("state")

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads weights under the unsplit model's names; gives (missing_keys, unexpected_keys).

        Raises:
            RuntimeError: as nn.Module's: missing or unexpected keys where strict, or a shape that differs.
        """
        if self._unbuilt_module:
            return self._model.whole.load_state_dict(state, strict=strict)
        own = self.state_dict()
        missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
        wrong = [
            f"size mismatch for {k}: the checkpoint has {tuple(state[k].shape)}, the model {tuple(v.shape)}"
            for k, v in own.items()
            if k in state and isinstance(v, Tensor) and state[k].shape != v.shape
        ]
        if wrong or (strict and (missing or unexpected)):
            found = wrong + ([f"missing keys: {missing}", f"unexpected keys: {unexpected}"] if strict else [])
            raise RuntimeError("the state_dict does not fit the model: " + "; ".join(found))
        self._ask("load", {k: v for k, v in state.items() if k in own})
        self._stale = True
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def optimizer_state_dict(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by full parameter name, from the stages, on the CPU."""
        self._need_front("optimizer_state_dict")
        return self._gather("optimizer")

    def load_optimizer_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads what `optimizer_state_dict` gave, at any number of stages.

        Raises:
            OptimizerError: a name that is not a parameter of the model.
        """
        self._need_front("load_optimizer_state_dict")
        unknown = [name for name in state if name not in self._model.names]
        if unknown:
            raise OptimizerError(f"{unknown[0]!r} is no parameter of the model; the state is by full parameter name: see engine.optimizer_state_dict()")
        self._ready()
        self._ask("load_optimizer", dict(state))

    def gradients(self) -> dict[str, Tensor | None]:
        """Each parameter's gradient by full name, on the CPU; None where it has none."""
        found = self._gather("gradients")
        return {name: found.get(name) for name in self._model.names}

    def sync_model(self) -> None:
        """Writes weights and buffers back into the user's model.

        Raises:
            PlanError: the model was given as LayerSpecs, so there is none to write to.
        """
        if not self._has_weights:
            raise PlanError("sync_model has no model to write to, since layers were given as LayerSpec; use engine.state_dict()")
        if self._unbuilt_module:
            return
        self._model.write(self._gather("tensors"))
        self._stale = False

    @property
    def plan(self) -> Plan:
        """What was chosen, and why. Before the first batch an automatic cut is provisional, by parameter bytes."""
        if not self._assembly.built and self._example is not None and not self._closed:
            self._ready()
        return self._assembly.plan

    @property
    def trace(self) -> Trace:
        """The trace of the last train_step, forward_backward, eval_step or predict.

        Raises:
            PlanError: there has been none.
        """
        self._settle()
        if self._last is None:
            raise PlanError("there is no trace yet; one is made by each step: call train_step first")
        return self._last[0]

    def report(self) -> Report:
        """Step time, bubble, and per worker busy, wait, bytes and peak memory of the last step; `str()` is a table."""
        trace = self.trace
        assert self._last is not None
        return Report.of(trace, self.plan.places, self._last[1])

    # --- the end ---

    def close(self) -> None:
        """Settles the last step, writes the weights back where the model has real ones, and ends the workers.

        Raises:
            StageError: the tail of the last step failed.
        """
        self._close(raises=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(raises=kind is None)

    # --- how ---

    @property
    def _has_weights(self) -> bool:
        return not self._model.has_specs

    @property
    def _unbuilt_module(self) -> bool:
        """Whether the user's model itself still holds the truth."""
        self._settle()
        if not self._assembly.built and not self._has_weights:
            self._ready()
        return not self._assembly.built

    def _make_front(self, optimizer: OptimizerLike) -> Front | None:
        if optimizer is None:
            return None
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(list(self._model.parameters))
        names = {id(p): name for name, p in self._model.parameters}
        return Front(optimizer, names, step=self._step_workers, zero_grad=self._zero_workers)

    def _need_front(self, what: str) -> Front:
        if self._front is None:
            raise OptimizerError(f"{what} needs an optimizer and the engine was given None; pass one over model.parameters(), or a callable")
        return self._front

    def _step_workers(self) -> None:
        self._settle()
        self._ready()
        self._number += 1
        self._ask("optimizer_step", (self._number, Update(self._need_front("step").groups())))
        self._stale = True

    def _zero_workers(self) -> None:
        if self._assembly.built and not self._closed:
            self._settle()
            self._ask("zero_grad", None)

    def _run_training(self, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any], *, zero: bool, update: Update | None) -> float:
        batch, ticket, began = self._start(args, target, kwargs, "train", zero=zero, update=update)
        self._step += 1
        self._pending = _Pending(ticket, began, batch, self._step)
        try:
            losses = self._assembly.desk.early(ticket, self._assembly.loss_workers(len(batch.pieces)))
        except StageError as error:
            self._fail(error)
            raise
        loss = _sum(losses)
        self._stale = True
        self._pending.loss = loss
        return loss

    def _run_evaluation(self, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any], kind: str) -> tuple[Batch, float, Mapping[int, Done]]:
        batch, ticket, began = self._start(args, target, kwargs, kind, zero=False, update=None)
        try:
            early = dict(self._assembly.desk.early(ticket, self._assembly.loss_workers(len(batch.pieces)))) if kind == "eval" else {}
            done = self._assembly.desk.done(ticket)
        except StageError as error:
            self._fail(error)
            raise
        self._keep(done, batch)
        return batch, _sum(early), done

    def _start(
        self, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any], kind: str, *, zero: bool, update: Update | None
    ) -> tuple[Batch, int, float]:
        """Cuts the batch and sends every worker its part of the step: one command each."""
        self._settle()
        if self._loss_fn is None and target is not None:
            kwargs, target = {**kwargs, "target": target}, None
        if lost := self._model.lost_keywords(kwargs):
            raise PlanError(lost)
        self._ready((args, kwargs))
        pieces = self._assembly.plan.micro_batches * self._assembly.plan.replicas
        batch = cut(args, kwargs, target, pieces=pieces, batch_dim=self._batch_dim, names=self._model.forward_names)
        self._judge(batch)
        self._number += 1
        feeds = [Feed(p.args, p.kwargs, p.target, share) for p, share in zip(batch.pieces, self._shares(batch))]
        base = Run(kind, {}, self._seed, self._step if kind == "train" else -self._number, Ambient.capture(self._precision))
        began = time.perf_counter()
        ticket = self._assembly.desk.ticket(self._assembly.workers)
        for w in sorted(self._assembly.workers):
            runs = {s: replace(base, feeds=mine) for s, mine in self._assembly.feeds(w, feeds, kind).items()}
            step = Step(self._number, len(feeds), runs, kind, began + self._assembly.crew.offsets[w], zero, update)
            self._assembly.crew.tell(w, ticket, "step", step)
        return batch, ticket, began

    def _shares(self, batch: Batch) -> list[float]:
        """Each micro-batch's share of the loss: n_m / n by rows, or by `loss_weight`; 1 where losses are summed."""
        if not self._mean:
            return [1.0] * len(batch.pieces)
        if self._loss_weight is None:
            return [n / batch.size for n in batch.sizes] if batch.size else [1.0]
        weights = [float(self._loss_weight(piece.target)) for piece in batch.pieces]
        total = sum(weights)
        if not total > 0 or min(weights) < 0:
            raise BatchError(f"loss_weight gave {weights}; weights are not negative and not all 0: count what the loss is a mean over, such as valid tokens")
        return [weight / total for weight in weights]

    def _judge(self, batch: Batch) -> None:
        """Says, once, where a pipeline cannot help since the batch stays whole, and notes it in the plan."""
        plan = self._assembly.plan
        if (self._wish.strategy or "auto") != "auto" or plan.strategy not in ("pipeline", "naive"):
            return
        whole = len(batch.pieces) == 1
        if whole == (plan.strategy == "naive"):
            return
        if whole:
            why = batch.why_whole or ("the batch has one row" if batch.size == 1 else "micro_batches=1")
            self._assembly.plan = replace(plan, strategy="naive", reason=f"the batch cannot be cut: {why}; stages work one after the other")
        else:
            self._assembly.plan = replace(self._plan, split=plan.split, places=plan.places)
        self._say(str(self._assembly.plan))

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.info(line)

    def _ready(self, batch: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> None:
        """Makes the workers, if need be.

        Raises:
            PlanError: the engine is closed, or the model does not fit the plan.
        """
        if self._broken is not None:
            raise StageError(self._broken.failure)
        if self._closed:
            raise PlanError("the engine is closed; it runs until close() or the end of its with block: make a new one")
        if self._assembly.built:
            return
        shell = self._front.shell() if self._front is not None else None
        self._assembly.build(shell, self._example or batch, self._batch_dim)
        if self._training is not None:
            self._ask("mode", self._training)
        self._plan = replace(self._plan, split=self._assembly.plan.split)
        for line in self._assembly.announcement():
            self._say(line)

    def _ask(self, name: str, payload: Any) -> Mapping[int, Any]:
        """Every worker's answer to a command."""
        self._ready()
        ticket = self._assembly.desk.ticket(self._assembly.workers)
        for w in self._assembly.workers:
            self._assembly.crew.tell(w, ticket, name, payload)
        try:
            return self._assembly.desk.done(ticket)
        except StageError as error:
            self._fail(error)
            raise

    def _gather(self, what: str) -> dict[str, Any]:
        """What the workers of the first replica hold, by full name, in the model's order."""
        self._settle()
        found = self._ask("collect", what)
        first = self._assembly.plan.workers // self._assembly.plan.replicas
        return {name: value for w in range(first) for name, value in found[w].items()}

    def _settle(self) -> None:
        """Waits for the tail of the step before.

        Raises:
            StageError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            done = self._assembly.desk.done(pending.ticket)
        except StageError as error:
            self._fail(error)
            raise
        self._keep(done, pending.batch)
        self._steps_taken += 1
        if self._log is not None and self._last is not None:
            self._log.step(pending.step, pending.loss, pending.batch.size, self._last[0])
        if self._steps_taken == _ADVICE_AFTER and self._assembly.plan.workers > 1:
            self._say(advice(self.report()))

    def _keep(self, done: Mapping[int, Done], batch: Batch) -> None:
        workers = sorted(done)
        trace = Trace(
            events=tuple(event for w in workers for event in done[w].events),
            workers=len(workers),
            clock="wall",
            plan=self._assembly.plan_facts(),
            step=self._step,
            peak_bytes=tuple(done[w].peak_bytes for w in workers),
            sent_bytes=tuple(done[w].sent_bytes for w in workers),
        )
        self._last = (trace, batch.size)

    def _fail(self, error: StageError) -> None:
        self._pending = None
        self._assembly.crew.abort(self._number, str(error.failure))
        if error.failure.kind.endswith("PeerLost"):
            self._broken = error

    def _close(self, *, raises: bool) -> None:
        if self._closed:
            return
        try:
            self._settle()
            if self._has_weights and self._assembly.built and self._broken is None and self._stale:
                self.sync_model()
        except StageError:
            if raises:
                raise
        finally:
            self._closed = True
            _open.discard(self)
            self._assembly.close()
            self._model.release()
            if self._front is not None:
                self._front.release()
            if self._log is not None:
                self._log.close()


class _Pending:
    """A training step whose loss is known and whose backward may still run."""

    def __init__(self, ticket: int, began: float, batch: Batch, step: int) -> None:
        self.ticket = ticket
        self.began = began
        self.batch = batch
        self.step = step
        self.loss = float("nan")


def close_all() -> None:
    """Closes every open engine; the launcher calls it at the end of the script.

    Raises:
        StageError: the tail of a step failed.
    """
    first: StageError | None = None
    for engine in list(_open):
        try:
            engine.close()
        except StageError as error:
            first = first or error
    if first is not None:
        raise first


@atexit.register
def _at_exit() -> None:
    """A script run without the launcher must not end with code 0 after a failed tail."""
    try:
        close_all()
    except StageError:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _sum(losses: Mapping[int, Mapping[int, float]]) -> float:
    """The loss of the mini-batch: the sum in micro-batch order of each one's share."""
    by_micro_batch = {m: loss for each in losses.values() for m, loss in each.items()}
    return sum((by_micro_batch[m] for m in sorted(by_micro_batch)), 0.0)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _on(value: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), value)


def _refuse_unknown(
    loss_reduction: str, recompute: object, precision: str, wire_dtype: str | None, offload: str | None, weights: object, memory: object
) -> None:
    if loss_reduction not in ("mean", "sum"):
        raise PlanError(f"loss_reduction is {loss_reduction!r}; it is 'mean' or 'sum', over the mini-batch")
    later = {"recompute": (recompute, "never"), "wire_dtype": (wire_dtype, None), "offload": (offload, None), "weights": (weights, None), "memory": (memory, None)}
    for name, (value, default) in later.items():
        if value != default:
            raise PlanError(f"{name}={value!r} is not in this version; it has {name}={default!r} only: leave it out")
    if precision not in ("fp32", "bf16"):
        raise PlanError(f"precision is {precision!r}; this version has 'fp32' and 'bf16': choose one of them")
