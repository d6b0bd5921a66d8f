"""Cutting: which layers, or nodes of a captured model, make which stage; from what was asked for, or from what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from pipe import links, session
from pipe.blueprint import Seat
from pipe.copying import copy_module
from pipe.errors import PlanError
from pipe.micro_batch import Piece
from pipe.model import Model
from pipe.options import Options
from pipe.partition.balance import balance
from pipe.partition.graph import GraphLayers
from pipe.partition.measure import LayerCost, measure
from pipe.partition.spec import Layer
from pipe.placement import size
from pipe.plan import Part, Plan

Example = tuple[tuple[Any, ...], Mapping[str, Any]]
First = Callable[[Example], Piece]  # the first micro-batch of an example, to capture and measure with


@dataclass(frozen=True)
class _Units:
    """What is cut between: layers, or parts of a graph between places to cut; `widths` are the layers, or nodes, of each."""

    layers: tuple[Layer, ...]
    names: tuple[str, ...]
    widths: tuple[int, ...]


class Cutting:
    """A model, a plan, and how the one is cut for the other."""

    def __init__(self, model: Model, plan: Plan, options: Options, split: object) -> None:
        """Checks the split, as far as it can be without a batch.

        Raises:
            PlanError: the split does not fit the model.
        """
        self.otherwise: Callable[[str], Plan] = lambda why: plan  # what to do with a model that cannot be cut
        self.is_cut = plan.strategy not in ("single", "ddp") and (model.layers is not None or plan.stages > 1)
        self._model = model
        self._options = options
        self._split = split
        self._plan = plan
        self._to_measure = False
        self._costs: list[LayerCost] = []  # of each unit
        self._widths: tuple[int, ...] = ()
        self._why = "since nothing was there to measure with"
        self._limit = None if options.memory is None else size(options.memory)
        if model.layers is not None and self.is_cut:
            counts = model.resolve(split, plan.stages)
            self._to_measure = counts is None
            self._plan = replace(plan, split=counts or self._by_bytes())
        elif model.layers is not None:
            self._plan = replace(plan, split=(len(model.layers),))

    @property
    def provisional(self) -> Plan:
        """The plan before anything is captured or measured."""
        return self._plan

    @property
    def captures(self) -> bool:
        """Whether the model has to be captured, to be cut: its arguments then go by name."""
        return self.is_cut and self._model.layers is None

    @property
    def graph(self) -> GraphLayers | None:
        """The nodes of a captured model that is cut."""
        return self._model.captured.layers if self._model.captured is not None and self.is_cut else None

    def cut(self, example: Example | None, first: First, copies: int) -> Plan:
        """The plan with its cut.

        Args:
            copies: of the weights that the optimizer keeps as its state.

        Raises:
            PlanError: the model cannot be cut as asked for, or into parts that keep to the memory.
        """
        if self.captures:
            self._capture(example, first)
        if self.is_cut and example is not None and (self._to_measure or self._options.plan):
            self._measure(first(example))
        if self._to_measure:
            self._choose(copies)
        if self.graph is not None:
            self._plan = replace(self._plan, routes=self.graph.routes(self._plan.split))
        self._plan = replace(self._plan, parts=self._parts())
        self._check_memory(copies)
        return self._plan

    def contents(self, s: int) -> str:
        """What a stage holds, in words."""
        if self._model.layers is not None:
            names, _ = self._model.stage(s, self._plan.split)
            return f"layers {names[0]} to {names[-1]} ({len(names)})" if len(names) > 1 else f"layer {names[0]}"
        return self.graph.contents(s, self._plan.split) if self.graph is not None else type(self._model.whole).__name__

    # --- from a batch ---

    def _capture(self, example: Example | None, first: First) -> None:
        """Makes the model's graph, and cuts it where asked; what cannot be captured is not cut.

        Raises:
            PlanError: it cannot be captured, and the strategy or the number of workers leaves nothing else.
        """
        try:
            if example is None:
                raise PlanError("nothing was there to capture it with: pass example=((x,), {})")
            self._model.capture(first(example).kwargs)
            counts = self._model.resolve(self._split, self._plan.stages)
            self._to_measure = counts is None
            self._plan = replace(self._plan, split=counts or self._evenly())
        except PlanError as error:
            self._plan = self.otherwise(str(error))
            self.is_cut = self._to_measure = False

    def _measure(self, piece: Piece) -> None:
        """What each unit costs; nothing where one raises, which the step will tell better."""
        units, limit = self._units(), self._options.timeout or math.inf
        self._widths = units.widths
        device = self._seat(0).device()
        try:
            self._costs = measure(units.layers, piece.args, piece.kwargs, names=units.names, device=device, copy=copy_module, limit=limit)
        except PlanError as error:
            self._why = f"since a layer could not be measured ({str(error).splitlines()[0][:200]})"

    def _units(self) -> _Units:
        if self._model.layers is not None:
            return _Units(self._model.layers.layers, self._model.layers.names, (1,) * len(self._model.layers))
        assert self.graph is not None
        ends = [*self.graph.candidates(self._plan.stages), len(self.graph)] if self._to_measure else list(accumulate(self._plan.split))
        bounds = list(pairwise([0, *ends]))
        return _Units(
            tuple(self.graph.part(begin, end) for begin, end in bounds),
            tuple(f"{self.graph.names[begin]} ({begin})" for begin, _ in bounds),
            tuple(end - begin for begin, end in bounds),
        )

    # --- choosing ---

    def _choose(self, copies: int) -> None:
        """The cut whose step is shortest, by what was measured; else by parameter bytes, or the number of nodes."""
        if self._costs:
            counts = self._cheapest(copies)
            how = f"cut by measured time, dearest layer {max(cost.total for cost in self._costs) * 1e3:.3g} ms a micro-batch"
        else:
            counts = self._plan.split if self._model.layers is None else self._by_bytes(copies)
            how = f"cut by {'the number of nodes' if self._model.layers is None else 'parameter bytes'}, {self._why}"
        self._model.check(counts)
        self._plan = replace(self._plan, split=counts, reason=f"{self._plan.reason}, {how}")

    def _cheapest(self, copies: int) -> tuple[int, ...]:
        plan, costs = self._plan, self._costs
        slowness, per_byte = self._hardware()
        counts = balance(
            [cost.total for cost in costs],
            plan.stages,
            sizes=[_need(cost.parameter_bytes, copies) + cost.output_bytes * plan.micro_batches for cost in costs],
            limit=self._limit,
            slowness=slowness,
            crossing=[0, *(cost.output_bytes for cost in costs[:-1])],
            per_byte=[2 * seconds for seconds in per_byte],  # there, and its gradient back
            micro_batches=plan.micro_batches,
        )
        bounds = [0, *accumulate(counts)]
        return tuple(sum(self._widths[begin:end]) for begin, end in pairwise(bounds))

    def _hardware(self) -> tuple[list[float], list[float]]:
        """How slow the worker of each stage is, and the seconds a byte takes on the link before each stage but the first."""
        stages = range(self._plan.stages)
        job = session.current()
        if self._options.world is None or job is None:  # threads of one process, which hand over what lies in its memory
            devices = [self._seat(s).device() for s in stages]
            found = {device: links.seconds(device) for device in set(devices)} if len(set(devices)) > 1 else {}
            return links.relative([found.get(device, 0.0) for device in devices]), [0.0 for _ in stages[1:]]
        pairs = list(pairwise(stages))
        rates = links.per_byte(job, pairs)
        return links.slowness(job, [self._seat(s).device for s in stages]), [rates[pair] for pair in pairs]

    def _evenly(self) -> tuple[int, ...]:
        """As many nodes in each stage, at the nearest places to cut."""
        assert self._model.captured is not None
        layers, stages = self._model.captured.layers, self._plan.stages
        places = layers.candidates(stages)
        if len(places) < stages - 1:
            raise PlanError(f"its forward has {len(layers)} nodes, fewer than {stages} stages need")
        ends: list[int] = []
        for s in range(1, stages):
            left = places[len(ends) + (places.index(ends[-1]) + 1 - len(ends) if ends else 0) :]
            left = left[: len(left) - (stages - 1 - s)]
            ends.append(min(left, key=lambda at: abs(at - len(layers) * s // stages)))
        return tuple(end - begin for begin, end in zip([0, *ends], [*ends, len(layers)]))

    def _by_bytes(self, copies: int = 0) -> tuple[int, ...]:
        modules = [m for m in self._model.whole._modules.values() if m is not None]
        sizes = [_bytes(m) for m in modules]
        needs = [_need(nbytes, copies) for nbytes in sizes]
        counts = balance([nbytes + 1.0 for nbytes in sizes], self._plan.stages, sizes=needs, limit=self._limit)
        self._model.check(counts)
        return counts

    # --- what came of it ---

    def _parts(self) -> tuple[Part, ...]:
        modules = self._model.parts(self._plan.split)
        found = [Part(self.contents(s), sum(p.numel() for p in module.parameters())) for s, module in enumerate(modules)]
        if not self._costs:
            return tuple(found)
        ends = list(accumulate(self._widths))
        stage_ends = list(accumulate(self._plan.split))
        for s, (begin, end) in enumerate(pairwise([0, *stage_ends])):
            own = [cost for cost, at in zip(self._costs, ends) if begin < at <= end]
            out = own[-1].output_bytes if end != stage_ends[-1] else 0
            found[s] = replace(found[s], seconds=sum(cost.total for cost in own), bytes_out=out)
        return tuple(found)

    def _check_memory(self, copies: int) -> None:
        if self._limit is None:
            return
        for s, module in enumerate(self._model.parts(self._plan.split)):
            need = _need(_bytes(module), copies)
            if need > self._limit:
                raise PlanError(
                    f"stage {s} ({self.contents(s)}) needs {need / 2**20:,.1f} MiB for weights, gradients and optimizer state, and a "
                    f"worker may use {self._limit / 2**20:,.1f} MiB: use more stages, another split, or more --memory"
                )

    def _seat(self, worker: int) -> Seat:
        return seat(worker, self._plan, self._options)


def seat(worker: int, plan: Plan, options: Options) -> Seat:
    """Where a worker of the plan sits."""
    job = session.current()
    if options.world is None or job is None:
        return Seat(worker, plan.workers, options.device, options.share_gpus)
    member = job.members[worker]
    neighbours = sum(other.boot_id == member.boot_id and other.host == member.host for other in job.members)
    return Seat(member.local_rank, neighbours, options.device, options.share_gpus)


def _need(nbytes: int, copies: int) -> int:
    """Of weights of so many bytes: they, their gradients and the optimizer's state."""
    return nbytes * (2 + copies)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
