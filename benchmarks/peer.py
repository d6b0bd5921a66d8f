"""The step time of this engine against torch.distributed.pipelining: same model, same cut, same optimizer, same micro-batches.

    python benchmarks/peer.py                # about 5 minutes; --markdown for a table to paste, --rounds 3 for less

Both sides run as their users start them, two workers with one thread each: ours by pipe-launch over RPC, theirs by torchrun over
gloo (NCCL where there are two GPUs). All processes stay up and work in turns, so that noise of the machine hits both sides alike:

    this process --turn: (model, schedule, steps)--> ours | theirs | one process alone | two processes at once, each alone
                 <-- seconds a step, last loss ----

A turn is some consecutive steps up to the end of the last one, divided by their number: what a user waits for. The ideal is the
time of one process x (m+p-1)/(m p); "busy" is the same from two processes at once, which share the machine's memory and clock as
a pipeline's workers do.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORKERS, MICRO_BATCHES, WARM_UP = 2, 8, 3
IDEAL = (MICRO_BATCHES + WORKERS - 1) / (MICRO_BATCHES * WORKERS)
TURN = 2.0  # seconds, about
MODELS = ("transformer", "resnet18", "mlp")
Turn = tuple[str, str, int]  # model, schedule, steps
Side = Callable[[Turn], tuple[float, float]]  # -> seconds a step, loss of the last one


def make(name: str) -> tuple[list[nn.Module], list[int], Tensor, Tensor]:
    """Layers, layers of each stage, input and target."""
    torch.manual_seed(0)
    if name == "transformer":
        layers = [nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(8)]
        return layers, [4, 4], torch.randn(32, 64, 256), torch.randn(32, 64, 256)
    if name == "resnet18":
        from torchvision.models import resnet18

        resnet = resnet18(num_classes=256)
        stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        blocks = [*resnet.layer1, *resnet.layer2, *resnet.layer3, *resnet.layer4]
        layers = [stem, *blocks, nn.Sequential(resnet.avgpool, nn.Flatten(1), resnet.fc)]
        return layers, [5, 5], torch.randn(64, 3, 96, 96), torch.randn(64, 256)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]  # 1024 rows of 1024 floats: 4 MiB a micro-batch
    return layers, [2, 2], torch.randn(8192, 1024), torch.randn(8192, 1024)


def device_of(worker: int) -> torch.device:
    return torch.device("cuda", worker) if torch.cuda.device_count() >= WORKERS else torch.device("cpu")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def timed(steps: int, step: Callable[[], float], settle: Callable[[], object]) -> tuple[float, float]:
    settle()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    settle()
    return (time.perf_counter() - began) / steps, loss


# --- the sides: each runs in its own processes ---


def ours() -> Side:
    import pipe

    torch.set_num_threads(1)
    engines: dict[tuple[str, str], tuple[pipe.Engine, Tensor, Tensor]] = {}

    def side(turn: Turn) -> tuple[float, float]:
        name, schedule, steps = turn
        if (name, schedule) not in engines:
            layers, split, x, y = make(name)
            made = pipe.Engine(
                layers, sgd, F.mse_loss_of if False else nn.MSELoss(), schedule=schedule, micro_batches=MICRO_BATCHES, split=split
            )
            engines[name, schedule] = made, x, y
        engine, x, y = engines[name, schedule]
        return timed(steps, lambda: engine.train_step(x, target=y), lambda: engine.optimizer_state_dict())

    return side


def theirs() -> Side:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    return lambda turn: (0.0, 0.0)
