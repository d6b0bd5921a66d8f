"""What each process of a job runs: `python -u .../launch/worker.py`, started by the launcher.

Rank 0 runs the user's script, the others serve. Before anything heavy the process ties its life to the launcher's.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pipe.session import Session

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    die_with(int(os.environ["PIPE_LAUNCHER"]))
    tie_forks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to handle
    job = json.loads(os.environ["PIPE_JOB"])
    import_ours(first=os.getcwd() if job["module"] else str(Path(job["script"]).parent))
    session = join(job)
    if session.rank == 0:
        from launch import script

        end(lead(session, job, script))
    # Its optimizer needs it, and it takes seconds to load; meanwhile the script imports its own.
    threading.Thread(target=importlib.import_module, args=("torch._dynamo",), daemon=True).start()
    session.serve()  # what it returns is rank 0's to tell, and rank 0 does
    end(0)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that call
        os._exit(1)


def tie_forks() -> None:
    """The same for what this process forks, such as a DataLoader's children, in its main thread.

    Only there: to the kernel the parent is the thread, and other threads end before the process does.
    """
    parent = 0  # of a fork in the main thread; 0: it is in another thread

    def before() -> None:
        nonlocal parent
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def after() -> None:
        if parent:
            die_with(parent)

    os.register_at_fork(before=before, after_in_child=after)


def import_ours(first: str) -> None:
    """Imports our packages, wherever this file is, and then puts the script's folder first on the path, as Python would.

    Python has put this file's folder there, which is nobody's.
    """
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import launch  # noqa: F401
    import pipe  # noqa: F401

    sys.path[0] = first


def join(job: dict[str, Any]) -> Session:
    """This process's session; a job that cannot be joined ends it with one line."""
    from pipe import session
    from pipe.errors import PipeError

    secret = bytes.fromhex(os.environ.pop("PIPE_SECRET"))  # not for the script's children
    try:
        return session.join(
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            secret=secret,
            options=job["options"],
            script=None if job["module"] else job["script"],
        )
    except (PipeError, RuntimeError) as error:
        print(f"pipe-launch: {error}", file=sys.stderr)
        end(2)


def lead(session: Session, job: dict[str, Any], script: Any) -> int:
    """Runs the script, closes its engines and ends the job; returns the exit code."""
    code: int = script.run(job["script"], job["argv"], job["module"])
    try:
        close_engines()
    except BaseException as error:
        if code == 0:  # else the script has told what came first
            script.show(error)
            code = 1
    if code == 0 and session.world_size > 1 and not session.used:
        name = job["script"] if job["module"] else Path(job["script"]).name
        print(
            f"pipe-launch: {name} made no pipe.Engine, so {session.world_size} workers had nothing to do; "
            f"make one with pipe.Engine(model, optimizer, ...), or run {name} with python",
            file=sys.stderr,
        )
        code = 2
    session.leave(graceful=code == 0)
    if code == 0:
        sys.exit(0)  # waits for the script's own threads, as Python does
    return code


def close_engines() -> None:
    """Closes the engines that are still open, which raises what happened in the tail of a last step."""
    close_all = getattr(sys.modules.get("pipe.engine"), "close_all", None)
    if close_all is not None:
        close_all()


def end(code: int) -> NoReturn:
    """Ends this process without waiting for its threads, which may hang in RPC after a failure."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or the script closed it
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
