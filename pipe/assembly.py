"""Assembly: from a plan and a model to workers that hold its stages."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipe import session
from pipe.blueprint import Blueprint, Build, Built, Seat
from pipe.copying import by_value, copy_module, dump_module
from pipe.crew import Crew, LocalCrew, RpcCrew
from pipe.desk import Desk
from pipe.errors import PlanError, StageError
from pipe.loss import LossFn
from pipe.memory import available
from pipe.micro_batch import Piece
from pipe.model import Model
from pipe.optimizer import Shell
from pipe.options import Options
from pipe.partition.balance import balance
from pipe.partition.graph import GraphLayers
from pipe.partition.measure import measure
from pipe.partition.sequence import Chain
from pipe.partition.ties import Tie
from pipe.plan import Plan
from pipe.stage import Feed

_engines = itertools.count()  # numbers the engines of this process, so that their messages do not meet
Example = tuple[tuple[Any, ...], Mapping[str, Any]]


class Assembly:
    """The plan come to life: a desk, a crew, and who holds what."""

    def __init__(self, model: Model, plan: Plan, options: Options, split: object, loss_fn: LossFn | None) -> None:
        """Checks the split.

        Raises:
            PlanError: the split does not fit the model.
        """
        self.plan = plan
        self.desk = Desk()
        self.crew: Crew
        self.built = False
        self._model = model
        self._options = options
        self._loss_fn = loss_fn
        self._to_measure = False
        self._takes: dict[int, frozenset[str] | None] = {}
        self._split = split
        self._is_cut = plan.strategy not in ("single", "ddp") and (model.layers is not None or plan.stages > 1)
        if model.layers is not None and self._is_cut:
            counts = model.resolve(split, plan.stages)
            self._to_measure = counts is None
            self.plan = replace(plan, split=counts or self._by_bytes())
        elif model.layers is not None:
            self.plan = replace(plan, split=(len(model.layers),))
        self._generator_state = torch.get_rng_state()
        self.otherwise: Callable[[str], Plan] = lambda why: plan  # what to do with a model that cannot be cut

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
        last = s == self.plan.stages - 1
        takes = self._takes.get(s)
        kwargs = feed.kwargs if takes is None else {k: v for k, v in feed.kwargs.items() if k in takes}
        return Feed(feed.args if s == 0 else (), kwargs, feed.target if last and kind != "predict" else None, feed.share)

    def build(self, shell: Shell | None, example: Example | None, first: Callable[[Example], Piece]) -> None:
        """Cuts the model and makes the workers.

        Args:
            first: gives the first micro-batch of an example, to measure layers with.

        Raises:
            PlanError: the model does not fit, a device is missing, or a module cannot be sent.
            StageError: a worker failed to build its stages.
        """
        if self.captures:
            self._capture(example, first)
        if self._to_measure:
            self._measure(example, first)
        if self._graph is not None:
            self.plan = replace(self.plan, routes=self._graph.routes(self.plan.split))
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
        return self._is_cut and self._model.layers is None

    @property
    def _graph(self) -> GraphLayers | None:
        """The nodes of a captured model that is cut."""
        return self._model.captured.layers if self._model.captured is not None and self._is_cut else None

    def _build_stages(self, shell: Shell | None) -> dict[int, Built]:
        answers: dict[int, Built] = {}
        state = self._generator_state
        tickets = []
        for s in range(self.plan.stages):
            tickets.append(self._build_stage(s, state, shell))
            if self._model.has_specs:  # one after the other, since each continues the generator of the one before
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
            lines.append(f"{who}: {self._contents(s)}, {where}")
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

    # --- cutting ---

    def _capture(self, example: Example | None, first: Callable[[Example], Piece]) -> None:
        """Makes the model's graph, and cuts it where asked; what cannot be captured is not cut.

        Raises:
            PlanError: it cannot be captured, and the strategy or the number of workers leaves nothing else.
        """
        try:
            if example is None:
                raise PlanError("nothing was there to capture it with: pass example=((x,), {})")
            self._model.capture(first(example).kwargs)
            counts = self._model.resolve(self._split, self.plan.stages)
            self._to_measure = counts is None
            self.plan = replace(self.plan, split=counts or self._evenly())
        except PlanError as error:
            self.plan = self.otherwise(str(error))
            self._is_cut = False

    def _evenly(self) -> tuple[int, ...]:
        """As many nodes in each stage, at the nearest places to cut."""
        assert self._model.captured is not None
        layers, stages = self._model.captured.layers, self.plan.stages
        places = layers.candidates(stages)
        if len(places) < stages - 1:
            raise PlanError(f"its forward has {len(layers)} nodes, fewer than {stages} stages need")
        ends: list[int] = []
        for s in range(1, stages):
            left = places[len(ends) + (places.index(ends[-1]) + 1 - len(ends) if ends else 0) :]
            left = left[: len(left) - (stages - 1 - s)]
            ends.append(min(left, key=lambda at: abs(at - len(layers) * s // stages)))
        return tuple(end - begin for begin, end in zip([0, *ends], [*ends, len(layers)]))

    def _by_bytes(self) -> tuple[int, ...]:
        modules = [m for m in self._model.whole._modules.values() if m is not None]
        sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in modules]
        counts = balance([size + 1.0 for size in sizes], self.plan.stages)
        self._model.check(counts)
        return counts

    def _measure(self, example: Example | None, first: Callable[[Example], Piece]) -> None:
        """Cuts by measured time; by bytes where there is nothing to measure with, or a layer raises, which the step will tell better."""
        how = "cut by parameter bytes, since nothing was there to measure with"
        counts = self.plan.split
        if example is not None:
            try:
                counts, dearest = self._cheapest(first(example))
                how = f"cut by measured time, dearest layer {dearest * 1e3:.3g} ms a micro-batch"
            except PlanError as error:
                how = f"cut by {self._else}, since a layer could not be measured ({str(error).splitlines()[0][:200]})"
        self._model.check(counts)
        self._to_measure = False
        self.plan = replace(self.plan, split=counts, reason=f"{self.plan.reason}, {how}")

    @property
    def _else(self) -> str:
        return "parameter bytes" if self._model.layers is not None else "the number of nodes"

    def _cheapest(self, piece: Piece) -> tuple[tuple[int, ...], float]:
        """The cut whose dearest stage is cheapest, and the seconds of the dearest layer, or part of a graph between places to cut.

        Raises:
            PlanError: one of them raises.
        """
        stages, limit = self.plan.stages, self._options.timeout or math.inf
        if self._model.layers is not None:
            layers, names, widths = self._model.layers.layers, self._model.layers.names, [1] * len(self._model.layers)
        else:
            assert self._model.captured is not None
            graph = self._model.captured.layers
            ends = [*graph.candidates(stages), len(graph)]
            widths = [end - begin for begin, end in zip([0, *ends], ends)]
            layers = tuple(graph.part(end - width, end) for width, end in zip(widths, ends))
            names = tuple(f"{graph.names[end - width]} ({end - width})" for width, end in zip(widths, ends))
        costs = measure(layers, piece.args, piece.kwargs, names=names, device=self._device_0(), copy=copy_module, limit=limit)
        counts = balance([cost.total for cost in costs], stages)
        bounds = [0, *accumulate(counts)]
        return tuple(sum(widths[begin:end]) for begin, end in pairwise(bounds)), max(cost.total for cost in costs)

    def _device_0(self) -> str:
        return self._seat(0).device()

    def _check_fits(self, shell: Shell | None) -> None:
        weights = sum(p.numel() * p.element_size() for _, p in self._model.parameters)
        need = weights * (2 + (shell.copies if shell is not None else 0))
        device = torch.device(self._device_0())
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
        job = session.current()
        if self._options.world is None or job is None:
            return Seat(worker, self.plan.workers, self._options.device, self._options.share_gpus)
        member = job.members[worker]
        neighbours = sum(other.boot_id == member.boot_id and other.host == member.host for other in job.members)
        return Seat(member.local_rank, neighbours, self._options.device, self._options.share_gpus)

    def _blueprint(self, s: int, state: torch.Tensor) -> Blueprint:
        if self._model.layers is not None:
            names, layers = self._model.stage(s, self.plan.split)
            self._takes[s] = _takes_of(self._model, s, self.plan.split)
            return Blueprint(layers, names, s == 0, state)
        part = self._model.parts(self.plan.split)[s]
        if self._graph is not None:
            self._takes[s] = self._graph.keywords(part)
        return Blueprint((part,), (), True, state)

    def _contents(self, s: int) -> str:
        part = self._model.parts(self.plan.split)[s]
        count = _parameters([part])
        if self._model.layers is not None:
            names, _ = self._model.stage(s, self.plan.split)
            held = f"layers {names[0]} to {names[-1]} ({len(names)})" if len(names) > 1 else f"layer {names[0]}"
        elif self._graph is not None:
            held = self._graph.contents(s, self.plan.split)
        else:
            held = type(self._model.whole).__name__
        return f"{held}, {count:,} parameters"


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
