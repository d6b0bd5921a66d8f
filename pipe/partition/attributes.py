"""What a forward does to the attributes of its modules: seen, and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONSTANT = "_tensor_constant"  # what fx calls a tensor that is neither a parameter nor a buffer
_DATA = (int, float, str, bytes, set, frozenset, torch.dtype, torch.device)


class State:
    """The attributes of all modules, and what lists, dicts and sets among them hold: a forward may assign or add to them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(name, module, self._look(module)) for name, module in model.named_modules()]
        held = [(name, value) for name, module in model.named_modules() for key, value in vars(module).items() if not key.startswith("_")]
        self._held = [(name, value, type(value)(value)) for name, value in held if type(value) in (list, dict, set)]

    def restore(self) -> set[str]:
        """Puts back what was assigned since; gives the names of the modules where that was."""
        changed = set()
        for name, module, kept in self._kept:
            for key in [key for key in vars(module) if key.startswith(CONSTANT) and key not in kept[0]]:
                del vars(module)[key]  # fx puts it there
            now = self._look(module)
            if any(set(own) != set(was) or any(not _unchanged(own[key], was[key]) for key in was) for own, was in zip(now, kept)):
                changed.add(name)
                for own, was in zip((vars(module), module._parameters, module._buffers, module._modules), kept):
                    own.clear()
                    own.update(was)
        for name, value, held in self._held:
            if not _unchanged(value, held):
                changed.add(name)
                value.clear()
                value.extend(held) if isinstance(value, list) else value.update(held)
        return changed

    @staticmethod
    def _look(module: nn.Module) -> tuple[dict[str, Any], ...]:
        return dict(vars(module)), dict(module._parameters), dict(module._buffers), dict(module._modules)


def _unchanged(now: Any, before: Any) -> bool:
    """The same object, or equal data of the same objects."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) in (list, tuple):
        return len(now) == len(before) and all(map(_unchanged, now, before))
    if type(now) is dict:
        return list(now) == list(before) and all(map(_unchanged, now.values(), before.values()))
    return type(now) in _DATA and bool(now == before)
