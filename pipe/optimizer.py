"""Shell copies of the user's optimizer on the workers, gradients' norms, and clipping.

The user's own optimizer on the controller (front.py) stays the source of truth: each step carries lr, momentum, weight decay and the
rest of its groups, so every torch scheduler works.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]
NOT_CARRIED = ("param_groups", "state", "step", "zero_grad")


@dataclass(frozen=True)
class Shell:
    """An optimizer without parameters: what a worker needs to make its own copy.

    `groups` are the front's, with "params" replaced by the parameters' full names; `state` is by full name.
    """

    cls: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: Groups
    state: Mapping[str, Mapping[str, Any]]

    @property
    def copies(self) -> int:
        """How many tensors of a parameter's size it keeps for each, about: 2 for Adam and its kin, 1 for momentum."""
        if any("betas" in group for group in self.groups):
            return 2
        return int(any(group.get("momentum") for group in self.groups))

    def only(self, names: set[str]) -> Shell:
        """The part of it that concerns these parameters."""
        return Shell(self.cls, self.attributes, self.groups, {name: kept for name, kept in self.state.items() if name in names})

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """A copy over a worker's parameters (full name -> parameter); None where it holds none of them.

        Made by `cls.__new__` with the attributes of the original, since constructors differ from `defaults` (AdamW) and would
        lose a warm state.
        """
        made: torch.optim.Optimizer = self.cls.__new__(self.cls)
        made.__dict__.update({key: held(copy.deepcopy(value), parameters) for key, value in self.attributes.items()})
        made.param_groups = [{**copy.deepcopy(g), "params": [parameters[n] for n in g["params"] if n in parameters]} for g in self.groups]
        made.state = defaultdict(dict)
        if not any(group["params"] for group in made.param_groups):
            return None
        for name, kept in self.state.items():
            if name in parameters:
                made.state[parameters[name]] = state_on(kept, parameters[name])
        torch.optim.Optimizer.__setstate__(made, {})  # makes the hook tables and the profiled step
        return made


@dataclass(frozen=True)
class _Name:
    """Stands for a parameter in an optimizer's own attributes."""

    name: str


def named(value: Any, names: Mapping[int, str]) -> Any:
    """The value with names in place of the model's parameters, also inside lists, tuples and dicts."""
    if isinstance(value, nn.Parameter) and id(value) in names:
        return _Name(names[id(value)])
    if type(value) in (list, tuple):
        return type(value)(named(item, names) for item in value)
    if type(value) in (dict, defaultdict):
        return {named(key, names): named(item, names) for key, item in value.items()}
    return value


def held(value: Any, parameters: Mapping[str, nn.Parameter]) -> Any:
    """The inverse of `_named` on a worker; a parameter that it does not hold is left out."""
    if isinstance(value, _Name):
        return parameters.get(value.name)
    if type(value) in (list, tuple):
        return type(value)(held(item, parameters) for item in value if _is_here(item, parameters))
    if type(value) is dict:
        return {held(k, parameters): held(v, parameters) for k, v in value.items() if _is_here(k, parameters) and _is_here(v, parameters)}
    return value


def _is_here(value: Any, parameters: Mapping[str, nn.Parameter]) -> bool:
    return not isinstance(value, _Name) or value.name in parameters


def state_on(kept: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's state, copied; what has the parameter's shape goes to its device (step counters stay where they were)."""
    placed = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
            if value.shape == parameter.shape and value.dim() and not parameter.is_meta:
                value = value.to(parameter.device)
        placed[key] = value if isinstance(value, Tensor) else copy.deepcopy(value)
    return placed


def apply_groups(optimizer: torch.optim.Optimizer, groups: Groups, parameters: Mapping[str, nn.Parameter]) -> None:
    """Takes over the front's groups: lr, momentum and the rest, and which parameters they hold, since groups may be added."""
    del optimizer.param_groups[len(groups) :]
    optimizer.param_groups += [{} for _ in range(len(groups) - len(optimizer.param_groups))]
    for own, front in zip(optimizer.param_groups, groups):
        own.update({**front, "params": [parameters[name] for name in front["params"] if name in parameters]})


def norms(parameters: Mapping[str, nn.Parameter], norm_type: float) -> dict[str, Tensor]:
    """The gradient's norm of each parameter that has one, 0-dim, on the CPU; a sparse gradient's by its coalesced values."""
    found = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            found[name] = torch.linalg.vector_norm(values, norm_type).cpu()
    return found


def total_norm(by_name: Mapping[str, Tensor], order: Sequence[str], norm_type: float) -> Tensor:
    """The norm over all parameters, from each one's, in the order of the unsplit model: bit for bit what
    `torch.nn.utils.clip_grad_norm_` finds on one device. 0 where there is no gradient."""
    listed = [by_name[name] for name in order if name in by_name]
    return torch.linalg.vector_norm(torch.stack(listed), norm_type) if listed else torch.tensor(0.0)


def scale_gradients(parameters: Mapping[str, nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Multiplies every gradient by `max_norm / (total + 1e-6)`, at most 1.

    Source: `torch.nn.utils.clip_grads_with_norm_`, whose formula this is, so that bits agree.
    """
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters.values():
        gradient = parameter.grad
        if gradient is not None:
            (gradient._values() if gradient.is_sparse else gradient).mul_(factor.to(gradient.device))
