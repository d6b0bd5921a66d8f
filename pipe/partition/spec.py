"""LayerSpec: a layer that is described here and built where it works, so that a model may be larger than the controller's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from pipe.errors import PlanError


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LayerSpec:
    """How to make a layer: a callable that gives an nn.Module, and its arguments.

    The same spec twice in a list describes two layers with weights of their own. The callable runs at least twice: for the
    skeleton on the meta device, and for the layer itself on the worker that owns it.
    """

    cls: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, cls: Callable[..., nn.Module], /, *args: Any, **kwargs: Any) -> None:
        if not callable(cls):
            raise PlanError(f"LayerSpec got {cls!r}; it takes what makes an nn.Module: write LayerSpec(nn.Linear, 8, 8)")
        object.__setattr__(self, "cls", cls)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)

    def build(self) -> nn.Module:
        """The layer, made now, on the default device and with the default generator.

        Raises:
            PlanError: the callable gave something else than an nn.Module.
        """
        made: object = self.cls(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise PlanError(f"{self!r} gave a {type(made).__qualname__}; a layer is an nn.Module: let it return one")
        return made

    def __repr__(self) -> str:
        given = [repr(a) for a in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"LayerSpec({', '.join([getattr(self.cls, '__qualname__', repr(self.cls)), *given])})"


Layer: TypeAlias = nn.Module | LayerSpec

_BUILDING = threading.Lock()  # the default generator is the process's: one list of layers at a time


def skeleton(layers: Sequence[Layer], names: Sequence[str] = ()) -> list[nn.Module]:
    """The layers with specs built on the meta device: names, shapes and signatures, no memory, no random number drawn.

    Layers that are built already are given back as they are.

    Args:
        names: of the layers, for messages; without it they are numbered.

    Raises:
        PlanError: a constructor fails on the meta device.
    """
    made: list[nn.Module] = []
    with _BUILDING, torch.random.fork_rng(devices=[]):
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Module):
                made.append(layer)
                continue
            try:
                with torch.device("meta"):
                    made.append(layer.build())
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"layer {names[i] if names else i!r}: {layer!r} raised {type(error).__name__}: {error}; a spec is built on the "
                    f"meta device first, where tensors have no values: use no tensor's values in its constructor, or give the module itself"
                ) from error
    return made


def build_layers(layers: Sequence[Layer], generator_state: torch.Tensor) -> tuple[list[nn.Module], torch.Tensor]:
    """The layers, built in order from a state of the CPU generator, and the state after them.

    Handed from stage to stage, the state gives the weights of one process that builds all layers in order. The process's own
    generator is as before, afterwards.

    Args:
        layers: specs; layers that are built already pass through and draw nothing.
        generator_state: as `torch.get_rng_state()` gives it.
    """
    with drawing(generator_state):
        made = [layer if isinstance(layer, nn.Module) else layer.build() for layer in layers]
        return made, torch.get_rng_state()


@contextmanager
def drawing(generator_state: torch.Tensor) -> Iterator[None]:
    """Meanwhile the CPU generator is ours, from this state on; it is the process's, so one thread at a time has it."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator_state)
        yield
