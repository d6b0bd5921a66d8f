"""Where the first values of a model's parameters and buffers come from: its own memory, a file, or its modules' reset_parameters."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pipe.errors import PlanError
from pipe.partition.deferred import Fresh, materialise, on_meta, tensors
from pipe.partition.spec import LayerSpec
from pipe.weights import Weights

_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Stored:
    """The tensors of one stage that come from a file: name in the unsplit model -> name in the file."""

    path: str
    names: Mapping[str, str]

    def fill(self, stage: nn.Module) -> None:
        """Gives memory to what is on the meta device, and reads the values.

        Raises:
            PlanError: the file is not there, or does not fit.
        """
        materialise(stage, torch.empty_like)
        held = dict(tensors(stage))
        Weights(self.path).read({source: held[name] for name, source in self.names.items()})


class Origin:
    """The origin of each parameter and buffer of one model.

    If something is on the meta device, all of that and nothing else gets values; if nothing is, a file is loaded over all.
    """

    def __init__(self, whole: nn.Module, specs: Mapping[str, LayerSpec], weights: str | os.PathLike[str] | None) -> None:
        """`whole`: with the unsplit names, specs on the meta device; `specs`: by the names of their layers.

        Raises:
            PlanError: the weights are not there, or their names are not the model's.
        """
        if weights is not None and not isinstance(weights, (str, os.PathLike)):
            raise PlanError(f"weights is a {type(weights).__name__}; it is the path of a safetensors file or folder: pass that")
        self._whole = whole
        self._specs = specs
        self._path = None if weights is None else os.path.abspath(weights)
        self._meta = on_meta(whole)
        self.stored = {} if self._path is None else self._sources(Weights(self._path).names)
        self._needed = frozenset(name for name in self._meta - self.stored.keys() if name.split(".")[0] not in specs)

    @property
    def homeless(self) -> str:
        """Why the user's model cannot hold what is trained; empty if it can."""
        if self._specs:
            return "layers were given as LayerSpec"
        return f"{min(self._meta)} is on the meta device" if self._meta else ""

    @property
    def is_own(self) -> bool:
        """Whether all values are those of the user's model."""
        return not self.homeless and self._path is None

    @property
    def in_turn(self) -> bool:
        """Whether stages are built one after the other, since each continues the generator of the one before."""
        return bool(self._specs) and not self._needed

    def fresh(self, leaves: Collection[str]) -> Fresh | None:
        """How to make what comes from reset_parameters; None: nothing does. `leaves`: see Fresh.of."""
        return Fresh.of(self._whole, leaves, self._needed, self._specs) if self._needed else None

    def stored_in(self, stage: nn.Module) -> Stored | None:
        """What of a stage comes from a file; None: nothing does."""
        if self._path is None:
            return None
        return Stored(self._path, {name: self.stored[name] for name, _ in tensors(stage) if name in self.stored})

    def _sources(self, found: frozenset[str]) -> dict[str, str]:
        """The name in the file of each tensor that comes from there: one of its own names, the last that the file has."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors(self._whole):
            names[id(tensor)].append(name)
        sources = {}
        for own in names.values():
            if given := [name for name in own if name in found]:
                sources.update(dict.fromkeys(own, given[-1]))
        known = {name for own in names.values() for name in own}
        wanted = set(self._meta or known)
        lost = wanted - sources.keys() - self._not_persistent()
        unknown = set(found) - known
        if lost or unknown:
            said = [f"{len(lost)} names of the model are not in it: {_listed(lost)}"] * bool(lost)
            said += [f"{len(unknown)} names in it are not the model's: {_listed(unknown)}"] * bool(unknown)
            raise PlanError(
                f"weights {self._path!r}: {'; '.join(said)}; it has the names of the unsplit model's state_dict, a tied weight under any "
                "of its own: rename them there, or build what it lacks on a real device"
            )
        return {name: source for name, source in sources.items() if name in wanted}

    def _not_persistent(self) -> set[str]:
        return {
            f"{path}.{name}" if path else name
            for path, module in self._whole.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (", ..." if len(ordered) > _SHOWN else "")
