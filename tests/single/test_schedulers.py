"""Every scheduler of torch, on the user's optimizer or on the engine's: learning rates and weights of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as ls
from torch.optim import swa_utils

import pipe
from tests.single.steps import batches, layers, plain, same_weights, sgd

Make = Callable[[torch.optim.Optimizer], Any]

MAKERS: dict[str, Make] = {
    "LambdaLR": lambda o: ls.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: ls.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: ls.StepLR(o, 2),
    "MultiStepLR": lambda o: ls.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: ls.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: ls.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: ls.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: ls.SequentialLR(o, [ls.ConstantLR(o, 0.1), ls.ExponentialLR(o, 0.9)], [3]),
    "PolynomialLR": lambda o: ls.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: ls.CosineAnnealingLR(o, 6),
    "ChainedScheduler": lambda o: ls.ChainedScheduler([ls.ConstantLR(o, 0.1), ls.ExponentialLR(o, 0.9)], optimizer=o),
    "ReduceLROnPlateau": lambda o: ls.ReduceLROnPlateau(o, factor=0.1, patience=0, threshold=0.9),
    "CyclicLR": lambda o: ls.CyclicLR(o, 0.01, 0.2, 2, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: ls.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: ls.OneCycleLR(o, 0.3, total_steps=8),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.02, 3),
}


def test_every_class_of_torch_is_tried() -> None:
    kinds = {name for name, kind in vars(ls).items() if isinstance(kind, type) and issubclass(kind, ls.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} <= set(MAKERS)


@pytest.mark.parametrize("before", [False, True], ids=["after the engine", "before the engine"])
@pytest.mark.parametrize("name", MAKERS)
def test_rates_and_weights(name: str, before: bool) -> None:
    make = MAKERS[name]
    model, loss_fn = layers(), nn.MSELoss()
    reference = copy.deepcopy(model)
    optimizer, own = sgd(model), sgd(reference)
    wanted = make(own)
    scheduler = make(optimizer) if before else None
    seen = set()
    with pipe.Engine(model, optimizer, loss_fn, stages=2, micro_batches=3, strategy="pipeline") as engine:
        scheduler = scheduler or make(engine.optimizer)
        for x, y in batches(8, 7):
            loss = engine.train_step(x, target=y)
            assert loss == plain(reference, own, x, y, 3, loss_fn)
            for each in (scheduler, wanted):
                each.step(loss) if name == "ReduceLROnPlateau" else each.step()
            groups = [{key: value for key, value in o.param_groups[0].items() if key != "params"} for o in (optimizer, own)]
            assert groups[0] == groups[1]
            seen.add(groups[0]["lr"])
        same_weights(engine, reference)
    assert len(seen) > 1
