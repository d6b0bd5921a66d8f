"""The engine's hooks in the user's model; a copy of the model does not have them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


class Follower:
    """A hook that calls a function; copied or pickled with the model, it does nothing."""

    draws_nothing = True  # see silent.py

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._function is not None:
            self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower:
        return Follower()

    def __reduce__(self) -> tuple[type[Follower], tuple[()]]:
        return Follower, ()


class StaleWarning:
    """Warns once, when it is called while the model is stale."""

    def __init__(self, stale: Callable[[], bool]) -> None:
        self._stale = stale
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._stale() and not self._warned:
            self._warned = True
            warnings.warn(
                "this model's weights are older than those of the engine's stages; for outputs use engine.predict(...), or call "
                "engine.sync_model() first",
                UserWarning,
                stacklevel=4,
            )
