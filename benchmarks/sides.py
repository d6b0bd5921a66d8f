"""The sides of `peer.py`, each run in processes of its own: `sides.py ours|theirs|alone ADDRESS`.

Each connects to ADDRESS (of `multiprocessing.connection`) and does what turns say: some steps of a model under a schedule,
answered with the seconds a step and the last loss.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import Tensor, nn

WORKERS, MICRO_BATCHES = 2, 8
LOSS = nn.MSELoss()
Turn = tuple[str, str, int]  # model, schedule, steps


def make(name: str) -> tuple[list[nn.Module], list[int], Tensor, Tensor]:
    """Layers, layers of each stage, input and target."""
    torch.manual_seed(0)
    if name == "transformer":
        layers: list[nn.Module] = [nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(8)]
        return layers, [4, 4], torch.randn(32, 64, 256), torch.randn(32, 64, 256)
    if name == "resnet18":
        from torchvision.models import resnet18

        resnet = resnet18(num_classes=256)
        stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        blocks = [*resnet.layer1, *resnet.layer2, *resnet.layer3, *resnet.layer4]
        layers = [stem, *blocks, nn.Sequential(resnet.avgpool, nn.Flatten(1), resnet.fc)]
        return layers, [5, 5], torch.randn(64, 3, 96, 96), torch.randn(64, 256)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
    return layers, [4, 4], torch.randn(8192, 1024), torch.randn(8192, 1024)  # a micro-batch has 1024 rows: 4 MiB cross


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def device_of(worker: int) -> torch.device:
    return torch.device("cuda", worker) if torch.cuda.device_count() >= WORKERS else torch.device("cpu")


class Ours:
    """This engine, in a script of pipe-launch."""

    def turns(self, given: Iterator[Turn]) -> Iterator[Turn]:
        return given

    def step(self, name: str, schedule: str) -> Callable[[], float]:
        import pipe

        layers, split, x, y = make(name)
        optimizer = sgd(nn.ModuleList(layers).parameters())
        engine = pipe.Engine(layers, optimizer, LOSS, schedule=schedule, micro_batches=MICRO_BATCHES, split=split)
        self.engine = engine
        return lambda: engine.train_step(x, target=y)

    def settle(self) -> None:
        self.engine.train()  # waits for the step before

    def loss(self, last: float) -> float:
        return last


class Theirs:
    """torch.distributed.pipelining, under torchrun."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        cuda = device_of(0).type == "cuda"
        self.device = device_of(int(os.environ["RANK"]))
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self.rank = dist.get_rank()

    def turns(self, given: Iterator[Turn]) -> Iterator[Turn]:
        """Rank 0's turns on both ranks. Gloo waits without spinning, so who has no turn takes no time from who has."""
        while True:
            turn = [next(given, None)]
            self.dist.broadcast_object_list(turn, src=0, device=torch.device("cpu"))
            if turn[0] is None:
                return
            yield turn[0]

    def step(self, name: str, schedule: str) -> Callable[[], list[Tensor]]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        layers, split, x, y = make(name)
        first = self.rank == 0
        part = nn.Sequential(*(layers[: split[0]] if first else layers[split[0] :])).to(self.device)
        stage = PipelineStage(part, self.rank, WORKERS, self.device)
        order = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stage, MICRO_BATCHES, loss_fn=LOSS)
        optimizer = sgd(part.parameters())

        def step() -> list[Tensor]:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if first:
                order.step(x.to(self.device))
            else:
                order.step(target=y.to(self.device), losses=losses)
            optimizer.step()
            return losses

        return step

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.dist.barrier()

    def loss(self, last: list[Tensor]) -> float:
        found = [sum(loss.item() for loss in last) / MICRO_BATCHES]
        self.dist.broadcast_object_list(found, src=WORKERS - 1, device=torch.device("cpu"))
        return found[0]


class Alone:
    """One process and device: the same micro-batches one after the other."""

    def turns(self, given: Iterator[Turn]) -> Iterator[Turn]:
        return given

    def step(self, name: str, schedule: str) -> Callable[[], Tensor]:
        layers, _, x, y = make(name)
        device = device_of(0)
        model = nn.Sequential(*layers).to(device)
        optimizer = sgd(model.parameters())

        def step() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for xs, ys in zip(x.to(device).chunk(MICRO_BATCHES), y.to(device).chunk(MICRO_BATCHES)):
                loss = LOSS(model(xs), ys) / MICRO_BATCHES
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return step

    def settle(self) -> None:
        if device_of(0).type == "cuda":
            torch.cuda.synchronize()

    def loss(self, last: Tensor) -> float:
        return float(last)


def do(side: Ours | Theirs | Alone, given: Iterator[Turn], answer: Callable[[tuple[float, float]], None]) -> None:
    """Turn after turn: consecutive steps up to the end of the last one, which is what a user waits for."""
    step_of = cache(side.step)  # engines and models stay for the next turn
    for name, schedule, steps in side.turns(given):
        step = step_of(name, schedule)
        last: Any = step()  # the engine of this turn is the one to settle, and its caches are warm again
        side.settle()
        began = time.perf_counter()
        for _ in range(steps):
            last = step()
        side.settle()
        seconds = (time.perf_counter() - began) / steps
        answer((seconds, side.loss(last)))


def main() -> None:
    name, address = sys.argv[1:]
    torch.set_num_threads(1)
    side = {"ours": Ours, "theirs": Theirs, "alone": Alone}[name]()
    if isinstance(side, Theirs) and side.rank:
        do(side, iter(()), lambda found: None)
        return
    with Client(address, authkey=os.environ["BENCHMARK_KEY"].encode()) as link:
        do(side, iter(link.recv, None), link.send)


if __name__ == "__main__":
    main()
