"""The user's model as the engine sees it: its layers, its names, and its weights before and after training."""

from __future__ import annotations

import inspect
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pipe.captured import Captured
from pipe.errors import PlanError
from pipe.follower import Follower, StaleWarning
from pipe.origin import Origin
from pipe.partition import ties
from pipe.partition.deferred import Fresh
from pipe.partition.sequence import Chain, Keywords, keywords, layers_of, resolve, route
from pipe.partition.spec import Layer, LayerSpec, skeleton
from pipe.partition.ties import Tie
from pipe.weights import Weights


class Model:
    """A module, a list of modules, or a list of LayerSpecs; `whole` has the unsplit names (specs on the meta device)."""

    def __init__(self, model: nn.Module | Sequence[Layer], weights: str | os.PathLike[str] | None = None) -> None:
        """Takes the model as it is; `weights`: a safetensors file or folder.

        Raises:
            PlanError: it is none of these, or has parameters without a shape yet; or the weights are not the model's.
        """
        if not isinstance(model, (nn.Module, list, tuple)):
            raise PlanError(f"model is a {type(model).__name__}; it is an nn.Module, a list of modules, or a list of pipe.LayerSpec")
        self.given = model
        self.layers = layers_of(model)
        self.whole = self._whole()
        lazy = [name for name, p in self.whole.named_parameters() if is_lazy(p)]
        if lazy:
            raise PlanError(
                f"parameter {lazy[0]!r} has no shape yet; stages are cut from a model with shapes: run it once on a small batch first"
            )
        self.parameters = list(self.whole.named_parameters())
        self.origin = Origin(self.whole, self._specs(), weights)
        self.generator_state = torch.get_rng_state()  # from which layers are built and initialised
        self.captured: Captured | None = None  # of a module that is no sequence
        self._parts: tuple[tuple[int, ...], list[nn.Module]] | None = None
        self.takes: Mapping[str, Keywords] = self._takes()
        self._hooks: list[Any] = []
        self._versions: list[int] = []  # of the parameters, when `written` was last asked

    @property
    def _modules(self) -> list[nn.Module]:
        return [m for m in self.whole._modules.values() if m is not None]

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of all parameters, a tied one once, in the model's order."""
        return tuple(name for name, _ in self.parameters)

    @property
    def least_rows(self) -> int:
        """How many rows a micro-batch has at least: BatchNorm needs two values a channel."""
        return 2 if any(isinstance(module, _BatchNorm) for module in self.whole.modules()) else 1

    @property
    def forward_names(self) -> tuple[str, ...]:
        """Names of the positional arguments of the model's forward, or of its first layer's."""
        first = self.whole if self.layers is None else next(iter(self.whole._modules.values()))
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            found = inspect.signature(first.forward).parameters.values() if first is not None else ()
        except (TypeError, ValueError):
            return ()
        return tuple(p.name for p in found if p.kind in kinds)

    @property
    def most_arguments(self) -> int | None:
        """How many positional arguments forward takes at most; None where that is not known."""
        first = self.whole if self.layers is None else next(iter(self.whole._modules.values()))
        try:
            found = inspect.signature(first.forward).parameters.values() if first is not None else ()
        except (TypeError, ValueError):
            return None
        return None if any(p.kind is p.VAR_POSITIONAL for p in found) else len(self.forward_names)

    @property
    def argument_names(self) -> tuple[str, ...] | None:
        """Names of all arguments that the model takes; None where it takes any."""
        if self.layers is None:
            try:
                found = inspect.signature(self.whole.forward).parameters.values()
            except (TypeError, ValueError):
                return None
            return None if any(p.kind is p.VAR_KEYWORD for p in found) else tuple(p.name for p in found)
        if any(takes.everything for takes in self.takes.values()):
            return None
        return (*self.forward_names, *sorted({name for takes in self.takes.values() for name in takes.names} - set(self.forward_names)))

    def capture(self, given: Mapping[str, Any]) -> None:
        """Makes the graph of a module that is no sequence, from the arguments of one micro-batch, by name.

        Raises:
            PlanError: it cannot be captured.
        """
        self.captured = Captured(self.whole, given)

    def resolve(self, split: object, stages: int) -> tuple[int, ...] | None:
        """Layers, or nodes of the graph, per stage as asked for, or the only possibility; None where they are to be measured.

        Raises:
            PlanError: the split does not fit, or see `check`.
        """
        if self.captured is not None:
            if split == "auto":
                return None
            if isinstance(split, str) or not isinstance(split, Sequence) or not all(isinstance(name, str) for name in split):
                raise PlanError(f'split={split!r} for a captured model; it is "auto", or names of modules that begin a stage: give names')
            counts: tuple[int, ...] | None = self.captured.layers.begins(list(split), stages)
        else:
            assert self.layers is not None
            counts = resolve(split, self.layers.names, stages)
            if counts is None and stages in (1, len(self.layers)):
                counts = (len(self.layers),) if stages == 1 else (1,) * stages
        if counts is not None:
            self.check(counts)
        return counts

    def parts(self, counts: Sequence[int]) -> list[nn.Module]:
        """A module for each stage of a cut, with the unsplit names; of a sequence, one that only holds the layers."""
        if self.layers is None and not counts:
            return [self.whole]
        if self.captured is not None:
            if self._parts is None or self._parts[0] != tuple(counts):
                self._parts = tuple(counts), self.captured.layers.parts(counts)
            return self._parts[1]
        parts = []
        modules = iter(self.whole._modules.items())
        for count in counts:
            part = nn.Module()
            part._modules.update(itertools.islice(modules, count))
            parts.append(part)
        return parts

    def fresh(self, counts: Sequence[int]) -> Fresh | None:
        """How the workers make the values of what is on the meta device; None: nothing is, or it comes from a file."""
        if self.layers is not None:
            return self.origin.fresh(self.layers.names)
        if self.captured is None or not counts:
            return self.origin.fresh({""})
        graphs = [part.graph for part in self.parts(counts) if isinstance(part, fx.GraphModule)]
        called = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_module"}
        of_torch = {path for path, m in self.whole.named_modules() if _is_of_torch(m) and (m._parameters or m._buffers)}
        return self.origin.fresh(called | of_torch)

    def check(self, counts: Sequence[int]) -> None:
        """Refuses a cut after which stages would silently disagree on what they share.

        Raises:
            PlanError: see `pipe.partition.ties.check`.
        """
        ties.check(self.parts(counts), self.whole)

    def ties(self, counts: Sequence[int], *, buffers: bool = False) -> tuple[Tie, ...]:
        """The parameters, or buffers, that the cut gives to several stages."""
        return ties.find(self.parts(counts), self.whole, buffers=buffers)

    def in_order(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What the stages hold by full name, in the order of the unsplit model's state_dict."""
        if self.captured is None:
            return dict(found)
        place: dict[str, int] = {}
        for path, module in self.whole.named_modules(remove_duplicate=False):
            for name in [*module._parameters, *module._buffers, "_extra_state"]:
                place.setdefault(f"{path}.{name}" if path else name, len(place))
        return dict(sorted(found.items(), key=lambda item: place.get(item[0], len(place))))

    def stage_of(self, name: str, counts: Sequence[int]) -> int:
        """The first stage that holds a parameter or buffer."""
        parts = self.parts(counts)
        return next((s for s, part in enumerate(parts) if name in {n for n, _ in _tensors(part)}), 0)

    def lost_keywords(self, given: Mapping[str, Any]) -> str:
        """What is wrong with keyword arguments that no layer takes; empty if nothing is."""
        return route(self.takes, given) if self.layers is not None else ""

    def takes_keyword(self, name: str) -> bool:
        """Whether forward, or some layer's, names this argument or takes any."""
        names = self.argument_names
        return names is None or name in names

    def stage(self, s: int, counts: Sequence[int]) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
        """Names and layers of stage s."""
        assert self.layers is not None
        begin = sum(counts[:s])
        cut = slice(begin, begin + counts[s])
        return self.layers.names[cut], self.layers.layers[cut]

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes trained parameters and buffers back into the user's model, in place."""
        with torch.no_grad():
            own = dict(self.whole.named_parameters(remove_duplicate=False)) | dict(self.whole.named_buffers(remove_duplicate=False))
            for name, tensor in tensors.items():
                if name in own:
                    own[name].copy_(tensor)
                else:  # a buffer that was None when the engine was made
                    path, _, buffer = name.rpartition(".")
                    self.whole.get_submodule(path).register_buffer(buffer, tensor)
        self.written()

    def even(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with one value for all names of a shared tensor: the last that it holds, as if it were loaded in the model's order."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in _tensors(self.whole):
            groups[id(tensor)].append(name)
        evened = dict(state)
        for group in groups.values():
            given = [name for name in group if name in state]
            evened.update(dict.fromkeys(group, state[given[-1]]) if given and len(group) > 1 else {})
        return evened

    def sources(self, folder: Path) -> dict[str, str]:
        """The name in a checkpoint of each tensor of the model's state_dict, a shared one under any of its own names.

        Raises:
            PlanError: the checkpoint is another model's.
        """
        found, groups = Weights(str(folder)).names, defaultdict[int, list[str]](list)
        for name, value in self.whole.state_dict(keep_vars=True).items():
            groups[id(value)].append(name)
        sources = {name: next((other for other in own if other in found), "") for own in groups.values() for name in own}
        lost, unknown = [name for name, source in sources.items() if not source], found - sources.keys()
        if lost or unknown:
            raise PlanError(
                f"the checkpoint {str(folder)!r} is another model's: it lacks {len(lost)} of its tensors ({', '.join(lost[:3])}) and has "
                f"{len(unknown)} others ({', '.join(sorted(unknown)[:3])}): build the model as it was when the checkpoint was saved"
            )
        return sources

    def written(self) -> str | None:
        """The name of a parameter of the user's model that was written to in place since this was last asked; None: none was."""
        now = [0 if p.is_meta else p._version for _, p in self.parameters]
        found = next((name for (name, _), old, new in zip(self.parameters, self._versions, now) if old != new), None)
        self._versions = now
        return found

    def follow(self, stale: Callable[[], bool], load: Callable[[dict[str, Any]], None]) -> None:
        """From now on warns once when the user's model is used while its weights are older than those of the stages, and passes on
        what is loaded into it."""
        if self.origin.homeless:
            return
        self.written()  # what was before is in the stages
        look = Follower(StaleWarning(stale))
        modules = {"": self.given} if isinstance(self.given, nn.Module) else {f"{i}.": m for i, m in enumerate(self.given)}
        for prefix, module in modules.items():
            self._hooks.append(module.register_forward_pre_hook(look))
            self._hooks.append(module.register_state_dict_pre_hook(look))  # type: ignore[no-untyped-call]
            self._hooks.append(module.register_load_state_dict_post_hook(Follower(partial(_loaded, prefix, load))))

    def release(self) -> None:
        """Removes what `follow` put into the user's model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _whole(self) -> nn.Module:
        if self.layers is None:
            assert isinstance(self.given, nn.Module)
            return self.given
        return Chain(skeleton(self.layers.layers, self.layers.names), self.layers.names)

    def _specs(self) -> dict[str, LayerSpec]:
        if self.layers is None:
            return {}
        return {name: layer for name, layer in zip(self.layers.names, self.layers.layers) if isinstance(layer, LayerSpec)}

    def _takes(self) -> Mapping[str, Keywords]:
        if self.layers is None:
            return {}
        return keywords(self._modules, self.layers.names)


def _loaded(prefix: str, load: Callable[[dict[str, Any]], None], module: nn.Module, keys: Any) -> None:
    """A load_state_dict of the user's model, or of one of its layers, ends: the stages take over its values."""
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    load({prefix + name: value.detach() for name, value in own.items()})


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
