"""The loop: does one worker's actions, once, in order. The only place where a schedule is interpreted.

No torch here: it is tested with numbers for tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pipe.action import Action, Handover, Op, Schedule
from pipe.clock import Clock
from pipe.trace import Event
from pipe.transport.protocol import Transport


class Works(Protocol):
    """What the loop asks of a stage; results and arguments are what the transport moves, by the other stage."""

    def forward(self, micro_batch: int, arg: Mapping[int, Any]) -> Mapping[int, Any]:
        """What each later stage takes of this stage's output, from what earlier stages gave."""

    def backward(self, micro_batch: int, arg: Mapping[int, Any]) -> Mapping[int, Any]:
        """The gradients of what other stages gave, from those of what this one gave."""


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
    made: dict[Handover, Any] = {}  # results for a stage on this same worker
    marks = []
    for action in schedule.orders[worker]:
        arg = {}
        for need in schedule.needs(action):
            if need.stage != action.stage:  # a stage keeps what its own forward saved
                handover = Handover(need, action.stage)
                arg[need.stage] = made.pop(handover) if schedule.home[need] == worker else transport.recv(handover)
        start = clock.mark()
        with placed(action):
            result = getattr(stages[action.stage], DO[action.op])(action.micro_batch, arg)
        marks.append((action, start, clock.mark()))
        for taker in schedule.feeds(action):
            handover, given = Handover(action, taker.stage), result[taker.stage]
            if schedule.home[taker] == worker:
                made[handover] = copy.deepcopy(given)  # as a transport gives it: what the taker writes in place, the maker does not see
            else:
                transport.send(schedule.home[taker], handover, given)
    transport.finish()
    return [Event(action, worker, clock.seconds(start), clock.seconds(end)) for action, start, end in marks]
