"""However a script or a worker ends: the exit code, what is said, and that no process is left."""

from __future__ import annotations

import pytest

# `used` is what an engine sets; these scripts test the launcher without one.
SESSION = "import os, signal, sys, time\nimport pipe.session\nsession = pipe.session.current()\nsession.used = True\n"
DATA_LOADER = """
import torch
loader = torch.utils.data.DataLoader(range(10**9), num_workers=2, batch_size=1)
batches = iter(loader)
next(batches)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os._exit(4)", 4), ("sys.exit('no data')", 1), ("raise KeyboardInterrupt", 130)],
)
def test_exit_code_is_the_scripts(launch, ending, code):
    run = launch("--stages", "2", script=f"{SESSION}print('to out')\nprint('to err', file=sys.stderr)\n{ending}\n")
    assert run.code == code
    assert run.out == "to out\n"
    assert run.err == "to err\n" + ("no data\n" if "no data" in ending else "")


def test_exception_shows_only_the_users_traceback(launch, tmp_path):
    run = launch("--stages", "2", script=f"{SESSION}\ndef step():\n    return 1 // 0\nstep()\n")
    script = tmp_path / "script.py"
    lines = [line for line in run.err.splitlines() if not set(line) <= {" ", "^", "~"}]
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 8, in <module>',
        "    step()",
        f'  File "{script}", line 7, in step',
        "    return 1 // 0",
        "ZeroDivisionError: integer division or modulo by zero",
    ]
    assert run.code == 1


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("os.kill, session.members[1].pid, signal.SIGKILL", 137, "was killed by SIGKILL - maybe out of memory"),
        ("os._exit, 7", 7, "ended by itself with exit code 7"),
    ],
)
def test_worker_that_dies_is_named_in_one_line(launch, ending, code, said):
    script = f"{SESSION}{DATA_LOADER}\nprint(session.members[1].pid)\nsession.start(1, {ending})\nwhile True: time.sleep(60)\n"
    run = launch("--stages", "2", script=script)
    assert run.code == code
    assert run.err.count("\n") == 1
    assert f"stage 1 (rank 1, pid {run.out.strip()}) on host " in run.err
    assert said in run.err


def test_rank_0_that_dies_is_named_and_its_children_end(launch):
    run = launch("--stages", "2", script=f"{SESSION}{DATA_LOADER}\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert run.code == 139
    assert "stage 0 (rank 0, pid " in run.err
    assert "was killed by SIGSEGV" in run.err


def test_script_without_an_engine(launch):
    run = launch("--stages", "2", script="print('hello')\n")
    assert (run.code, run.out) == (2, "hello\n")
    assert run.err.startswith("pipe-launch: script.py made no pipe.Engine, so 2 workers had nothing to do")
    assert run.err.count("\n") == 1


def test_restarts_begin_again_with_all_workers(launch, tmp_path):
    script = f"{SESSION}\nopen('attempts', 'a').write('x')\nif open('attempts').read() == 'x': os._exit(5)\nprint(session.world_size)\n"
    run = launch("--stages", "2", "--max-restarts", "2", script=script)
    assert (run.code, run.out) == (0, "2\n")
    assert (tmp_path / "attempts").read_text() == "xx"
    assert run.err == "pipe-launch: starting again (1 of 2)\n"
