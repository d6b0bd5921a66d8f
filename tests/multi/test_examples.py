"""The examples in their short mode, as the README says to run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
from conftest import Finished, Run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BY_GUESSING = 0.1  # accuracy, of ten digits


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """They take some 10 s, and many times that on a machine that does other work, too."""
    monkeypatch.setattr(conftest, "LIMIT", 110.0)


def short(tmp_path: Path, name: str, *options: str) -> Finished:
    return Run([*options, str(EXAMPLES / name), "--short"], tmp_path).wait()


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (("--stages", "2"), "pipeline: 2 stages, 4 micro-batches, gpipe"),
        (("--strategy", "ddp", "--replicas", "2"), "ddp: 1 stage x 2 replicas"),
    ],
    ids=["pipeline", "ddp"],
)
def test_digits(tmp_path, options, plan):
    run = short(tmp_path, "digits.py", *options)
    assert run.code == 0, run.err
    assert f"as {plan}" in run.out
    assert "samples/s\nworker  stages" in run.out  # the report's table
    assert number(r"test accuracy ([\d.]+)%", run.out) / 100 > 5 * BY_GUESSING


def test_digits_without_the_launcher():
    run = subprocess.run([sys.executable, str(EXAMPLES / "digits.py"), "--short"], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "as single: 1 stage" in run.stdout
    assert number(r"test accuracy ([\d.]+)%", run.stdout) / 100 > 5 * BY_GUESSING


def test_char_lm(tmp_path):
    run = short(tmp_path, "char_lm.py", "--stages", "2", "--schedule", "1f1b")
    assert run.code == 0, run.err
    assert number(r"loss ([\d.]+) at the end", run.out) < 0.85 * number(r"without context: ([\d.]+)", run.out)
    assert "\nsample:\n\n    def " in run.out
