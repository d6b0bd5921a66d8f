"""The user's optimizer on the controller (the front), and its shell copies on the workers.

The front's groups stay the source of truth: each step carries lr, momentum, weight decay and the rest, so every torch scheduler
works. Its parameters never get a gradient on the controller, so its own step changes nothing there; a hook before that step
makes the workers step.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipe.errors import OptimizerError

Groups = list[dict[str, Any]]
_NOT_CARRIED = ("param_groups", "state", "step", "zero_grad")


@dataclass(frozen=True)
class Shell:
    """An optimizer without parameters: what a worker needs to make its own copy.

    `groups` are the front's, with "params" replaced by the parameters' full names; `state` is by full name.
    """

    cls: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: Groups
    state: Mapping[str, Mapping[str, Any]]

    def only(self, names: set[str]) -> Shell:
        """The part of it that concerns these parameters."""
        return Shell(self.cls, self.attributes, self.groups, {name: kept for name, kept in self.state.items() if name in names})

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """A copy over a worker's parameters (full name -> parameter); None where it holds none of them.

        Made by `cls.__new__` with the attributes of the original, since constructors differ from `defaults` (AdamW) and would
        lose a warm state.
        """
        made: torch.optim.Optimizer = self.cls.__new__(self.cls)
        made.__dict__.update(copy.deepcopy(dict(self.attributes)))
        made.param_groups = [{**copy.deepcopy(g), "params": [parameters[n] for n in g["params"] if n in parameters]} for g in self.groups]
        made.state = defaultdict(dict)
        if not any(group["params"] for group in made.param_groups):
            return None
        for name, kept in self.state.items():
            if name in parameters:
                made.state[parameters[name]] = state_on(kept, parameters[name])
        torch.optim.Optimizer.__setstate__(made, {})  # makes the hook tables and the profiled step
        return made


def state_on(kept: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's state, copied; what has the parameter's shape goes to its device (step counters stay where they were)."""
    placed = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
            if value.shape == parameter.shape and value.dim():
                value = value.to(parameter.device)
        placed[key] = value if isinstance(value, Tensor) else copy.deepcopy(value)
    return placed


def apply_groups(optimizer: torch.optim.Optimizer, groups: Groups, parameters: Mapping[str, nn.Parameter]) -> None:
    """Takes over the front's groups: lr, momentum and the rest, and which parameters they hold, since groups may be added."""
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


class Front:
    """Ties the user's optimizer to the workers: its `step()` and `zero_grad()` do what the engine's do."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, step: Callable[[], None], zero_grad: Callable[[], None]
    ) -> None:
        """`names`: id of each of the model's parameters -> its full name.

        Raises:
            OptimizerError: its step needs a closure, or it holds parameters that are not the model's.
        """
        _check(optimizer, names)
        self.optimizer = optimizer
        self._names = names
        self._step = step
        self._quiet = False
        self._own_zero_grad = optimizer.zero_grad
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._zero_grad = zero_grad
        optimizer.zero_grad = self._zero  # type: ignore[method-assign]

    def shell(self) -> Shell:
        """A copy of it by names, to be sent to the workers."""
        front = self.optimizer
        attributes = {k: v for k, v in vars(front).items() if k not in _NOT_CARRIED and "hook" not in k}
        state = {self._names[id(p)]: dict(kept) for p, kept in front.state.items() if id(p) in self._names}
        meta = [name for name, kept in state.items() if any(isinstance(v, Tensor) and v.is_meta for v in kept.values())]
        if meta:
            raise OptimizerError(
                f"{type(front).__name__} made state for {meta[0]!r}, which is not built on the controller; layers given as LayerSpec need "
                "an optimizer that makes its state at the first step: SGD, Adam, AdamW, or build the model here"
            )
        return Shell(type(front), attributes, self.groups(), state)

    def groups(self) -> Groups:
        """Its groups now, with names in place of parameters; a tensor (a learning rate, say) is copied."""
        _check(self.optimizer, self._names)
        return [
            {
                key: [self._names[id(p)] for p in value] if key == "params" else copy.deepcopy(value)
                for key, value in group.items()
                if key != "param_names"
            }
            for group in self.optimizer.param_groups
        ]

    def stepped(self) -> None:
        """Tells it, and so its schedulers, that the workers have stepped."""
        self._quiet = True
        try:
            self.optimizer.step()
        finally:
            self._quiet = False

    def release(self) -> None:
        """Gives the optimizer back as it was."""
        self._hook.remove()
        vars(self.optimizer).pop("zero_grad", None)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise OptimizerError("optimizer.step got a closure, which cannot run on the stages: call engine.forward_backward, then step()")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # a gradient left on the controller would move its stale weights
        if not self._quiet:
            self._step()

    def _zero(self, set_to_none: bool = True) -> None:
        self._own_zero_grad(set_to_none)
        self._zero_grad()


def _check(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__}; it is a torch.optim.Optimizer, or a callable from named parameters to one"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step needs a closure that evaluates the whole model several times a step, which stages cannot: "
            "use an optimizer that steps from gradients, such as AdamW or SGD"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in names]
    if foreign:
        raise OptimizerError(
            f"{len(foreign)} of the optimizer's {len(held)} parameters are not the model's (one has shape {tuple(foreign[0].shape)}); "
            "it is built over model.parameters(): build it from the model that the engine gets, or pass a callable"
        )
