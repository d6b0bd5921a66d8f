"""The user's optimizer on the controller, tied to the workers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipe.errors import OptimizerError
from pipe.optimizer import NOT_CARRIED, Groups, Shell, named, state_on

State = Mapping[str, Mapping[str, Any]]  # by full parameter name


@dataclass(frozen=True)
class Workers:
    """What the front has the workers do."""

    step: Callable[[], None]
    zero_grad: Callable[[bool], None]  # set_to_none
    state: Callable[[], State | None]  # None: there are no workers, and the front's own state holds
    load: Callable[[State], None]


class Front:
    """The front: its `step()`, `zero_grad()`, `state_dict()` and `load_state_dict()` do what the engine's do.

    Its groups are the source of truth; its parameters never get a gradient here, so its own step changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], workers: Workers) -> None:
        """`names`: id of each of the model's parameters -> its full name.

        Raises:
            OptimizerError: its step needs a closure, or it holds parameters that are not the model's.
        """
        _check(optimizer, names)
        self.optimizer = optimizer
        self._names = names
        self._workers = workers
        self._quiet = False
        self._released = False
        self._zero_grad_before = vars(optimizer).get("zero_grad")  # another engine's, say
        self._own_zero_grad = optimizer.zero_grad
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.fetch()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._push()),
        ]
        self._zero_grad = self._zero  # one object, to know it again
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def shell(self) -> Shell:
        """A copy of it by names, to be sent to the workers."""
        front = self.optimizer
        attributes = {k: named(v, self._names) for k, v in vars(front).items() if k not in NOT_CARRIED and "hook" not in k}
        state = self._state()
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

    def fetch(self) -> None:
        """Takes the workers' state home, so that `state_dict()` has it."""
        state = self._workers.state()
        if state is None:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state.pop(parameter, None)
                if kept := state.get(self._names[id(parameter)]):
                    self.optimizer.state[parameter] = state_on(kept, parameter)

    def restore(self, groups: Groups, state: State) -> None:
        """Takes over what a checkpoint kept: the groups' settings, and the state by full parameter name.

        Raises:
            OptimizerError: it has other groups.
        """
        own = self.groups()
        if [group["params"] for group in own] != [group["params"] for group in groups]:
            raise OptimizerError(
                f"the checkpoint's optimizer has {len(groups)} groups and this one {len(own)}, or they hold other parameters; groups are "
                "the same: build the optimizer as it was built when the checkpoint was saved"
            )
        for group, kept in zip(self.optimizer.param_groups, groups):
            group.update({key: _like(value, group.get(key)) for key, value in kept.items() if key != "params"})
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state.pop(parameter, None)
                if own_state := state.get(self._names[id(parameter)]):
                    self.optimizer.state[parameter] = state_on(own_state, parameter)

    def _push(self) -> None:
        state = self._state()
        self._workers.load({name: state.get(name, {}) for name in self._names.values()})

    def release(self) -> None:
        """Gives the optimizer back as it was."""
        self._released = True
        for hook in self._hooks:
            hook.remove()
        if vars(self.optimizer).get("zero_grad") is self._zero_grad:
            if self._zero_grad_before is None:
                del self.optimizer.zero_grad
            else:
                self.optimizer.zero_grad = self._zero_grad_before  # type: ignore[method-assign]

    def _state(self) -> dict[str, dict[str, Any]]:
        return {self._names[id(p)]: dict(kept) for p, kept in self.optimizer.state.items() if id(p) in self._names}

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise OptimizerError("optimizer.step got a closure, which cannot run on the stages: call engine.forward_backward, then step()")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # a gradient left on the controller would move its stale weights
        if not self._quiet:
            self._workers.step()

    def _zero(self, set_to_none: bool = True) -> None:
        self._own_zero_grad(set_to_none)
        if not self._released:
            self._workers.zero_grad(set_to_none)


def _like(value: Any, present: Any) -> Any:
    """A setting as it was read, in the form in which it is now: a tensor, a tuple."""
    if isinstance(present, Tensor):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(present, tuple) else value


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
