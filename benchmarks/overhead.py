"""What the engine itself costs: stages that sleep, 10 ms forward and 20 ms backward, so that cores do not matter.

    python benchmarks/overhead.py            # some 3 minutes; --markdown for a table to paste

A step can take (m+p-1)(F+B) at best, for p stages, m micro-batches, and F and B as timed inside the layers (a sleep takes longer
than it says). "rpc" is a process a stage, started by pipe-launch; "local" is a thread a stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import pipe
from pipe.action import Op

FORWARD, BACKWARD = 0.010, 0.020  # seconds
SIZES = ((2, 8), (4, 16), (8, 32))  # stages, micro-batches
SCHEDULES = ("gpipe", "1f1b")
STEPS, ROUNDS = 3, 3


class Sleep(torch.autograd.Function):
    """Its input; takes its time in both directions, and adds it up in `slept`: forward seconds, times, backward seconds, times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slept: Tensor) -> Tensor:
        ctx.slept = slept
        sleep(FORWARD, slept, 0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(BACKWARD, ctx.slept, 2)
        return gradient, None


def sleep(seconds: float, slept: Tensor, at: int) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    slept[at : at + 2] += torch.tensor([time.perf_counter() - began, 1.0])


class Sleeper(nn.Module):
    """A layer that sleeps. Its weight gives the first stage a backward; its buffer comes back with the state_dict."""

    slept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("slept", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * self.weight, self.slept)
        return slept


def measured(stages: int, micro_batches: int, schedule: str) -> dict[str, float]:
    """Seconds a step; of F and B as slept; and of both as the engine's events have them. Each the median of some rounds."""
    model = nn.Sequential(*(Sleeper() for _ in range(stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2 * micro_batches, 16)
    how = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule, "split": [1] * stages, "strategy": "pipeline"}
    rounds = []
    with pipe.Engine(model, optimizer, nn.MSELoss(), **how) as engine:
        engine.train_step(x, target=x)
        for _ in range(ROUNDS):
            before = slept(engine)
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.train_step(x, target=x)
            trace = engine.trace  # waits for the last step
            seconds = (time.perf_counter() - began) / STEPS
            f, f_times, b, b_times = (slept(engine) - before).tolist()
            rounds.append((seconds, f / f_times, b / b_times, mean(trace, Op.F), mean(trace, Op.B)))
    names = ("step", "F", "B", "event F", "event B")
    return {name: median(found) for name, found in zip(names, zip(*rounds))}


def slept(engine: pipe.Engine) -> Tensor:
    """Of all stages together."""
    found: list[Tensor] = [value for name, value in engine.state_dict().items() if name.endswith("slept")]
    return torch.stack(found).sum(0)


def mean(trace: pipe.Trace, op: Op) -> float:
    found = [event.seconds for event in trace.events if event.action.op is op]
    return sum(found) / len(found)


def over_rpc(stages: int, micro_batches: int, schedule: str) -> dict[str, float]:
    """The same in a process a stage: this script again, under the launcher."""
    command = [sys.executable, "-m", "launch", "--stages", str(stages), str(Path(__file__).resolve())]
    arguments = ["--inside", str(stages), str(micro_batches), schedule]
    done = subprocess.run(
        [*command, *arguments], cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.PIPE, check=True, timeout=300
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def row(transport: str, stages: int, micro_batches: int, schedule: str) -> list[str]:
    found = (over_rpc if transport == "rpc" else measured)(stages, micro_batches, schedule)
    slots = micro_batches + stages - 1
    by_sleep = found["step"] / (slots * (found["F"] + found["B"]))
    by_event = found["step"] / (slots * (found["event F"] + found["event B"]))
    times = [f"{found[name] * 1e3:.2f}" for name in ("F", "B", "event F", "event B")]
    return [transport, f"{stages} x {micro_batches}", schedule, f"{found['step'] * 1e3:.1f}", *times, f"{by_sleep:.3f}", f"{by_event:.3f}"]


def table(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    head = ("transport", "p x m", "schedule", "step ms", "F ms", "B ms", "F event", "B event", "step/ideal", "by events")
    if markdown:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(cells, widths)) for cells in (head, *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--transports", nargs="+", choices=("rpc", "local"), default=("rpc", "local"))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside:
        stages, micro_batches, schedule = options.inside
        print(json.dumps(measured(int(stages), int(micro_batches), schedule)))
        return
    cases = [(t, *size, schedule) for t in options.transports for size in SIZES for schedule in SCHEDULES]
    print(table([row(*case) for case in cases], options.markdown))


if __name__ == "__main__":
    main()
