"""Deferred layers: modules on the meta device, which get memory and values where they work.

    file:   module on meta --empty--> weights read over it                               (see weights.py)
    fresh:  module on meta --empty--> its own reset_parameters                           in the order in which one process builds

Each worker initialises the units of the whole model one after the other, up to its own last one, and keeps its own: so the random numbers
are those of one process, whatever the cut, also where stages share a weight. A foreign unit's memory is freed at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipe.errors import PlanError
from pipe.partition.spec import Layer, LayerSpec, drawing

WAYS = ("reset_parameters", "_reset_parameters", "reset_buffers")  # nn.MultiheadAttention has the second


def tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all their full names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def on_meta(module: nn.Module) -> frozenset[str]:
    """Full names of the parameters and buffers that have no values."""
    return frozenset(name for name, tensor in tensors(module) if tensor.is_meta)


def replace(module: nn.Module, values: Mapping[int, Tensor]) -> None:
    """Gives the module these tensors for its own, by id; what is tied stays tied, and requires_grad, attributes and hooks stay."""
    found = {id(tensor): tensor for _, tensor in tensors(module)}
    news = {key: _like(found[key], value) for key, value in values.items()}
    for part in module.modules():
        for name, tensor in _own(part).items():
            if id(tensor) in news:
                setattr(part, name, news[id(tensor)])  # not into the dict: an RNN keeps a list of them, too


def materialise(module: nn.Module, make: Callable[..., Tensor], device: torch.device | str = "cpu") -> None:
    """Gives what is on the meta device memory elsewhere; `make`: say torch.empty_like."""
    replace(module, {id(tensor): make(tensor, device=device) for _, tensor in tensors(module) if tensor.is_meta})


@dataclass(frozen=True)
class Fresh:
    """How a model's deferred tensors get their first values: the units that make them, in the order in which one process builds them.

    `units` are pickled bytes where they go to another process.
    """

    units: tuple[Layer, ...] | bytes
    paths: tuple[str, ...]  # of the units, in the unsplit model
    needed: frozenset[str]  # names of the tensors that the units make

    @classmethod
    def of(cls, whole: nn.Module, leaves: Collection[str], needed: Collection[str], specs: Mapping[str, LayerSpec]) -> Fresh:
        """The units of a model: what makes the needed tensors, and its specs.

        Args:
            leaves: paths of the modules that are initialised with those in them; another module is a unit without those in it.
        """
        found = list(_units("", whole, leaves, needed, specs, set()))
        return cls(tuple(unit for _, unit in found), tuple(path for path, _ in found), frozenset(needed))

    def build(self, layers: Sequence[Layer], names: Sequence[str], state: Tensor) -> tuple[list[nn.Module], Tensor]:
        """A stage's layers with their values, specs built, and the generator's state after them.

        Args:
            names: of the layers in the unsplit model.
            state: of the CPU generator before the model's first unit.

        Raises:
            PlanError: a module has no way to fill its tensors.
        """
        specs = {name for name, layer in zip(names, layers) if isinstance(layer, LayerSpec)}
        given = [(path, layer) for path, layer in zip(names, layers) if isinstance(layer, nn.Module)]
        held = {_join(path, name): tensor for path, layer in given for name, tensor in tensors(layer) if tensor.is_meta}
        with drawing(state):
            built, values = self._make(specs, held.keys() & self.needed)
            state = torch.get_rng_state()
        made = [layer if isinstance(layer, nn.Module) else built[name] for name, layer in zip(names, layers)]
        replace(nn.ModuleList(made), {id(held[name]): value for name, value in values.items()})  # all at once: layers may share
        return made, state

    def _make(self, specs: set[str], held: set[str]) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
        """The built layers of these specs, and the values of these tensors."""
        assert not isinstance(self.units, bytes)
        built: dict[str, nn.Module] = {}
        values: dict[str, Tensor] = {}
        called = _names(self.paths, self.units)
        filled: set[int] = set()
        for path, unit in zip(self.paths, self.units):
            if specs <= built.keys() and held <= values.keys():
                break
            if isinstance(unit, LayerSpec):
                module = unit.build()
                built.update({path: module} if path in specs else {})
                continue
            for key, value in _reset(path, unit, self.needed, filled).items():
                values.update({name: value for name in called[key] if name in held})
        return built, values


def _units(
    path: str, module: nn.Module, leaves: Collection[str], needed: Collection[str], specs: Mapping[str, LayerSpec], seen: set[int]
) -> Iterator[tuple[str, Layer]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if path in specs:
        yield path, specs[path]
    elif path in leaves:
        if any(_join(path, name) in needed for name, _ in tensors(module)):
            yield path, module
    else:
        for name, child in module._modules.items():
            if child is not None:
                yield from _units(_join(path, name), child, leaves, needed, specs, seen)
        if any(_join(path, name) in needed for name in _own(module)):
            yield path, _alone(module)


def _names(paths: Sequence[str], units: Sequence[Layer]) -> Mapping[int, list[str]]:
    """All names of each tensor."""
    found: dict[int, list[str]] = defaultdict(list)
    for path, unit in zip(paths, units):
        for name, tensor in tensors(unit) if isinstance(unit, nn.Module) else ():
            found[id(tensor)].append(_join(path, name))
    return found


def _reset(path: str, unit: nn.Module, needed: Collection[str], filled: set[int]) -> dict[int, Tensor]:
    """The values that a unit gives to its needed tensors, by id; the unit itself is on the meta device again.

    Children come first, as in a constructor that ends with reset_parameters. A tensor that several modules share has the value that the
    first gives it; the others draw their numbers and drop them, as they do in one process that ties afterwards.
    """
    at_first = [(module, name, tensor) for module in unit.modules() for name, tensor in _own(module).items()]
    made: dict[int, Tensor] = {}
    for name, module in _children_first(unit, path):
        own = _own(module)
        wanted = {key for key in own if _join(name, key) in needed}
        if not wanted:
            continue
        for key, tensor in own.items():
            if tensor.is_meta:
                setattr(module, key, _like(tensor, _blank(tensor)))
        _fill(name, module, wanted)
        for key in wanted:
            if id(own[key]) not in filled:
                made[id(own[key])] = getattr(module, key)
                filled.add(id(own[key]))
            elif id(own[key]) in made:
                setattr(module, key, made[id(own[key])])
    for module, name, tensor in at_first:
        setattr(module, name, tensor)
    return made


def _fill(path: str, module: nn.Module, wanted: set[str]) -> None:
    """Lets the module fill its own tensors.

    Raises:
        PlanError: it does not, or raises.
    """
    before = {name: (tensor, tensor._version) for name, tensor in _own(module).items() if name in wanted}
    ways = WAYS if any(isinstance(tensor, nn.Parameter) for tensor, _ in before.values()) else WAYS[::-1]
    left = sorted(wanted)
    for way in ways:
        if not left or not callable(getattr(module, way, None)):
            continue
        try:
            with torch.no_grad():
                getattr(module, way)()
        except Exception as error:
            raise PlanError(
                f"{_join(path, way)} raised {type(error).__name__}: {error}; modules are initialised one by one, where nothing else "
                "has values: let it fill its own tensors only, or pass weights="
            ) from error
        left = [name for name in left if _is_blank(getattr(module, name), *before[name])]
    if left:
        raise PlanError(
            f"{', '.join(_join(path, name) for name in left)} on the meta device: {type(module).__name__} has no reset_parameters that "
            f"fills {'it' if len(left) == 1 else 'them'}{_remedy(module, left)}"
        )


def _remedy(module: nn.Module, left: Sequence[str]) -> str:
    if set(left) <= module._non_persistent_buffers_set:
        return ", and no weights file holds a buffer that is not persistent: define reset_buffers, or make it on a real device"
    return ": pass weights= (a safetensors file or folder), define reset_parameters, or make it on a real device"


def _is_blank(now: Tensor, before: Tensor, version: int) -> bool:
    """Whether it is as `_blank` made it: never written to, but for writes to `.data`, which show in the values only."""
    untouched = now is before and now._version == version
    return untouched and (not _has_nan(now) or bool(now.isnan().all()))


def _blank(tensor: Tensor) -> Tensor:
    """Memory for it, filled with what tells that nobody has filled it."""
    return torch.full_like(tensor, float("nan") if _has_nan(tensor) else 0, device="cpu", requires_grad=False)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _like(old: Tensor, value: Tensor) -> Tensor:
    """The value as the tensor was: a parameter or none, its dtype, requires_grad, attributes and hooks."""
    value = value.detach().to(old.dtype)
    before, after = old._backward_hooks or {}, getattr(old, "_post_accumulate_grad_hooks", None) or {}
    new = torch.Tensor._make_subclass(type(old), value, old.requires_grad or bool(before or after))
    vars(new).update(vars(old))
    for hook in before.values():
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after.values():
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return new.requires_grad_(old.requires_grad)


def _alone(module: nn.Module) -> nn.Module:
    """The module without those in it."""
    new: nn.Module = object.__new__(type(module))
    new.__dict__ = {**vars(module), "_modules": {}, "_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
    return new


def _children_first(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    found: dict[nn.Module, str] = {}

    def visit(part: nn.Module, at: str) -> None:
        if part not in found:
            for name, child in part._modules.items():
                if child is not None:
                    visit(child, _join(at, name))
            found.setdefault(part, at)

    visit(module, path)
    return [(at, part) for part, at in found.items()]


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for held in (module._parameters, module._buffers) for name, tensor in held.items() if tensor is not None}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
