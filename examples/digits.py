"""Trains a resnet18 on scikit-learn's handwritten digits. The same script runs

    pipe-launch --stages 2 examples/digits.py                       in two stages, each in a process of its own,
    pipe-launch --strategy ddp --replicas 2 examples/digits.py      as two whole models, each with half of every batch, or
    python examples/digits.py                                       in one process
without a change.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

import pipe


def resnet() -> nn.Module:
    """torchvision's resnet18 as it is, but for its first layers: they would make these images of 8x8 pixels in grey 4 times smaller."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train with and 360 to test with: images (n, 1, 8, 8) from 0 to 1, and labels (n,)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(engine: pipe.Engine, test: TensorDataset) -> float:
    right = sum(int((engine.predict(x).argmax(1) == y).sum()) for x, y in DataLoader(test, batch_size=128))
    return right / len(test)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--short", action="store_true", help="two epochs: a quick check that all works")
    options = parser.parse_args()
    epochs = 2 if options.short else options.epochs

    torch.manual_seed(0)
    train, test = digits()
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    # Without drop_last the 29 digits left over would be cut so small that BatchNorm has nothing to average.
    loader = DataLoader(train, batch_size=128, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * len(loader))

    began = time.perf_counter()
    # 4 micro-batches of 32 images: more would fill the pipeline better, but a CPU is slow at few images at a time.
    with pipe.Engine(model, optimizer, nn.CrossEntropyLoss(), micro_batches=4) as engine:
        engine.fit(loader, epochs=epochs, scheduler=scheduler)
        seconds = time.perf_counter() - began
        report = engine.report()  # of the last step of the training
        found = accuracy(engine, test)
    print(report)
    print(f"trained for {seconds:.1f} s as {engine.plan}")
    print(f"test accuracy {found:.1%}")


if __name__ == "__main__":
    main()
