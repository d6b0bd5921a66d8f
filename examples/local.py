"""Shows that cutting a model into stages changes no bit of its numbers. No launcher: the stages are threads of this process.

Run it with: python examples/local.py
"""

import copy
import logging
import sys

import torch
from torch import nn

import pipe

STEPS, MICRO_BATCHES = 5, 4
LOSS = nn.CrossEntropyLoss()


def make() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model, inputs (batch, 20) and labels (batch,). 50 rows do not divide by 4: 13, 13, 12 and 12."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)]
    return nn.Sequential(*layers), torch.randn(50, 20), torch.randint(3, (50,))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The losses of plain PyTorch: the same micro-batches one after the other, each with its share of the mean."""
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for xs, ys in zip(x.tensor_split(MICRO_BATCHES), y.tensor_split(MICRO_BATCHES)):
            part = LOSS(model(xs), ys) * (len(xs) / len(x))
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
    return losses


def piped(model: nn.Module, x: torch.Tensor, y: torch.Tensor, stages: int, schedule: str) -> list[float]:
    """The losses of the engine; its weights are in the model when it is closed."""
    strategy = "pipeline" if stages > 1 else "single"
    with pipe.Engine(
        model, optimizer_of(model), LOSS, stages=stages, schedule=schedule, micro_batches=MICRO_BATCHES, strategy=strategy
    ) as engine:
        return [engine.train_step(x, target=y) for _ in range(STEPS)]


def main() -> int:
    logging.getLogger("pipe").setLevel(logging.WARNING)  # nothing of each engine's plan
    torch.set_num_threads(1)  # how a sum over many threads is grouped is another question
    model, x, y = make()
    reference = copy.deepcopy(model)
    losses = plain(reference, x, y)
    print(f"plain PyTorch: loss {losses[0]:.6f} at first, {losses[-1]:.6f} after {STEPS} steps")
    all_equal = True
    for stages in (1, 2, 3, 4):
        for schedule in ("gpipe", "1f1b"):
            own = copy.deepcopy(model)
            same_loss = piped(own, x, y, stages, schedule) == losses  # == on floats: every bit
            same_weights = all(map(torch.equal, own.parameters(), reference.parameters()))
            print(f"{stages} stages, {schedule}: losses equal: {same_loss}, weights equal: {same_weights}")
            all_equal = all_equal and same_loss and same_weights
    print("equal bit for bit" if all_equal else "NOT equal")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
