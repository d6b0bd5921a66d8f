"""The loop: does one worker's actions, once, in order. The only place where a schedule is interpreted.

No torch here: it is tested with numbers for tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pipe.action import Action, Op, Schedule
from pipe.clock import Clock
from pipe.trace import Event
from pipe.transport.protocol import Transport


class Works(Protocol):
    """What the loop asks of a stage; results and arguments are what the transport moves, None where nothing is."""

    def forward(self, micro_batch: int, arg: Any) -> Any:
        """The output of this stage's forward, from the output of the stage before."""

    def backward(self, micro_batch: int, arg: Any) -> Any:
        """The gradient of this stage's input, from the gradient of its output."""


DO: Mapping[Op, str] = {Op.F: "forward", Op.B: "backward", Op.I: "backward_input", Op.W: "backward_weights"}


def run_order(
    worker: int,
    schedule: Schedule,
    stages: Mapping[int, Works],
    transport: Transport,
    clock: Clock,
    placed: Callable[[Action], AbstractContextManager[None]],
) -> list[Event]:
    """The events of one worker's actions, done in order.

    `placed(action)` surrounds each action: an error from inside says where it happened.

    Raises:
        Aborted: another worker failed first.
        TransportError: a message did not come, or a send of this step failed.
    """
    made: dict[Action, Any] = {}  # results for a stage on this same worker
    marks = []
    for action in schedule.orders[worker]:
        arg = None
        for need in schedule.needs(action):
            if need.stage != action.stage:  # a stage keeps what its own forward saved
                arg = made.pop(need) if schedule.home[need] == worker else transport.recv(need)
        start = clock.mark()
        with placed(action):
            result = getattr(stages[action.stage], DO[action.op])(action.micro_batch, arg)
        marks.append((action, start, clock.mark()))
        for taker in schedule.feeds(action):
            if schedule.home[taker] == worker:
                made[action] = copy.deepcopy(result)  # as a transport gives it: what the taker writes in place, the maker does not see
            else:
                transport.send(schedule.home[taker], action, result)
    transport.finish()
    return [Event(action, worker, clock.seconds(start), clock.seconds(end)) for action, start, end in marks]
