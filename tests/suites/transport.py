"""What every Transport does. A check gets the ends of workers 0 and 1 of a pipeline of two; no step has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipe.action import Schedule
from pipe.errors import Aborted, TransportTimeout
from pipe.transport.protocol import Transport

SCHEDULE = Schedule.parse("F0@0 F1@0 B0@0 B1@0\nF0@1 F1@1 B0@1 B1@1")
F0, F1, B0, B1 = SCHEDULE.orders[0]  # what worker 0 makes
TIMEOUT = 60.0  # seconds, for checks that do not wait in vain

Check = Callable[[Transport, Transport], None]
CHECKS: list[Check] = []


@dataclass(frozen=True)
class Parcel:
    """A message that knows its size, as the engine's do."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def timeout_of(function: Check) -> float:
    """The time-out with which the ends are made."""
    return 0.2 if function is a_late_message_is_told else TIMEOUT


def _begin(step: int, *ends: Transport) -> None:
    for end in ends:
        end.begin(step, SCHEDULE)


def _meanwhile(function: Callable[..., Any], *args: Any) -> Future[Any]:
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


@check
def messages_come_by_name_not_by_order(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(1, F0, torch.tensor([0.0]))
    a.send(1, F1, torch.tensor([1.0]))
    assert b.recv(F1).item() == 1.0
    assert b.recv(F0).item() == 0.0
    a.finish()


@check
def both_ways_at_once(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(1, F0, "there")
    b.send(0, F0, "back")
    assert (a.recv(F0), b.recv(F0)) == ("back", "there")


@check
def a_receiver_may_wait_before_the_message_is_sent(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    received = _meanwhile(b.recv, F0)
    a.send(1, F0, 7)
    assert received.result(TIMEOUT) == 7


@check
def a_worker_sends_to_itself(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(0, ("inputs", 3), "to myself")
    assert a.recv(("inputs", 3)) == "to myself"
    a.finish()


@check
def one_name_in_two_steps_is_two_messages(a: Transport, b: Transport) -> None:
    for step in (1, 2):
        a.begin(step, SCHEDULE)  # the sender is a step ahead
        a.send(1, F0, step)
        a.finish()
    for step in (1, 2):
        b.begin(step, SCHEDULE)
        assert b.recv(F0) == step


@check
def messages_of_an_older_step_are_dropped(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(1, F0, "old")
    a.finish()
    _begin(2, b)
    a.send(1, F0, "too late")
    a.finish()
    _begin(2, a)
    a.send(1, F0, "new")
    assert b.recv(F0) == "new"


@check
def abort_wakes_who_waits(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    there, here = _meanwhile(b.recv, F0), _meanwhile(a.recv, B0)
    a.abort("F0@0 on worker 0: ZeroDivisionError")
    for waiting in (there, here):
        with pytest.raises(Aborted, match=r"^F0@0 on worker 0: ZeroDivisionError$"):
            waiting.result(TIMEOUT)


@check
def abort_reaches_who_has_not_begun(a: Transport, b: Transport) -> None:
    a.begin(5, SCHEDULE)
    a.abort("early")
    b.begin(4, SCHEDULE)
    b.send(1, F1, "of step 4")
    assert b.recv(F1) == "of step 4"  # the abort is of step 5 only
    b.begin(5, SCHEDULE)
    with pytest.raises(Aborted, match="early"):
        b.recv(F0)


@check
def abort_comes_before_messages_that_are_there(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(1, F0, 1)
    a.finish()
    a.abort("first")
    with pytest.raises(Aborted, match="first"):
        b.recv(F1)  # waits for the abort to arrive: two under way may overtake each other
    a.abort("second")
    for end, key in ((a, B0), (b, F0)):
        with pytest.raises(Aborted, match="first"):
            end.recv(key)


@check
def the_step_after_an_abort_works(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.abort("gone wrong")
    with pytest.raises(Aborted):
        b.recv(F0)
    _begin(2, a, b)
    a.send(1, F0, "well again")
    assert b.recv(F0) == "well again"
    a.finish()


@check
def a_late_message_is_told(a: Transport, b: Transport) -> None:
    _begin(3, a, b)
    a.send(1, F1, "came")
    a.finish()
    with pytest.raises(TransportTimeout) as caught:
        b.recv(F0)
    assert str(caught.value).startswith("F0@0 of step 3 did not come within 0.2 s (waiting here: F1@0); ")
    assert str(caught.value).endswith("give more time with --timeout SECONDS (0: for ever)")


@check
def a_message_is_a_copy(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    sent = torch.zeros(3)
    for end, key in ((a, F0), (b, F1)):
        end.send(1, key, sent)
        end.finish()
    sent.fill_(1.0)
    assert b.recv(F0).tolist() == [0.0, 0.0, 0.0]
    assert b.recv(F1).tolist() == [0.0, 0.0, 0.0]


@check
def structures_pass(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    a.send(1, F0, ())
    a.send(1, F1, {"x": [torch.ones(2, dtype=torch.int8), None], "y": ("text", 2.5)})
    assert b.recv(F0) == ()
    received = b.recv(F1)
    assert received["x"][0].dtype is torch.int8
    assert received["x"][1:] == [None]
    assert received["y"] == ("text", 2.5)


@check
def a_large_tensor_passes_whole(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    sent = torch.arange(3_000_000, dtype=torch.float64)
    a.send(1, F0, sent)
    assert torch.equal(b.recv(F0), sent)
    a.finish()


@check
def special_tensors_pass(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    for key, sent in (
        (F0, torch.empty(0, 3)),
        (F1, torch.tensor(2.0)),
        (B0, torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16)),
    ):
        a.send(1, key, sent)
        received = b.recv(key)
        assert received.dtype is sent.dtype
        assert received.shape == sent.shape
        assert torch.equal(received.view(torch.uint8) if sent.dim() else received, sent.view(torch.uint8) if sent.dim() else sent)


@check
def dense_tensors_keep_their_strides(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for key, sent in ((F0, images), (F1, torch.randn(4, 6).t())):
        a.send(1, key, sent)
        received = b.recv(key)
        assert received.stride() == sent.stride()
        assert torch.equal(received, sent)


@check
def sent_bytes_are_counted_from_begin(a: Transport, b: Transport) -> None:
    _begin(1, a, b)
    assert a.sent_bytes == 0
    a.send(1, F0, Parcel(torch.zeros(10)))
    a.send(1, F1, "of unknown size")
    assert a.sent_bytes == 40
    assert b.recv(F0).nbytes == 40
    _begin(2, a)
    assert a.sent_bytes == 0
