"""Pipeline-parallel training for PyTorch: `engine = pipe.Engine(model, optimizer, loss_fn)`, then `engine.train_step(x, target=y)`.

Names load when they are first used, so that schedules and the simulator need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipe.action import Action as Action
    from pipe.action import Op as Op
    from pipe.action import Schedule as Schedule
    from pipe.engine import Engine as Engine
    from pipe.errors import BatchError as BatchError
    from pipe.errors import OptimizerError as OptimizerError
    from pipe.errors import PipeError as PipeError
    from pipe.errors import PlanError as PlanError
    from pipe.errors import ScheduleError as ScheduleError
    from pipe.errors import StageError as StageError
    from pipe.errors import TransportError as TransportError
    from pipe.partition.spec import LayerSpec as LayerSpec
    from pipe.plan import Plan as Plan
    from pipe.report import Report as Report
    from pipe.schedules import schedule as schedule
    from pipe.simulator import Costs as Costs
    from pipe.simulator import simulate as simulate
    from pipe.trace import Event as Event
    from pipe.trace import Trace as Trace

__version__ = "0.1.0"

_HOMES = {
    "pipe.action": ("Action", "Op", "Schedule"),
    "pipe.engine": ("Engine",),
    "pipe.errors": ("BatchError", "OptimizerError", "PipeError", "PlanError", "ScheduleError", "StageError", "TransportError"),
    "pipe.partition.spec": ("LayerSpec",),
    "pipe.plan": ("Plan",),
    "pipe.report": ("Report",),
    "pipe.schedules": ("schedule",),
    "pipe.simulator": ("Costs", "simulate"),
    "pipe.trace": ("Event", "Trace"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pipe' has no attribute {name!r}; it has {', '.join(sorted(_HOME_OF))}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)
