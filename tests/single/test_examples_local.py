"""The example without the launcher, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_local_says_that_all_is_equal():
    run = subprocess.run([sys.executable, str(EXAMPLES / "local.py")], capture_output=True, text=True, timeout=100)
    lines = run.stdout.splitlines()
    combinations = [line for line in lines if line.endswith("losses equal: True, weights equal: True")]
    assert (run.returncode, run.stderr) == (0, "")
    assert len(combinations) == 8  # stages 1 to 4, two schedules
    assert lines[-1] == "equal bit for bit"
