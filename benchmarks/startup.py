"""How long it takes from the command to the first finished step of a small model: `pipe-launch --stages 2`.

python benchmarks/startup.py             # --rounds 5, --stages 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

PARTS = (
    ("launcher", "from the command to the worker's process: imports, rendezvous"),
    ("joining", "from there to the script's first line: imports of torch, RPC"),
    ("imports", "the script's own: torch and pipe.engine"),
    ("engine", "pipe.Engine(...)"),
    ("first step", "measures, cuts and sends the model, builds the workers, one step up to its end"),
    ("second step", "for comparison"),
    ("end", "from the end of the script to the end of the command"),
)


def script() -> dict[str, float]:
    """The moments of a run, by the clock of the day; this is what the launcher runs."""
    moments = {"process": process_began(), "script": time.time()}
    import torch
    from torch import nn

    import pipe

    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    x = torch.randn(64, 64)
    pipe.Engine  # noqa: B018 - loads it
    moments["imported"] = time.time()
    engine = pipe.Engine(layers, torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1), nn.MSELoss())
    moments["engine"] = time.time()
    for name in ("first", "second"):
        engine.train_step(x, target=x)
        engine.trace  # noqa: B018 - waits for the end of the step
        moments[name] = time.time()
    engine.close()
    return moments


def process_began() -> float:
    """When this process was started; the kernel counts in hundredths of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def run(stages: int) -> list[float]:
    """The seconds of each part."""
    command = [sys.executable, "-m", "launch", "--stages", str(stages), str(Path(__file__).resolve()), "--inside"]
    began = time.time()
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.PIPE, check=True, timeout=120)
    ended = time.time()
    found = json.loads(done.stdout)
    at = [began, *(found[name] for name in ("process", "script", "imported", "engine", "first", "second")), ended]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(script()))
        return
    rounds = [run(options.stages) for _ in range(options.rounds)]
    to_first = [sum(parts[:5]) for parts in rounds]
    for (name, what), seconds in zip(PARTS, zip(*rounds)):
        print(f"{name:12} {median(seconds):6.2f} s   {what}")
    spread = f"{min(to_first):.2f} to {max(to_first):.2f} s in {len(rounds)} runs"
    print(f"command to first finished step: median {median(to_first):.2f} s, {spread}")
    own = [sum(parts[2:5]) for parts in rounds]
    print(f"script's first import to first finished step: median {median(own):.2f} s")


if __name__ == "__main__":
    main()
