"""Cutting by costs: memory, unequal devices, links, and the table that --plan prints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipe
from pipe import links
from pipe.errors import PlanError
from pipe.partition import measure
from pipe.placement import size
from tests.single.steps import batches, layers, sgd


class Heavy(nn.Module):
    """Costs what its parameters say; no time of the machine is measured (see `costs`)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.mean()


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes a millisecond a parameter."""

    def by_parameters(given: Any, *args: Any, **options: Any) -> list[measure.LayerCost]:
        counts = [sum(p.numel() for p in layer.parameters()) for layer in given]
        return [measure.LayerCost(count * 0.5e-3, count * 0.5e-3, 8 * count, 100 + i) for i, count in enumerate(counts)]

    monkeypatch.setattr("pipe.cutting.measure", by_parameters)


def plan_of(widths: list[int], **options: Any) -> pipe.Plan:
    model = nn.Sequential(*map(Heavy, widths))
    ((x, _),) = batches(steps=1)
    with pipe.Engine(model, sgd(model), nn.MSELoss(), example=((x,), {}), **options) as engine:
        return engine.plan


@pytest.mark.usefixtures("costs")
def test_the_plan_tells_what_each_stage_holds_and_costs() -> None:
    plan = plan_of([1, 2, 3, 4, 5, 6], stages=2)
    assert plan.split == (4, 2)
    assert [(part.layers, part.parameters, part.seconds, part.bytes_out) for part in plan.parts] == [
        ("layers 0 to 3 (4)", 10, pytest.approx(10e-3), 103),
        ("layers 4 to 5 (2)", 11, pytest.approx(11e-3), 0),
    ]
    assert type(plan).from_json(plan.to_json()) == plan
    lines = plan.table().splitlines()
    assert [re.split(r"\s{2,}", line) for line in lines[1:]] == [
        ["stage", "layers", "parameters", "ms a micro-batch", "bytes out"],
        ["0", "layers 0 to 3 (4)", "10", "10", "103"],
        ["1", "layers 4 to 5 (2)", "11", "11", "0"],
    ]


def test_what_was_not_measured_is_said() -> None:
    model = layers()
    with pipe.Engine(model, sgd(model), nn.MSELoss(), stages=2, split=[2, 3], example=((torch.zeros(4, 6).double(),), {})) as engine:
        assert [part.seconds for part in engine.plan.parts] == [None, None]
        assert engine.plan.table().count("not measured") == 4


@pytest.mark.usefixtures("costs")
def test_a_slow_worker_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of([1] * 9, stages=2).split == (5, 4) or plan_of([1] * 9, stages=2).split == (4, 5)
    monkeypatch.setattr("pipe.cutting.Cutting._hardware", lambda self: ([1.0, 2.0], [0.0]))
    assert plan_of([1] * 9, stages=2).split == (6, 3)


@pytest.mark.usefixtures("costs")
def test_a_slow_link_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes and one more after each layer; the link is dearer than all layers, so the cut goes where least crosses."""
    monkeypatch.setattr("pipe.cutting.Cutting._hardware", lambda self: ([1.0, 1.0], [1.0]))
    assert plan_of([1] * 6, stages=2).split == (1, 5)


def test_devices_that_are_about_as_fast_count_as_equal() -> None:
    assert links.relative([1.0, 1.2, 0.0, 2.0]) == [1.0, 1.0, 1.0, 2.0]
    assert links.relative([0.0, 0.0]) == [1.0, 1.0]
    assert links.seconds("cpu") > 0


@pytest.mark.usefixtures("costs")
def test_the_cut_keeps_to_the_memory() -> None:
    """A layer holds its weights, gradients and momentum, and its outputs of some 100 bytes for each of 8 micro-batches."""
    assert plan_of([8, *[1] * 8], stages=2).split == (1, 8)
    assert plan_of([8, *[1] * 8], stages=2, memory=5000).split == (4, 5)
    with pytest.raises(PlanError, match=r"layer 0 has .* bytes; a stage may have 2000: raise the limit \(--memory\)"):
        plan_of([100, 40, 40, 10], stages=2, memory=2000)


@pytest.mark.parametrize("given", [{"split": [1, 3]}, {"strategy": "single"}])
def test_a_cut_that_was_asked_for_must_keep_to_the_memory(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"stage 0 .* needs 2\.3 MiB for weights, gradients and optimizer state, and a worker may use 1\.0"):
        plan_of([100_000, 1, 1, 1] if "split" in given else [100_000], stages=2 if "split" in given else 1, memory="1MiB", **given)


@pytest.mark.parametrize(
    ("given", "nbytes"), [(12, 12), ("12", 12), ("8GiB", 2**33), ("8G", 2**33), ("1.5 kb", 1536), ("2TiB", 2**41), ("7 mib", 7 * 2**20)]
)
def test_sizes(given: Any, nbytes: int) -> None:
    assert size(given) == nbytes


@pytest.mark.parametrize("given", ["", "8 GiBs", "-1", 0, "0", "many", True, "1e9"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"memory is {given!r}; it is the bytes that a worker may use")):
        pipe.Engine(layers(), None, nn.MSELoss(), memory=given)
