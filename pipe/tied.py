"""Weights that are tied across stages: each stage computes with a copy, one owns the weight.

holder --its gradient--> owner: sum, optimizer's step --new value--> holder          once a step, after all have agreed

A holder that has handed its gradient over has none, so nothing counts twice: norms, accumulation over several passes, the user's view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipe.errors import PlanError
from pipe.partition.ties import Tie
from pipe.transport.protocol import Transport
from pipe.wire import pack_list, unpack_list

Parameters = dict[str, nn.Parameter]
_tied = WeakTensorKeyDictionary()  # the parameters of all workers of this process that other stages hold, too
_tied_in: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def tied_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a stage's module that other stages hold, too: its forward must not write to them."""
    if not len(_tied):
        return []
    if module not in _tied_in:
        _tied_in[module] = [parameter for parameter in module.parameters() if parameter in _tied]
    return _tied_in[module]


class TiedWeights:
    """What one worker owns of the tied weights, and what it holds a copy of."""

    def __init__(self, ties: Iterable[Tie], held: Mapping[str, nn.Parameter], index: int, stages: int) -> None:
        """`held`: all parameters of the worker under all full names that its stages give them."""
        first = index - index % stages  # worker of the replica's stage 0
        self._index = index
        self._lent: dict[int, list[nn.Parameter]] = defaultdict(list)  # owned here, by the worker that holds a copy
        self._borrowed: dict[int, list[nn.Parameter]] = defaultdict(list)  # held here, by the worker that owns it
        self.borrowed: Parameters = {}  # by the name in the unsplit model
        for tie in ties:
            for stage, name in tie.names.items():
                if first + stage == index:
                    _tied[held[name]] = tie.name
                if stage == tie.owner:
                    continue
                if first + stage == index:
                    self._borrowed[first + tie.owner].append(held[name])
                    self.borrowed[tie.name] = held[name]
                elif first + tie.owner == index:
                    self._lent[first + stage].append(held[tie.name])

    def owned(self, held: Mapping[str, nn.Parameter], names: Iterable[str]) -> Parameters:
        """The worker's parameters by their names in the unsplit model, without those that it only holds a copy of."""
        copies = {id(parameter) for parameter in self.borrowed.values()}
        return {name: held[name] for name in names if name in held and id(held[name]) not in copies}

    def gather(self, transport: Transport) -> None:
        """Hands the copies' gradients over to their owners, who add them to their own; None stays None."""
        for owner, parameters in self._borrowed.items():
            transport.send(owner, ("tied gradients", self._index), pack_list([p.grad for p in parameters]))
            for parameter in parameters:
                parameter.grad = None
        for holder, parameters in sorted(self._lent.items()):
            come = transport.recv(("tied gradients", holder))
            for parameter, gradient in zip(parameters, unpack_list(come, parameters[0].device)):
                parameter.grad = _sum(parameter.grad, gradient)

    @torch.no_grad()
    def spread(self, transport: Transport) -> None:
        """Gives the copies the owners' values."""
        for holder, parameters in self._lent.items():
            transport.send(holder, ("tied weights", self._index), pack_list(parameters))
        for owner, parameters in self._borrowed.items():
            come = transport.recv(("tied weights", owner))
            for parameter, value in zip(parameters, unpack_list(come, parameters[0].device)):
                assert value is not None
                parameter.copy_(value)


class SharedBuffers:
    """Buffers that several stages hold, each a copy, or that look into another one's memory: fine as long as nobody writes to them."""

    def __init__(self, ties: Iterable[Tie], held: Mapping[int, nn.Module]) -> None:
        """`held`: the worker's modules by stage."""
        self._found = [(tie, held[stage], name) for tie in ties for stage, name in tie.names.items() if stage in held]
        self._seen = self._look()

    def check(self) -> None:
        """After a pass.

        Raises:
            PlanError: one was written to.
        """
        now = self._look()
        for (tie, _, name), before, after in zip(self._found, self._seen, now):
            if before == after:
                continue
            if len(tie.names) > 1:
                raise PlanError(
                    f"buffer {name} was written to, and stages {', '.join(map(str, tie.names))} hold a copy each; a buffer that changes "
                    "lives on one stage: put the layers that share it into one stage with split="
                )
            raise PlanError(
                f"buffer {name} was written to, and another buffer looks into its memory; a stage has a copy of each, which would not see "
                "it: register one buffer and take the view in forward, or make it a .clone()"
            )

    def settled(self) -> None:
        """What is in them now is what was meant: they have been loaded."""
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int]]:
        buffers = {id(module): dict(module.named_buffers(remove_duplicate=False)) for _, module, _ in self._found}
        found = [buffers[id(module)][name] for _, module, name in self._found]
        return [(id(buffer), buffer._version) for buffer in found]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return other + one if one.is_sparse else one + other  # a sparse one is added to a dense one, not the other way round
