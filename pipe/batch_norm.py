"""BatchNorm's running statistics once a mini-batch: the pooled ones, not a step a micro-batch.

A layer normalises within its micro-batch, as it must. What it would write into its running buffers goes elsewhere [1]:

    first micro-batch    copies of the running buffers, with the layer's own momentum; if no other follows, they are the result,
                         to the bit. Else the batch's mean is won back: (after - (1 - f) before) / f
    all others           zeros, with momentum 1, which leaves the batch's own mean and unbiased variance
    recomputed in a      zeros that nobody reads, so a checkpointed layer counts once
    backward

At the end the buffers move once, by mean and unbiased variance of all n = sum of n_m values, from sums that add up over replicas:

    mean = sum n_m mean_m / n        var = (sum ((n_m - 1) var_m + n_m mean_m^2) - n mean^2) / (n - 1)

Source: Chan, Golub, LeVeque, 1979, Updating formulae and a pairwise algorithm for computing sample variances, section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_Buffers = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class _Batch:
    """What one forward left: `before` and `after` of the buffers it had, and its factor (1: `after` is the batch's own)."""

    count: int  # values a channel
    before: _Buffers
    after: _Buffers
    factor: float

    def moments(self) -> Tensor:
        """(count, count * mean, (count - 1) * variance + count * mean^2) in a row, float64, on the host."""
        mean, variance = (self._own(before, after) for before, after in zip(self.before[:2], self.after[:2]))  # type: ignore[arg-type]
        n = mean.new_tensor([self.count])
        return torch.cat([n, n * mean, (n - 1) * variance + n * mean * mean])

    def _own(self, before: Tensor, after: Tensor) -> Tensor:
        was, now = before.detach().cpu().double(), after.detach().cpu().double()
        return (now - (1 - self.factor) * was) / self.factor if self.factor else torch.zeros_like(now)


@dataclass
class _Layer:
    """A BatchNorm module, and its batches: [micro-batch][call], since a module may be called several times in a forward."""

    module: Any
    batches: dict[int, list[_Batch]] = field(default_factory=dict)
    entered: list[tuple[_Buffers, _Buffers, float | None, int]] = field(default_factory=list)

    def buffers(self) -> _Buffers:
        return tuple(self.module._buffers.get(name) for name in _BUFFERS)  # type: ignore[return-value]

    def latest(self, micro_batch: int) -> _Buffers:
        """The buffers as the calls before in this micro-batch would have left them."""
        earlier = self.batches.get(micro_batch)
        return earlier[-1].after if earlier else self.buffers()

    def set_buffers(self, buffers: _Buffers) -> None:
        self.module._buffers.update({name: buffer for name, buffer in zip(_BUFFERS, buffers) if name in self.module._buffers})


class PooledStatistics:
    """Collects the statistics of every BatchNorm in `module` in training mode; the running buffers stay as they are until `apply`.

    One call of `module` is one micro-batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: _Layer(each) for name, each in module.named_modules() if _is_tracked(each)}
        self._micro_batch = 0
        if self._layers:
            module.register_forward_pre_hook(_Hook(self._next), prepend=True)
        for layer in self._layers.values():
            layer.module.register_forward_pre_hook(_Hook(self._enter, layer), with_kwargs=True)
            layer.module.register_forward_hook(_Hook(self._leave, layer), always_call=True)

    def moments(self) -> dict[str, Tensor]:
        """Sums over the micro-batches so far, by module name: (calls in a forward, 1 + 2 * channels), float64, on the host.

        A row is n, n * mean, (n - 1) * variance + n * mean^2; add those of other replicas and give the sums to `apply`.
        """
        sums = {}
        for name, layer in self._layers.items():
            calls = max((len(batches) for batches in layer.batches.values()), default=0)
            rows = [[batches[j].moments() for batches in layer.batches.values() if j < len(batches)] for j in range(calls)]
            if rows:
                sums[name] = torch.stack([torch.stack(row).sum(0) for row in rows])
        return sums

    @torch.no_grad()
    def apply(self, moments: Mapping[str, Tensor] | None = None) -> None:
        """Moves the running buffers, once a mini-batch, and forgets; without `moments`, by this replica's own."""
        own = moments is None
        sums = self.moments() if moments is None else moments
        for name, layer in self._layers.items():
            if own and len(layer.batches) == 1:
                (batches,) = layer.batches.values()
                for buffer, after in zip(layer.buffers(), batches[-1].after):
                    if buffer is not None and after is not None:
                        buffer.copy_(after)
            else:
                for row in sums.get(name, ()):
                    _move(layer, row)
        self.drop()

    def drop(self) -> None:
        """Forgets what was collected: a step that failed leaves no trace."""
        self._micro_batch = 0
        for layer in self._layers.values():
            layer.batches.clear()

    def _next(self, *_: Any) -> None:
        self._micro_batch += 1

    def _enter(self, layer: _Layer, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        x = args[0] if args else kwargs["input"]
        real, count = layer.buffers(), x.numel() // max(1, x.shape[1] if x.dim() > 1 else 1)
        first = not _recomputes() and layer.batches.keys() <= {self._micro_batch}
        before = layer.latest(self._micro_batch) if first else _each(torch.zeros_like, real)
        layer.entered.append((real, before, module.momentum, count))
        layer.set_buffers(_each(torch.clone, before))  # [1]
        if not first:
            module.momentum = 1.0

    def _leave(self, layer: _Layer, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if not layer.entered:
            return
        real, before, momentum, count = layer.entered.pop()
        after = layer.buffers()
        factor = _factor(module.momentum, after[2])
        module.momentum = momentum
        layer.set_buffers(real)
        if output is not None and not _recomputes():  # None: the forward raised
            layer.batches.setdefault(self._micro_batch, []).append(_Batch(count, before, after, factor))


class _Hook:
    """A method as a hook; marked as one that draws no random numbers (see silent.py)."""

    draws_nothing = True

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> None:
        self._method(*self._args, *args)


def _is_tracked(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None and not is_lazy(module.running_mean)


def _recomputes() -> bool:
    """Whether this thread is inside a backward: what runs a forward there is a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


def _each(change: Callable[[Tensor], Tensor], buffers: _Buffers) -> _Buffers:
    mean, variance, tracked = buffers
    return change(mean), change(variance), None if tracked is None else change(tracked)


def _factor(momentum: float | None, tracked: Tensor | None) -> float:
    """The weight of the batch that moved buffers to their present state, as BatchNorm's forward reckons it."""
    if momentum is not None:
        return momentum
    return 1.0 / float(tracked) if tracked is not None else 0.0


def _move(layer: _Layer, row: Tensor) -> None:
    """One step of the running buffers by the pooled statistics of one row of moments."""
    mean_buffer, var_buffer, tracked = layer.buffers()
    if tracked is not None:
        tracked.add_(1)
    factor = _factor(layer.module.momentum, tracked)
    n, channels = row[0], mean_buffer.numel()
    mean = row[1 : 1 + channels] / n
    variance = (row[1 + channels :] - n * mean * mean) / (n - 1)
    for buffer, value in ((mean_buffer, mean), (var_buffer, variance.clamp_(min=0))):
        moved = (1 - factor) * buffer.detach().cpu().double() + factor * value
        buffer.copy_(moved)
