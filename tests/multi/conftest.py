"""Running the launcher for real, and seeing that nothing of a run is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

MARK = "PIPE_TEST_RUN"  # in the environment of every process of a run, so that each can be found
LIMIT = 100.0  # seconds for a run
LEFT = 10.0  # seconds for its last process to be gone


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


class Run:
    """A launcher that runs, with all that it has started."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "launch", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), MARK: self.mark},
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> Finished:
        """The end of the run; nothing of it is left."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.clean()
            pytest.fail(f"the run did not end in {LIMIT:g} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}")
        assert self.left() == []
        return Finished(code, self.out, self.err)

    def until(self, text: str) -> None:
        """Waits until that has been printed."""
        end = time.monotonic() + LIMIT
        while text not in self.out + self.err:
            if self.process.poll() is not None or time.monotonic() > end:
                self.clean()
                pytest.fail(f"{text!r} was not printed\n--- stdout\n{self.out}\n--- stderr\n{self.err}")
            time.sleep(0.02)

    def until_started(self) -> None:
        """Waits until the launcher has begun to start workers."""
        end = time.monotonic() + LIMIT
        while len(processes(self.mark)) < 2 and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def left(self) -> list[str]:
        """The processes of this run that do not go away."""
        end = time.monotonic() + LEFT
        while (found := processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return [f"{pid}: {command}" for pid, command in found.items()]

    def clean(self) -> None:
        for pid in processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def processes(mark: str) -> dict[int, str]:
    """Pid -> command line of each process that has the mark in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended, or is another user's
    return found


Start = Callable[..., Run]
Launch = Callable[..., Finished]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python -m launch OPTIONS script.py ARGUMENTS` in a new folder, with that text as the script."""
    runs: list[Run] = []

    def begin(*options: str, script: str = "", target: str = "script.py", arguments: Sequence[str] = (), **how: object) -> Run:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        runs.append(Run([*options, target, *arguments], tmp_path, **how))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        run.clean()


@pytest.fixture
def launch(start: Start) -> Launch:
    """The same, to its end; nothing of the run is left then."""

    def whole(*options: str, **how: object) -> Finished:
        return start(*options, **how).wait()

    return whole
