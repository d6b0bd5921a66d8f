"""What a worker is made from: its layers or how to build them, its seat, and its part of the optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipe.copying import copy_module, dump_module, load_module
from pipe.loss import LossFn
from pipe.optimizer import Shell
from pipe.origin import Stored
from pipe.partition.deferred import Fresh
from pipe.partition.sequence import Chain
from pipe.partition.spec import Layer, build_layers
from pipe.partition.ties import Tie
from pipe.placement import device_for
from pipe.plan import Plan


@dataclass(frozen=True)
class Blueprint:
    """One stage's layers under their unsplit names; no names: one module that is the whole model.

    `layers` are pickled bytes where they go to another process. `generator_state` is the CPU generator's before the first of
    them that is a LayerSpec is built, so that weights are those of one process that builds all layers in order; with `fresh`, before the
    first of the model.
    """

    layers: tuple[Layer, ...] | bytes
    names: tuple[str, ...]
    first: bool
    generator_state: torch.Tensor
    fresh: Fresh | None = None  # makes what is on the meta device
    stored: Stored | None = None  # what comes from a file

    def copied(self) -> Blueprint:
        """With modules of its own, for a worker in this process; what layers share stays shared."""
        assert not isinstance(self.layers, bytes)
        fresh = self.fresh
        if fresh is not None:
            assert not isinstance(fresh.units, bytes)
            fresh = replace(fresh, units=_copied(fresh.units))
        return replace(self, layers=_copied(self.layers), fresh=fresh)

    def pickled(self) -> Blueprint:
        """As bytes, for a worker in another process."""
        fresh = self.fresh
        if fresh is not None:
            fresh = replace(fresh, units=dump_module(fresh.units, fresh.paths))
        return replace(self, layers=dump_module(self.layers, self.names), fresh=fresh)

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The stage's module, and the generator's state after it."""
        layers = load_module(self.layers) if isinstance(self.layers, bytes) else self.layers
        if self.fresh is None:
            modules, state = build_layers(layers, self.generator_state)
        else:
            units = load_module(self.fresh.units) if isinstance(self.fresh.units, bytes) else self.fresh.units
            modules, state = replace(self.fresh, units=units).build(layers, self.names or ("",), self.generator_state)
        stage = Chain(modules, self.names, first=self.first) if self.names else modules[0]
        if self.stored is not None:
            self.stored.fill(stage)
        return stage, state


def _copied(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """With modules of its own, copied all at once; one that stands twice is there twice."""
    copied = copy_module(nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)]))._modules.values()
    copies = iter([module for module in copied if module is not None])
    return tuple(next(copies) if isinstance(layer, nn.Module) else layer for layer in layers)


@dataclass(frozen=True)
class Seat:
    """Which of a host's workers this is, and which device was asked for."""

    local_rank: int
    local_world: int
    wanted: str
    share_gpus: bool = False

    def device(self) -> str:
        """The device, on the host that asks.

        Raises:
            PlanError: it is not there.
        """
        count = torch.cuda.device_count() if self.wanted != "cpu" else 0
        return device_for(self.local_rank, self.local_world, self.wanted, os.environ.get("CUDA_VISIBLE_DEVICES"), count, self.share_gpus)


@dataclass(frozen=True)
class Build:
    """What a worker needs to come to life."""

    plan: Plan
    blueprints: Mapping[int, Blueprint]  # by stage
    shell: Shell | None
    names: tuple[str, ...]  # all parameters of the unsplit model, in its order
    loss_fn: LossFn | bytes | None
    seat: Seat
    ties: tuple[Tie, ...] = ()  # parameters on several stages
    shared_buffers: tuple[Tie, ...] = ()
    shared_modules: frozenset[str] = frozenset()  # those that several stages call


@dataclass(frozen=True)
class Built:
    """What a worker tells of itself."""

    host: str
    device: str
    generator_state: torch.Tensor  # of the CPU, after its last layer
