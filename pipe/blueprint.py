"""What a worker is made from: its layers or how to build them, its seat, and its part of the optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipe.copying import copy_module, dump_module, load_module
from pipe.loss import LossFn
from pipe.optimizer import Shell
from pipe.partition.sequence import Chain
from pipe.partition.spec import Layer, build_layers
from pipe.partition.ties import Tie
from pipe.placement import device_for
from pipe.plan import Plan


@dataclass(frozen=True)
class Blueprint:
    """One stage's layers under their unsplit names; no names: one module that is the whole model.

    `layers` are pickled bytes where they go to another process. `generator_state` is the CPU generator's before the first of
    them that is a LayerSpec is built, so that weights are those of one process that builds all layers in order.
    """

    layers: tuple[Layer, ...] | bytes
    names: tuple[str, ...]
    first: bool
    generator_state: torch.Tensor

    def copied(self) -> Blueprint:
        """With modules of its own, for a worker in this process; what layers share stays shared."""
        assert not isinstance(self.layers, bytes)
        own = nn.ModuleList([layer for layer in self.layers if isinstance(layer, nn.Module)])
        copied = copy_module(own)._modules.values()  # all at once; a layer that stands twice is there twice
        copies = iter([module for module in copied if module is not None])
        return replace(self, layers=tuple(next(copies) if isinstance(layer, nn.Module) else layer for layer in self.layers))

    def pickled(self) -> Blueprint:
        """As bytes, for a worker in another process."""
        return replace(self, layers=dump_module(self.layers, self.names))

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The stage's module, and the generator's state after it."""
        layers = load_module(self.layers) if isinstance(self.layers, bytes) else self.layers
        modules, state = build_layers(layers, self.generator_state)
        return (Chain(modules, self.names, first=self.first) if self.names else modules[0]), state


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
