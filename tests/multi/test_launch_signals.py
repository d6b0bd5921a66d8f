"""Ctrl-C, SIGTERM and SIGKILL at the launcher: whenever it comes, no process is left, and there is no traceback (CASES C96)."""

from __future__ import annotations

import signal

import pytest

STEPPING = """
import os, sys, time
import torch
import pipe.session
session = pipe.session.current()
session.used = True
loader = torch.utils.data.DataLoader(range(10**9), num_workers=2, batch_size=1)
batches = iter(loader)
next(batches)
print('stepping', flush=True)
while True:
    next(batches)
"""
ENDING = """
import atexit, time
import pipe.session
pipe.session.current().used = True
atexit.register(lambda: (print('ending', flush=True), time.sleep(60)))
"""
DEAF = """
import signal, time
import pipe.session
pipe.session.current().used = True
signal.signal(signal.SIGTERM, lambda number, frame: print('not now', flush=True))
print('deaf', flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_in_a_step_with_the_children_of_a_data_loader(start, number, code):
    run = start("--stages", "2", script=STEPPING)
    run.until("stepping")
    run.signal(number)
    end = run.wait()
    assert (end.code, end.err) == (code, "")


def test_while_the_workers_start(start):
    run = start("--stages", "2", script=STEPPING)
    run.until_started()
    run.signal(signal.SIGINT)
    end = run.wait()
    assert (end.code, end.out, end.err) == (130, "", "")


def test_at_the_end(start):
    run = start("--stages", "2", script=ENDING)
    run.until("ending")
    run.signal(signal.SIGTERM)
    end = run.wait()
    assert (end.code, end.err) == (143, "")


def test_twice_does_not_wait_for_a_script_that_goes_on(start):
    run = start("--stages", "2", script=DEAF)
    run.until("deaf")
    run.signal(signal.SIGINT)
    run.until("not now")
    run.signal(signal.SIGINT)
    end = run.wait()
    assert (end.code, end.err) == (130, "")


def test_script_that_goes_on_is_ended_all_the_same(start):
    run = start("--stages", "2", script=DEAF)
    run.until("deaf")
    run.signal(signal.SIGTERM)
    end = run.wait()
    assert (end.code, end.out, end.err) == (143, "deaf\nnot now\n", "")
