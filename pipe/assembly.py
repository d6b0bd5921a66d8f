"""Assembly: from a plan and a model to workers that hold its stages."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipe import session
from pipe.aliases import copied, taken_later
from pipe.blueprint import Blueprint, Build, Built, Seat
from pipe.copying import by_value, dump_module
from pipe.crew import Crew, LocalCrew, RpcCrew
from pipe.cutting import Cutting, Example, First, seat
from pipe.desk import Desk
from pipe.errors import PlanError, StageError
from pipe.loss import LossFn
from pipe.memory import available
from pipe.model import Model
from pipe.optimizer import Shell
from pipe.options import Options
from pipe.partition.graph import GraphLayers
from pipe.partition.sequence import Chain
from pipe.partition.ties import Tie
from pipe.plan import Plan
from pipe.stage import Feed

_engines = itertools.count()  # numbers the engines of this process, so that their messages do not meet


class Assembly:
    """The plan come to life: a desk, a crew, and who holds what."""

    def __init__(self, model: Model, plan: Plan, options: Options, split: object, loss_fn: LossFn | None) -> None:
        """Checks the split.

        Raises:
            PlanError: the split does not fit the model.
        """
        self.cutting = Cutting(model, plan, options, split)
        self.plan = self.cutting.provisional
        self.desk = Desk()
        self.crew: Crew
        self.built = False
        self._model = model
        self._options = options
        self._loss_fn = loss_fn
        self._takes: dict[int, frozenset[str] | None] = {}

    @property
    def workers(self) -> frozenset[int]:
        """The workers that the plan uses."""
        return frozenset(range(self.plan.workers))

    def loss_workers(self, pieces: int) -> set[int]:
        """The workers that tell the losses: those of the last stage that have a micro-batch."""
        return {r * self.plan.stages + self.plan.stages - 1 for r, count in enumerate(self.plan.counts(pieces)) if count}

    def feeds(self, worker: int, feeds: Sequence[Feed], kind: str) -> dict[int, dict[int, Feed]]:
        """By stage of this worker, what it gets of each of its replica's micro-batches: arguments on the first stage, the target on
        the last, keyword arguments where forward names them."""
        replica, s = divmod(worker, self.plan.stages)
        counts = self.plan.counts(len(feeds))
        first = sum(counts[:replica])
        own = {m: self._feed(feeds[m], s, kind) for m in range(first, first + counts[replica])}
        return {s: own}

    def _feed(self, feed: Feed, s: int, kind: str) -> Feed:
        """What stage `s` gets; tensors that another stage takes, too, are copies, so that what is written into them is the same on
        threads as in processes."""
        takes = [self._takes.get(r) for r in range(self.plan.stages)]
        takers = {k: [r for r, names in enumerate(takes) if names is None or k in names] for k in feed.kwargs}
        given = feed.args if s == 0 else (), {k: v for k, v in feed.kwargs.items() if s in takers[k]}
        shared = taken_later(given, [(v, takers[k][-1]) for k, v in feed.kwargs.items() if takers[k][-1:] > [s]])
        (args, kwargs), shared = copied((given, shared)) if shared or s else (given, shared)
        last = s == self.plan.stages - 1
        return Feed(args, kwargs, feed.target if last and kind != "predict" else None, feed.share, shared)

    def build(self, shell: Shell | None, example: Example | None, first: First) -> None:
        """Cuts the model and makes the workers.

        Args:
            first: gives the first micro-batch of an example.

        Raises:
            PlanError: the model does not fit, a device is missing, or a module cannot be sent.
            StageError: a worker failed to build its stages.
            SystemExit: only the plan was asked for, and has been printed.
        """
        self.plan = self.cutting.cut(example, first, shell.copies if shell is not None else 0)
        if self._options.plan:
            print(self.plan.table(), flush=True)
            raise SystemExit(0)
        if self.plan.strategy == "ddp":
            self._check_fits(shell)
        self._start_crew()
        self.built = True
        try:
            answers = self._build_stages(shell)
            self.plan = replace(self.plan, places=tuple(f"{answers[w].host} {answers[w].device}" for w in sorted(answers)))
            self._answers(self.crew.tell("join", dict.fromkeys(sorted(self.workers), self.plan)))
        except BaseException:
            self.close()
            raise

    @property
    def captures(self) -> bool:
        """Whether the model has to be captured, to be cut: its arguments then go by name."""
        return self.cutting.captures

    @property
    def _graph(self) -> GraphLayers | None:
        return self.cutting.graph

    def _build_stages(self, shell: Shell | None) -> dict[int, Built]:
        answers: dict[int, Built] = {}
        state = self._model.generator_state
        tickets = []
        for s in range(self.plan.stages):
            tickets.append(self._build_stage(s, state, shell))
            if self._model.origin.in_turn:  # one after the other, since each continues the generator of the one before
                answers |= self._answers(tickets.pop())
                state = answers[s].generator_state
        for ticket in tickets:
            answers |= self._answers(ticket)
        return answers

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several stages hold."""
        return self._model.ties(self.plan.split)

    def stage_of(self, name: str) -> int:
        """The stage of a parameter or buffer, by full name."""
        return self._model.stage_of(name, self.plan.split)

    def _build_stage(self, s: int, state: torch.Tensor, shell: Shell | None) -> int:
        """Tells the holders of a stage to build it; gives the ticket."""
        blueprint = self._blueprint(s, state)
        pickled: Blueprint | None = None
        ties = self.ties, self._model.ties(self.plan.split, buffers=True)
        shared = self._graph.shared(self.plan.split) if self._graph is not None else frozenset[str]()
        orders = {}
        for w in range(s, self.plan.workers, self.plan.stages):
            remote = w > 0 and self._options.world is not None
            if remote and pickled is None:
                _send_script()
                pickled = blueprint.pickled()
            last = s == self.plan.stages - 1
            loss_fn = None if not last else dump_module(self._loss_fn) if remote else self._loss_fn
            own = pickled if remote and pickled is not None else blueprint.copied()
            orders[w] = Build(self.plan, {s: own}, shell, self._model.names, loss_fn, self._seat(w), *ties, shared)
        return self.crew.tell("build", orders)

    def _answers(self, ticket: int) -> Mapping[int, Any]:
        """What the workers answer.

        Raises:
            PlanError, StageError: one failed.
        """
        try:
            return self.desk.done(ticket)
        except StageError as error:
            if error.failure.kind.endswith(PlanError.__name__):
                raise PlanError(f"{error.failure.message} (worker {error.worker} on {error.host})") from None
            raise

    def announcement(self) -> list[str]:
        """The plan, and each stage's layers, parameters, worker and place."""
        lines = [str(self.plan)]
        if self.plan.workers == 1 and self.plan.strategy == "single":
            return lines
        for w, place in enumerate(self.plan.places):
            replica, s = divmod(w, self.plan.stages)
            where = f"worker {w} (rank {w}) on {place}" if self._options.world else f"worker {w}, a thread, on {place}"
            who = (
                f"replica {replica}"
                if self.plan.stages == 1
                else f"stage {s}" + (f" of replica {replica}" if self.plan.replicas > 1 else "")
            )
            part = self.plan.parts[s]
            lines.append(f"{who}: {part.layers}, {part.parameters:,} parameters, {where}")
        return lines

    def plan_facts(self) -> dict[str, Any]:
        """What a trace file says of the plan."""
        facts: dict[str, Any] = json.loads(self.plan.to_json())
        return facts

    def close(self) -> None:
        """Ends the workers."""
        if self.built:
            self.built = False
            self.crew.close()

    def _check_fits(self, shell: Shell | None) -> None:
        weights = sum(p.numel() * p.element_size() for _, p in self._model.parameters)
        need = weights * (2 + (shell.copies if shell is not None else 0))
        device = torch.device(self._seat(0).device())
        has = available(device, self.plan.replicas)
        if has and need > has:
            raise PlanError(
                f"ddp puts the whole model on every worker: weights, gradients and optimizer state take {need / 2**30:.2f} GiB and "
                f"{device} has {has / 2**30:.2f} GiB a worker; what does not fit has to be cut: give the model as nn.Sequential or a list "
                "of layers and use --strategy pipeline"
            )

    # --- workers ---

    def _start_crew(self) -> None:
        job = session.current()
        if self._options.world is not None and job is not None:
            self.crew = RpcCrew(f"engine {next(_engines)}", job, self.plan.workers, self.desk, self._options.timeout)
        else:
            self.crew = LocalCrew(self.plan.workers, self.desk, self._options.timeout)

    def _seat(self, worker: int) -> Seat:
        return seat(worker, self.plan, self._options)

    def _blueprint(self, s: int, state: torch.Tensor) -> Blueprint:
        part = self._model.parts(self.plan.split)[s]
        values = self._model.fresh(self.plan.split), self._model.origin.stored_in(part)
        if self._model.layers is not None:
            names, layers = self._model.stage(s, self.plan.split)
            self._takes[s] = _takes_of(self._model, s, self.plan.split)
            return Blueprint(layers, names, s == 0, state, *values)
        if self._graph is not None:
            self._takes[s] = self._graph.keywords(part)
        return Blueprint((part,), (), True, state, *values)


def _send_script() -> None:
    """Where a host lacks the script's folder, what its modules define goes by value."""
    job, script = session.current(), getattr(sys.modules["__main__"], "__file__", None)
    if job is not None and script is not None and not all(member.has_script for member in job.members):
        by_value(Path(script).parent)


def _takes_of(model: Model, s: int, split: Sequence[int]) -> frozenset[str] | None:
    """Names of the keyword arguments that a stage takes; None for any."""
    names, _ = model.stage(s, split)
    modules = [m for m in (model.whole._modules[name] for name in names) if m is not None]
    return Chain(modules, names, first=s == 0).keywords


def _parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for p in nn.ModuleList(modules).parameters())
