"""Joining, serving, leaving; and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.rpc import api, internal
from torch.futures import Future

from pipe import members, session
from pipe.errors import PipeError
from pipe.members import Member
from pipe.session import Session
from tests.suites.processes import Process, processes

pytestmark = pytest.mark.timeout(120)

WAIT = 60.0  # seconds, far more than anything here takes


def _session() -> Session:
    here = session.current()
    assert here is not None
    return here


def _join(
    rank: int, world_size: int, secret: bytes = b"of the job", timeout: float = WAIT, other: dict[str, Any] | None = None
) -> tuple[Member, ...]:
    """Joins with other facts than the real ones."""
    real = members.facts

    def facts(rank: int, script: str | None) -> Member:
        return replace(real(rank, script), **(other or {}))

    with mock.patch.object(session, "facts", facts), warnings.catch_warnings():
        warnings.simplefilter("error")
        return session.join(rank, world_size, secret=secret, options={"stages": world_size}, timeout=timeout, script=__file__).members


@contextmanager
def joined(number: int) -> Iterator[list[Process]]:
    with processes(number) as started:
        for answer in [process.ask(_join, rank, number) for rank, process in enumerate(started)]:
            answer.result(WAIT)
        yield started


def test_members_are_told_to_all() -> None:
    with processes(2) as started:
        first, second = [process.ask(_join, rank, 2) for rank, process in enumerate(started)]
        known = first.result(WAIT)
        assert known == second.result(WAIT)
        assert [m.name for m in known] == ["worker0", "worker1"]
        assert [m.pid for m in known] == [process.process.pid for process in started]
        assert {m.python for m in known} == {f"{sys.version_info.major}.{sys.version_info.minor}"}
        assert {m.torch for m in known} == {torch.__version__.split("+")[0]}
        assert all(m.has_script for m in known)
        assert [m.clock_offset for m in known] == [0.0, 0.0]
        assert started[1].ask(_options).result(WAIT) == {"stages": 2}


def _options() -> Any:
    return _session().options


def test_another_boot_has_its_clock_measured() -> None:
    with processes(2) as started:
        first, second = [process.ask(_join, rank, 2, b"x", WAIT, {"boot_id": f"boot {rank}"}) for rank, process in enumerate(started)]
        known = first.result(WAIT)
        assert known == second.result(WAIT)
        assert known[0].clock_offset == 0.0
        assert known[1].clock_offset != 0.0
        assert abs(known[1].clock_offset) < 1.0  # it is the same clock in truth


def test_the_clock_offset_is_that_of_the_quickest_round() -> None:
    readings = iter([0.0, 4.0, 10.0, 10.5] + [20.0, 29.0] * 8)  # asked, answered
    theirs = iter([101.0, 110.25] + [125.0] * 8)
    assert members.clock_offset(lambda: next(theirs), lambda: next(readings)) == -100.0


@pytest.mark.parametrize(
    ("what", "value", "said"),
    [("python", "3.9", "Python 3.9"), ("torch", "1.13.1", "torch 1.13.1"), ("pipe", "0.0.1", "pipe-launch 0.0.1")],
)
def test_all_refuse_another_version(what: str, value: str, said: str) -> None:
    with processes(3) as started:
        answers = [
            process.ask(_join, rank, 3, b"x", WAIT, {what: value, "host": "b"} if rank == 2 else {"host": "a"})
            for rank, process in enumerate(started)
        ]
        errors = [answer.exception(WAIT) for answer in answers]
    assert {type(error) for error in errors} == {PipeError}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"worker 2 on b has {said} and worker 0 on a has ")
    assert "\n" not in str(errors[0])


def test_another_secret_does_not_join() -> None:
    with processes(2) as started:
        answers = [process.ask(_join, rank, 2, f"secret {rank}".encode()) for rank, process in enumerate(started)]
        for answer in answers:
            with pytest.raises(PipeError, match=r"do not have the same secret; .* PIPE_SECRET$"):
                answer.result(WAIT)


def test_who_does_not_come_is_named() -> None:
    with processes(1) as started, pytest.raises(PipeError, match=r"^workers 1, 2 did not join within 0.2 s; .*--timeout$"):
        started[0].ask(_join, 0, 3, b"x", 0.2).result(WAIT)


def _end_instead_of_joining() -> None:
    with mock.patch.object(session, "_init_rpc", side_effect=lambda *_: os._exit(3)):
        _join(1, 2)


def test_who_ends_while_joining_is_an_error_of_one_line_for_the_others() -> None:
    with processes(2) as started:
        for process in started:
            process.ask(hear, "").result(WAIT)  # now it has imported all
        waiting = started[0].ask(_join, 0, 2, b"of the job", 5.0)
        started[1].ask(_end_instead_of_joining)
        with pytest.raises(PipeError, match=r"^RPC did not begin \(.*\); all workers connect to all: see whether one has ended"):
            waiting.result(WAIT)


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _refused(secret: bytes | None, path: str) -> str:
    """What becomes of a message that is not signed (None), or with another secret."""
    own = internal._internal_rpc_pickler
    if secret is None:
        api._default_pickler = internal._InternalRPCPickler()
    else:
        session.signing.install(secret)
    try:
        _session().call(1, print, Evil(path)).wait()
    except Exception as error:
        return str(error)
    finally:
        internal._internal_rpc_pickler = api._default_pickler = own
    return "accepted"


def _ask_pid(rank: int) -> int:
    pid: int = _session().call(rank, os.getpid).wait()
    return pid


@pytest.mark.parametrize("secret", [None, b"guessed"], ids=["unsigned", "another secret"])
def test_a_strange_message_is_not_unpickled_and_the_job_goes_on(secret: bytes | None, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with joined(3) as started:
        for _ in range(2):
            assert "refused a message without this job's signature" in started[2].ask(_refused, secret, str(made)).result(WAIT)
        assert not made.exists()
        for asks, asked in ((0, 1), (1, 0), (2, 1)):
            assert started[asks].ask(_ask_pid, asked).result(WAIT) == started[asked].process.pid


def test_what_is_signed_is_what_was_written() -> None:
    with joined(2) as started:
        assert started[0].ask(_ask_pid, 1).result(WAIT) == started[1].process.pid
    signed = session.signing.sign(b"key", b"text")
    assert session.signing.verified(b"key", signed) == b"text"
    for changed in (signed[:-1] + b"!", b"\0" + signed[1:], b"", signed[:10]):
        with pytest.raises(PipeError, match="refused"):
            session.signing.verified(b"key", changed)


_told: dict[str, Any] = {}
_heard = threading.Event()


def hear(what: str) -> None:
    _told.update(what=what, thread=threading.current_thread().name, daemon=threading.current_thread().daemon)
    _heard.set()


def _what_was_heard() -> Any:
    assert _heard.wait(WAIT)
    return _told


def _start(rank: int, what: str) -> None:
    _session().start(rank, hear, what).wait()


def _serve() -> tuple[int, bool]:
    return _session().serve(), session.current() is None


def _leave(graceful: bool) -> bool:
    _session().leave(graceful)
    return session.current() is None


@pytest.mark.parametrize("graceful", [True, False])
def test_a_worker_does_what_it_is_told_until_it_is_told_to_stop(graceful: bool) -> None:
    with joined(3) as started:
        for rank in (0, 1, 2):
            started[0].ask(_start, rank, f"to {rank}").result(WAIT)  # before it serves, too
        serving = [process.ask(_serve) for process in started[1:]]
        for rank, process in enumerate(started):
            assert process.ask(_what_was_heard).result(WAIT) == {"what": f"to {rank}", "thread": "hear", "daemon": True}
        assert started[0].ask(_leave, graceful).result(WAIT)
        assert [answer.result(WAIT) for answer in serving] == [(0 if graceful else 1, True)] * 2


def _serve_with_short_pauses() -> int:
    with mock.patch.object(session, "_PING_EVERY", 0.05), mock.patch.object(session, "_PING_AGAIN", 0.05):
        return _session().serve()


def test_a_worker_ends_when_rank_0_is_gone(capfd: Any) -> None:
    with joined(2) as started:
        serving = started[1].ask(_serve_with_short_pauses)
        started[0].process.kill()
        assert serving.result(WAIT) == 1
    assert "eof" not in capfd.readouterr().err


def test_rank_0_that_only_computes_is_not_gone() -> None:
    """A ping without answer says nothing; two that failed say gone; one that failed is looked at again."""
    answers: list[Future[Any]] = []

    class Silent(Session):
        def call(self, rank: int, function: Any, *args: Any, timeout: float = 0.0) -> Future[Any]:
            answers.append(Future())
            return answers[-1]

    rank_0 = session._Watched(Silent(1, 2, ()))
    assert rank_0.pause == session._PING_EVERY
    assert not any(rank_0.gone() for _ in range(5))
    assert len(answers) == 1
    answers[0].set_exception(RuntimeError("eof"))
    assert not rank_0.gone()
    assert rank_0.pause == session._PING_AGAIN
    assert not rank_0.gone()
    answers[1].set_result(None)
    assert not rank_0.gone()
    assert rank_0.pause == session._PING_EVERY
    for answer in range(2, 4):
        assert not rank_0.gone()
        answers[answer].set_exception(RuntimeError("eof"))
        last = rank_0.gone()
    assert last


def _leave_soon() -> None:
    with mock.patch.object(session, "_GRACE", 0.1):
        _session().leave(True)


def _call_after_leaving() -> Exception | None:
    here = _session()
    _session().leave(True)
    return session.failure(here.call(0, os.getpid))


def test_leaving_does_not_wait_for_the_dead(capfd: Any) -> None:
    with joined(3) as started:
        serving = started[1].ask(_serve)
        started[2].process.kill()
        started[0].ask(_leave_soon).result(WAIT)
        assert serving.result(WAIT) == (0, True)
    assert capfd.readouterr().err == ""


def test_a_call_after_leaving_is_a_future_that_failed() -> None:
    with joined(1) as started:
        assert isinstance(started[0].ask(_call_after_leaving).result(WAIT), RuntimeError)


SCRIPT = """
import os, signal, sys
from pipe import session

rank, how = int(os.environ["RANK"]), sys.argv[1]
here = session.join(rank, 3, secret=b"x")
if how == "killed" and rank == 1:
    while not all(here.call(other, session.current).wait() for other in (0, 2)):
        pass  # it dies when all have joined
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    while how == "killed" and session.failure(here.call(1, session.alive)) is None:
        pass
    here.leave(graceful=how != "failed" and how != "killed")
    sys.exit(0 if how == "well" else 1)
sys.exit(here.serve())
"""


@pytest.mark.parametrize(("how", "codes"), [("well", [0, 0, 0]), ("failed", [1, 1, 1]), ("killed", [1, -signal.SIGKILL, 1])])
def test_processes_end_quietly(how: str, codes: list[int]) -> None:
    """With a store that rank 0 makes, as MASTER_ADDR and MASTER_PORT alone ask for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, how], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=WAIT)[1] for process in started]
        assert [process.returncode for process in started] == codes
        assert said == ["", "", ""]
    finally:
        for process in started:
            process.kill()


def test_one_process_joins_once() -> None:
    with mock.patch.object(session, "_session", Session(0, 1, ())), pytest.raises(PipeError, match="has joined a job already"):
        session.join(0, 1, secret=b"x")
