"""A sample of the zoo: models of torchvision, unmodified, in three stages as in one. `benchmarks/zoo.py` makes the whole table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
spec = importlib.util.spec_from_file_location("zoo", PATH)
assert spec is not None
assert spec.loader is not None
zoo = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)
CASES = dict(zoo.torchvision_cases())


@pytest.mark.parametrize("name", zoo.SAMPLE)
def test_three_stages_train_as_one(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, target = CASES[name]()
    want, parameters, *_ = zoo.train(make, inputs, target, 1)
    got, _, way, nodes = zoo.train(make, inputs, target, 3)
    assert zoo.difference(got, want, 1e-6) is None
    assert zoo.beside_plain(make, inputs, target, want) is None
    assert parameters > 1e5
    assert way == "torch.fx"
    assert nodes >= 3
    assert len(want[0]) == 2  # losses of two steps
