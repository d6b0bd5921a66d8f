"""Engine: what a user holds. A single-process training script calls it; it runs the stages."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipe import session
from pipe.announce import be_heard
from pipe.arguments import check, check_batch_dim, check_later, check_loss_fn
from pipe.assembly import Assembly
from pipe.captured import why_not
from pipe.controller import Controller
from pipe.cutting import Example
from pipe.errors import OptimizerError, PlanError, StageError
from pipe.fit import EpochResult
from pipe.fit import fit as run_fit
from pipe.front import Front, State, Workers
from pipe.logs import StepLog
from pipe.loss import Loss, LossFn
from pipe.micro_batch import BatchDim, count_rows
from pipe.model import Model
from pipe.options import merge
from pipe.partition.spec import Layer
from pipe.passes import Pass
from pipe.plan import Plan, Wish, decide, uncut
from pipe.report import Report
from pipe.saving import load as load_checkpoint
from pipe.saving import save as save_checkpoint
from pipe.settings import Settings
from pipe.trace import Trace
from pipe.update import Update
from pipe.verify import Verifier

_open: weakref.WeakSet[Engine] = weakref.WeakSet()
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
        example: Example | None = None,
        batch_dim: BatchDim = 0,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: Callable[[Any], float] | None = None,
        recompute: object = "never",
        precision: str = "fp32",
        wire_dtype: str | None = None,
        offload: str | None = None,
        weights: str | os.PathLike[str] | None = None,
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
            stages, replicas, micro_batches, schedule, strategy, device, memory, timeout, logdir: pipe-launch's flags win over these.
            example: (args, kwargs) to measure the layers with before the first batch.
            weights: safetensors file or folder (one with an index) of a model on the meta device, of which each worker reads its own part;
                loaded over a model that is nowhere on meta. Without it, modules on meta are filled by their reset_parameters.
            loss_weight: target -> number, in place of the rows of a micro-batch (say its valid tokens): exact token means.
            memory: bytes that a worker may use, or a text such as "8GiB": no stage is given more weights, gradients, optimizer state and
                outputs than that.
            timeout: seconds that one action, or one wait for a message, may take; 0: for ever; None: 1800.
            max_grad_norm: clip to it inside train_step.

        Raises:
            PlanError: it cannot be met, with the remedy.
            OptimizerError: the optimizer cannot be carried to the stages.
        """
        be_heard()
        check(
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            loss_weight=loss_weight,
            precision=precision,
            max_grad_norm=max_grad_norm,
            example=example,
            seed=seed,
        )
        check_later(
            recompute=(recompute, "never"),
            wire_dtype=(wire_dtype, None),
            offload=(offload, None),
        )
        job = session.current()
        if job is not None:
            job.used = True
        options = merge(
            job,
            {
                "stages": stages,
                "stages_per_worker": stages_per_worker,
                "replicas": replicas,
                "micro_batches": micro_batches,
                "schedule": schedule,
                "strategy": strategy,
                "device": None if device is None else str(device),
                "timeout": timeout,
                "logdir": logdir,
                "memory": memory,
            },
        )
        self._model = Model(model, weights)
        check_batch_dim(batch_dim, self._model.argument_names)
        wish = Wish(options.stages, options.stages_per_worker, options.replicas, options.micro_batches, options.schedule, options.strategy)
        layers = len(self._model.layers) if self._model.layers is not None else None
        plan = decide(wish, layers=layers, world=options.world, launched=job is not None)
        captures = layers is None and plan.strategy in ("pipeline", "hybrid", "naive") and plan.stages > 1
        if captures and loss_fn is not None and (why := why_not(self._model.whole, plan.stages)):
            plan = uncut(wish, plan, why, options.world)
        settings = Settings(
            batch_dim=batch_dim,
            mean=loss_reduction == "mean",
            loss_weight=loss_weight,
            precision=precision,
            seed=torch.initial_seed() if seed is None else seed,
            auto=(wish.strategy or "auto") == "auto",
            target_is_argument=loss_fn is None,
            needs_target=isinstance(loss_fn, nn.modules.loss._Loss),
            least_rows=1 if options.micro_batches else self._model.least_rows,
        )
        log = _log(options.logdir)
        check_loss_fn(loss_fn, self._model)
        self._controller = Controller(self._model, Assembly(self._model, plan, options, split, loss_fn), settings, example, log)
        self._controller.stale = not self._model.origin.is_own
        self._controller.assembly.cutting.otherwise = lambda why: uncut(wish, plan, why, options.world)
        if options.verify:
            self._controller.verifier = Verifier(options.verify, self._model, options, loss_fn, settings)
        self._batch_dim = batch_dim
        self._max_grad_norm = max_grad_norm
        self._front = self._make_front(optimizer)
        if self._front is not None:
            self._controller.shell = self._front.shell
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
        loss = self._controller.train(Pass("train", args, target, kwargs, zero=True, update=Update(front.groups(), self._max_grad_norm)))
        front.stepped()
        return Loss(loss)

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """The loss of the mini-batch; adds to the gradients, never zeroes them.

        Raises:
            BatchError, StageError: as train_step. After a failure all gradients are dropped: half a gradient is worse than none.
        """
        return Loss(self._controller.train(Pass("train", args, target, kwargs)))

    def optimizer_step(self) -> None:
        """Steps the optimizer on all workers with the gradients that they hold; same as `engine.optimizer.step()`."""
        front = self._need_front("optimizer_step")
        self._controller.ready()
        front.optimizer.step()

    def zero_grad(self) -> None:
        """Forgets all gradients; same as `engine.optimizer.zero_grad()`."""
        if self._front is not None:
            self._front.optimizer.zero_grad()
        else:
            self._zero_workers(True)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """The norm of all gradients over all stages, which are then scaled so that it is at most `max_norm`."""
        self._controller.settle()
        norm: float = self._controller.ask("clip_grad_norm", (self._controller.number(), float(max_norm), float(norm_type)))[0]
        return norm

    def train(self, mode: bool = True) -> Engine:
        """Sets train mode (or eval mode) on every module of every stage, for forward_backward and train_step."""
        self._controller.training = mode
        if self._controller.assembly.built:
            self._controller.ask("mode", mode)
        return self

    def eval(self) -> Engine:
        """Sets eval mode on every stage; stays until `train()`."""
        return self.train(False)

    # --- evaluation ---

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, merged on the controller, on the input's device; eval mode, no gradients.

        Tensors are concatenated on the batch dimension, 0-dim tensors averaged by rows, equal other values given once, else listed.
        """
        device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu"))
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(device), self._controller.predict(Pass("predict", args, kwargs=kwargs))
        )

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> float:
        """The loss of the batch in eval mode, without gradients."""
        return self._controller.evaluate(Pass("eval", args, target, kwargs))

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int = 1,
        val_loader: Iterable[Any] | None = None,
        scheduler: Any = None,
        scheduler_every: str = "step",
        checkpoint_dir: Any = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        resume: Any = "auto",
        progress: bool = True,
        on_epoch: Callable[[EpochResult], None] | None = None,
    ) -> list[EpochResult]:
        """Trains for some epochs; one result an epoch. A batch (x, y) becomes `train_step(x, target=y)`, a dict `train_step(**batch)`.

        For the options and errors see `pipe.fit.fit`.
        """

        def rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
            return count_rows(args, kwargs, batch_dim=self._batch_dim, names=self._model.forward_names)

        more = (val_loader, scheduler, scheduler_every, checkpoint_dir, checkpoint_every, keep, resume, progress, on_epoch)
        return run_fit(self, loader, epochs, *more, rows=rows)

    # --- state ---

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; its groups are the source of truth, and schedulers attach here."""
        return self._need_front("optimizer").optimizer

    def state_dict(self) -> dict[str, Any]:
        """The unsplit model's state_dict, from the stages, on the CPU."""
        if self._unbuilt_module:
            return dict(self._model.whole.state_dict())
        return self._controller.gather("state")

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
        self._controller.ask("load", self._model.even({k: v for k, v in state.items() if k in own}))
        self._controller.stale = True
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def optimizer_state_dict(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by full parameter name, from the stages, on the CPU."""
        self._need_front("optimizer_state_dict")
        return self._controller.gather("optimizer")

    def load_optimizer_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads what `optimizer_state_dict` gave, at any number of stages.

        Raises:
            OptimizerError: a name that is not a parameter of the model.
        """
        self._need_front("load_optimizer_state_dict")
        unknown = [name for name in state if name not in self._model.names]
        if unknown:
            raise OptimizerError(
                f"{unknown[0]!r} is no parameter of the model; the state is by full parameter name: see engine.optimizer_state_dict()"
            )
        self._controller.ask("load_optimizer", dict(state))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes a checkpoint, in place of the one that is there: weights, the optimizer's state and settings, and what keys the random
        streams, so that training goes on from it bit for bit. Not what accumulated gradients hold.

        Each stage writes its own part; a crash at any moment leaves the one before whole.

        Raises:
            PlanError: it cannot be written there, or the folder holds something else.
        """
        save_checkpoint(self._controller, self._model, self._front, Path(directory))

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Goes on from a checkpoint, of any number of stages and replicas; gradients are forgotten.

        Raises:
            PlanError: there is none, or it is another model's or optimizer's.
        """
        load_checkpoint(self._controller, self._model, self._front, Path(directory))
        self.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        """Each parameter's gradient by full name, on the CPU; None where it has none."""
        found = self._controller.gather("gradients")
        return {name: found.get(name) for name in self._model.names}

    def sync_model(self) -> None:
        """Writes weights and buffers back into the user's model.

        Raises:
            PlanError: the model was given as LayerSpecs or is on the meta device, so there is none to write to.
        """
        if why := self._model.origin.homeless:
            raise PlanError(f"sync_model has no model to write to, since {why}; use engine.state_dict()")
        if self._unbuilt_module:
            return
        self._model.write(self._controller.gather("tensors"))
        self._controller.stale = False

    @property
    def plan(self) -> Plan:
        """What was chosen, and why. Before the first batch an automatic cut is provisional, by parameter bytes."""
        if self._controller.provisional:
            self._controller.ready()
        return self._controller.assembly.plan

    @property
    def trace(self) -> Trace:
        """The trace of the last train_step, forward_backward, eval_step or predict.

        Raises:
            PlanError: there has been none.
        """
        return self._controller.last()[0]

    def report(self) -> Report:
        """Step time, bubble, and per worker busy, wait, bytes and peak memory of the last step; `str()` is a table."""
        trace, rows = self._controller.last()
        return Report.of(trace, self.plan.places, rows)

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
    def _unbuilt_module(self) -> bool:
        """Whether the user's model itself still holds the truth."""
        return not self._controller.has_weights()

    def _make_front(self, optimizer: OptimizerLike) -> Front | None:
        if optimizer is None:
            return None
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(list(self._model.parameters))
        names = {id(p): name for name, p in self._model.parameters}
        return Front(optimizer, names, Workers(self._step_workers, self._zero_workers, self._optimizer_state, self._load_optimizer_state))

    def _need_front(self, what: str) -> Front:
        if self._front is None:
            raise OptimizerError(
                f"{what} needs an optimizer and the engine was given None; pass one over model.parameters(), or a callable"
                " such as lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)"
            )
        return self._front

    def _step_workers(self) -> None:
        self._controller.settle()
        update = Update(self._need_front("step").groups())
        self._controller.ask("optimizer_step", (self._controller.number(), update))
        self._controller.stepped()
        self._controller.stale = True

    def _zero_workers(self, set_to_none: bool) -> None:
        if self._controller.assembly.built:
            self._controller.ask("zero_grad", set_to_none)

    def _optimizer_state(self) -> State | None:
        return self._controller.gather("optimizer") if self._controller.assembly.built else None

    def _load_optimizer_state(self, state: State) -> None:
        if self._controller.assembly.built:
            self._controller.ask("load_optimizer", state)

    def _close(self, *, raises: bool) -> None:
        controller = self._controller
        if controller.closed:
            return
        try:
            try:
                controller.settle()
            finally:  # what was trained before a failed tail comes home, too
                if not self._model.origin.homeless and controller.assembly.built and controller.broken is None and controller.stale:
                    self.sync_model()
                    if self._front is not None:
                        self._front.fetch()
        except StageError:
            if raises:
                raise
        finally:
            controller.close()
            _open.discard(self)
            self._model.release()
            if self._front is not None:
                self._front.release()


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


def _log(logdir: str | None) -> StepLog | None:
    """Where steps are logged, if anywhere.

    Raises:
        PlanError: the folder cannot be written to.
    """
    if logdir is None:
        return None
    try:
        return StepLog(logdir)
    except OSError as error:
        raise PlanError(f"logdir {logdir!r} cannot be written to ({error.strerror or error}); give a folder of your own") from None
