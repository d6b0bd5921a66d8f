"""What each layer costs: forward and backward seconds and bytes, measured on copies with one micro-batch."""

from __future__ import annotations

import copy as copying
import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipe.errors import PlanError
from pipe.partition.deferred import materialise
from pipe.partition.sequence import keywords
from pipe.partition.spec import Layer, LayerSpec

FLOOR = 20e-6  # seconds: what calling a layer costs, so that empty layers are not free
_SLOW = 1.0  # seconds: a layer that takes longer is timed once
_ENOUGH = 0.05  # seconds of timed runs; after these, two runs suffice
_RUNS = 5
_NOISE = 1.5  # layers of one shape whose times differ by no more than this factor count as equal
_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None))


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one micro-batch; backward is 0 where no gradient passes."""

    forward: float  # seconds
    backward: float  # seconds
    parameter_bytes: int
    output_bytes: int

    @property
    def total(self) -> float:
        """Seconds forward and backward, but at least FLOOR."""
        return max(self.forward + self.backward, FLOOR)


@dataclass
class _Timing:
    """One layer's runs. Layers of one shape are equal but for noise; layers that have equal settings, too, surely are."""

    shape: Hashable
    settings: Hashable
    forward: list[float]
    backward: list[float]
    parameter_bytes: int
    output_bytes: int

    @property
    def total(self) -> float:
        return max(median(self.forward) + median(self.backward), FLOOR)


def measure(
    layers: Sequence[Layer],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] = (),
    device: torch.device | str = "cpu",
    copy: Callable[[nn.Module], nn.Module] = copying.deepcopy,
    limit: float = math.inf,
) -> list[LayerCost]:
    """The cost of each layer: the median of a few runs on a copy after a warm-up, one copy in memory at a time.

    The model, its buffers and gradients, the inputs and torch's generators stay as they are. A spec is built and thrown away.
    Hooks do not run on the copies, but those of torch itself (weight_norm is one). Equal layers get the same figures.

    Args:
        args: of the first layer, one micro-batch; each later layer gets the value of the one before.
        kwargs: each goes to the layers whose forward names it.
        names: of the layers; numbered without it.
        copy: gives an independent copy of a layer.
        limit: seconds that one run may take.

    Raises:
        PlanError: a layer raised; its exception is the cause. Or it took longer than `limit`.
    """
    place = torch.device(device)
    timings: list[_Timing] = []
    value, given = pytree.tree_map_only(Tensor, lambda t: t.detach().to(place), (args, dict(kwargs or {})))
    trained = False
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.enable_grad():
        for i, layer in enumerate(layers):
            name = names[i] if names else str(i)
            try:
                own = _ready(layer, copy, place)
                takes = keywords([own], [name], first=i == 0)[name]
                timing, value = _time(own, value, takes.pick(given), trained, place, limit)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"layer {name!r} ({layer!r:.80}) raised {type(error).__name__} while it was measured for an automatic split: {error}; "
                    f"mend the layer, or give split as numbers of layers, which measures nothing"
                ) from error
            trained = trained or any(p.requires_grad for p in own.parameters())
            timings.append(timing)
    return _shared(timings)


def _ready(layer: Layer, copy: Callable[[nn.Module], nn.Module], place: torch.device) -> nn.Module:
    """A layer of our own on the device, without the user's hooks, which might count or print; what is on the meta device is zeros."""
    own = layer.build() if isinstance(layer, LayerSpec) else copy(layer)
    materialise(own, torch.zeros_like, place)
    own = own.to(place)
    for module in own.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
            for key in [key for key, hook in hooks.items() if not _of_torch(hook)]:
                del hooks[key]
        for parameter in module.parameters(recurse=False):
            for registered in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                if registered:
                    registered.clear()
    return own


def _of_torch(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


def _time(layer: nn.Module, inputs: Any, kwargs: Any, trained: bool, place: torch.device, limit: float) -> tuple[_Timing, Any]:
    """The layer's runs, and its output as the inputs of the next layer, cut off from its graph."""
    settings = _settings(layer)
    forward, backward, output = _runs(layer, inputs, kwargs, trained, place, limit)
    if not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(output)):
        with torch.no_grad():  # tensors within an unknown object cannot be cut off from their graph
            given, named = _fresh(inputs, kwargs, False)
            output = layer(*given, **named)
    sizes = _nbytes(layer.parameters()), _nbytes(_tensors(output))
    shape = (_shape(layer), _signature((inputs, kwargs)), _signature(output), trained)
    return _Timing(shape, settings, forward, backward, *sizes), (pytree.tree_map_only(Tensor, Tensor.detach, output),)


def _runs(
    layer: nn.Module, inputs: Any, kwargs: Any, trained: bool, place: torch.device, limit: float
) -> tuple[list[float], list[float], Any]:
    """The seconds forward and backward of each timed run, and the last output."""
    forwards: list[float] = []
    backwards: list[float] = []
    forward, backward, _ = _run(layer, *_fresh(inputs, kwargs, trained), place)  # warm-up
    if forward + backward > limit:
        raise PlanError(f"one run took {forward + backward:.3g} s and the time-out is {limit:g} s; what takes so long cannot be measured")
    while True:
        forward, backward, output = _run(layer, *_fresh(inputs, kwargs, trained), place)
        forwards.append(forward)
        backwards.append(backward)
        enough = sum(forwards + backwards) > _ENOUGH or len(forwards) == _RUNS
        if forward + backward > _SLOW or (enough and len(forwards) > 1):
            return forwards, backwards, output


def _run(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device) -> tuple[float, float, Any]:
    """Seconds forward, seconds backward, and the output."""
    began = _now(place)
    output = layer(*inputs, **kwargs)
    forward = _now(place) - began
    ends = [t for t in _tensors(output) if t.requires_grad]
    if not ends:
        return forward, 0.0, output
    seeds = [torch.ones_like(t) for t in ends]
    began = _now(place)
    torch.autograd.backward(ends, seeds)
    return forward, _now(place) - began, output


def _now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


def _fresh(inputs: Any, kwargs: Any, trained: bool) -> tuple[Any, Any]:
    """Copies that the layer may write in place; where a layer before is trained, they are no leaves and require a gradient."""

    def enter(tensor: Tensor) -> Tensor:
        asks = trained and (tensor.is_floating_point() or tensor.is_complex())
        return tensor.detach().requires_grad_(asks).clone()

    return pytree.tree_map_only(Tensor, enter, inputs), pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _signature(value: Any) -> Hashable:
    return tuple((tuple(t.shape), t.dtype) for t in _tensors(value))


def _shape(layer: nn.Module) -> Hashable:
    held = [*layer.named_parameters(), *layer.named_buffers()]
    tensors = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in held)
    return tuple(type(module) for module in layer.modules()), tensors


def _settings(layer: nn.Module) -> Hashable:
    """The plain attributes of the layer and its parts: a stride, a rate, a number."""
    plain = (int, float, str, bool, tuple, type(None))
    return tuple(
        (key, repr(value)) for module in layer.modules() for key, value in sorted(vars(module).items()) if isinstance(value, plain)
    )


def _shared(timings: list[_Timing]) -> list[LayerCost]:
    """One cost a layer; equal layers share the median of all their runs, so that noise does not tell them apart.

    Layers of one shape whose settings differ are equal if their times are: a layer's own number changes no time, a stride does.
    """
    shapes: dict[Hashable, list[float]] = defaultdict(list)
    for t in timings:
        shapes[t.shape].append(t.total)
    keys = [t.shape if max(shapes[t.shape]) <= _NOISE * min(shapes[t.shape]) else (t.shape, t.settings) for t in timings]
    runs: dict[Hashable, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for key, t in zip(keys, timings):
        runs[key][0].extend(t.forward)
        runs[key][1].extend(t.backward)
    return [LayerCost(median(runs[key][0]), median(runs[key][1]), t.parameter_bytes, t.output_bytes) for key, t in zip(keys, timings)]
