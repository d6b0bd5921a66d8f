"""The step time of this engine against torch.distributed.pipelining: same model, same cut, same optimizer, same micro-batches.

    python benchmarks/peer.py                # some 5 minutes; --rounds 3 for less, --markdown for a table to paste

Both sides run as their users start them, two workers with one thread each: ours by pipe-launch over RPC, theirs by torchrun over
gloo (NCCL where there are two GPUs). All processes stay up and work in turns, so that the machine's noise hits both sides alike:

    this process --model, schedule, steps--> ours | theirs | one process alone | two at once, each alone
                 <-- seconds a step, loss --

A turn in which other work on the machine kept processes waiting for a core (Linux tells: /proc/pressure/cpu) is taken again, up to
--again times, and --patience has each turn wait for a quiet moment. The ideal is the time of one process x (m+p-1)/(m p). "Ideal,
busy" takes that time from two processes at once, which share the machine's memory, caches and clock as the workers of a pipeline do.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median

import torch
from sides import MICRO_BATCHES, WORKERS, Turn, device_of

HERE = Path(__file__).resolve().parent
IDEAL = (MICRO_BATCHES + WORKERS - 1) / (MICRO_BATCHES * WORKERS)
MODELS, SCHEDULES = ("transformer", "resnet18", "mlp"), ("gpipe", "1f1b")
WARM_UP = 3  # steps
QUIET = 0.15  # share of the time that processes may have waited for a core
SAME_LOSS = 1e-4  # of the last warm-up step, relative
COMMANDS = {
    "ours": ["-m", "launch", "--stages", str(WORKERS)],
    "theirs": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)],
    "alone": [],
    "alone too": [],
}
Seconds = dict[str, list[float]]  # by side, one a round


@contextmanager
def started(side: str) -> Iterator[Connection]:
    """The side's processes, and the link to the one that answers."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK_KEY": secrets.token_hex(16), "PYTHONPATH": str(HERE.parent)}
        with Listener(os.path.join(folder, "link"), authkey=env["BENCHMARK_KEY"].encode()) as listener:
            script = [str(HERE / "sides.py"), side.split()[0], str(listener.address)]
            process = subprocess.Popen([sys.executable, *COMMANDS[side], *script], env=env)
            link = listener.accept()
        try:
            yield link
            link.send(None)
            process.wait(60)
        finally:
            process.terminate()  # both launchers then end their workers; nothing happens to one that has ended
            process.wait(20)


def ask(links: Sequence[Connection], turn: Turn) -> tuple[float, float]:
    """Mean seconds a step, and the loss, of sides that have the same turn at once."""
    for link in links:
        link.send(turn)
    answers = [link.recv() for link in links]
    return sum(seconds for seconds, _ in answers) / len(answers), answers[0][1]


def quietest(links: Sequence[Connection], turn: Turn, options: argparse.Namespace) -> tuple[float, float]:
    """Mean seconds a step, and the share of the time in which some process of the machine waited for a core: of the first quiet
    turn, or else of the quietest."""
    found = []
    for _ in range(1 + options.again):
        wait_for_quiet(options.patience)
        waited, began = stalled(), time.perf_counter()
        seconds, _ = ask(links, turn)
        found.append(((stalled() - waited) / (time.perf_counter() - began), seconds))
        if found[-1][0] < QUIET:
            break
    share, seconds = min(found)
    return seconds, share


def wait_for_quiet(patience: float) -> None:
    """Returns after a second in which nobody waited for a core, or at the end of the patience."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        waited = stalled()
        time.sleep(1)
        if stalled() - waited < QUIET / 3:
            return


def stalled() -> float:
    """Seconds in which some process waited for a core, since the machine started; 0 where the kernel does not count them."""
    pressure = Path("/proc/pressure/cpu")
    return int(pressure.read_text().split("total=")[1].split()[0]) / 1e6 if pressure.exists() else 0.0


def compare(links: dict[str, list[Connection]], name: str, schedule: str, options: argparse.Namespace) -> Seconds:
    """The seconds a step of every side in every round.

    Raises:
        SystemExit: the sides do not compute the same.
    """
    first = {side: ask(pair, (name, schedule, WARM_UP)) for side, pair in links.items() if side != "busy"}
    steps = max(2, round(options.seconds / first["theirs"][0]))
    ask(links["busy"], (name, schedule, 1))
    losses = {side: loss for side, (_, loss) in first.items() if side != "alone" or schedule == SCHEDULES[0]}
    if max(losses.values()) - min(losses.values()) > SAME_LOSS * abs(losses["ours"]):
        sys.exit(f"{name}, {schedule}: the losses after {WARM_UP} steps differ: {losses}")
    found: Seconds = defaultdict(list)
    for round_ in range(options.rounds):
        sides = list(links)
        noise = {}
        for side in sides[round_ % len(sides) :] + sides[: round_ % len(sides)]:  # nobody is always the first
            seconds, noise[side] = quietest(links[side], (name, schedule, steps), options)
            found[side].append(seconds)
        shown = ", ".join(f"{side} {found[side][-1] * 1e3:.1f} ms (waits {noise[side]:.0%})" for side in links)
        print(f"{name}, {schedule}, round {round_ + 1}: {shown}", file=sys.stderr)
    return found


def row(name: str, schedule: str, found: Seconds) -> list[str]:
    """Medians over the rounds, and ratios, each the median of the rounds' own ratios with the middle half of them."""
    ideal, busy = ([t * IDEAL for t in found[side]] for side in ("alone", "busy"))

    def ratio(mine: list[float], others: list[float]) -> str:
        each = sorted(a / b for a, b in zip(mine, others))
        return f"{median(each):.3f} ({each[len(each) // 4]:.3f}-{each[-1 - len(each) // 4]:.3f})"

    times = [f"{median(t) * 1e3:.1f}" for t in (found["ours"], found["theirs"], ideal)]
    return [name, schedule, *times, ratio(found["ours"], found["theirs"]), *(ratio(found["ours"], i) for i in (ideal, busy))]


def table(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    head = ("model", "schedule", "ours ms", "torch ms", "ideal ms", "ours/torch", "ours/ideal", "ours/ideal, busy")
    if markdown:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in (head, *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long one turn takes")
    parser.add_argument("--again", type=int, default=2, help="how often a disturbed turn is taken again")
    parser.add_argument("--patience", type=float, default=0, help="seconds that a turn may wait for a quiet machine")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the sides are ended, too
    rows = []
    with ExitStack() as stack:
        link = {side: stack.enter_context(started(side)) for side in COMMANDS}
        sides = {"ours": [link["ours"]], "theirs": [link["theirs"]], "alone": [link["alone"]], "busy": [link["alone"], link["alone too"]]}
        for name in options.models:
            for schedule in options.schedules:
                rows.append(row(name, schedule, compare(sides, name, schedule, options)))
    device = torch.cuda.get_device_name() if device_of(0).type == "cuda" else f"{len(os.sched_getaffinity(0))} cores, one thread a worker"
    print(f"{WORKERS} workers, {MICRO_BATCHES} micro-batches, {device}, torch {torch.__version__}, {platform.platform()}")
    print("medians; in brackets the middle half of the rounds", table(rows, options.markdown), sep="\n\n")


if __name__ == "__main__":
    main()
