"""What pipe-launch's flags and the script's arguments say together. A flag wins, and the engine says so in one line."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from pipe.errors import PlanError
from pipe.session import Session

logger = logging.getLogger("pipe")
DEFAULT_TIMEOUT = 1800.0  # seconds; a first step may compile for minutes


@dataclass(frozen=True)
class Options:
    """Options that the launcher and the script share; `world` is the launcher's number of workers, None without it."""

    world: int | None
    stages: int | None = None
    stages_per_worker: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    schedule: Any = None
    strategy: str | None = None
    device: str = "auto"
    share_gpus: bool = False
    timeout: float | None = DEFAULT_TIMEOUT  # None: for ever
    logdir: str | None = None
    verify: int = 0  # passes of training that are compared with one process
    memory: str | int | None = None  # that a worker may use
    plan: bool = False  # show the plan, and train nothing


def merge(session: Session | None, arguments: dict[str, Any]) -> Options:
    """The options in force. A job of one worker is like a script run without the launcher: its stages are threads.

    Raises:
        PlanError: a time-out below 0.
    """
    flags = {key: value for key, value in (session.options if session is not None else {}).items() if key in Options.__dataclass_fields__}
    for name, flag in flags.items():
        said = arguments.get(name)
        if said is not None and said != flag and str(said) != str(flag):
            logger.info("%s=%r of pipe-launch is used, not %s=%r of the script", name, flag, name, said)
    chosen = {**{key: value for key, value in arguments.items() if value is not None}, **flags}
    timeout = chosen.get("timeout", DEFAULT_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise PlanError(f"timeout is {timeout!r}; it is seconds, and 0 means for ever: leave it out for {DEFAULT_TIMEOUT:g}")
    chosen["timeout"] = float(timeout) or None
    if "logdir" in chosen:
        chosen["logdir"] = os.fspath(chosen["logdir"])
    world = session.world_size if session is not None and session.world_size > 1 else None
    return Options(world=world, **chosen)
