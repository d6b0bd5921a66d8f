"""Balancing consecutive layers: exact, against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.errors import PlanError
from pipe.partition.balance import balance, bound, stage_costs


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, layers)))


@pytest.mark.parametrize(
    ("costs", "stages", "dearest"),
    [
        ([1, 2, 3, 4, 5, 6], 2, 11),
        ([1, 1, 1, 1, 10], 2, 10),
        ([9, 1, 1, 1, 1, 9], 3, 9),
        ([5] * 6, 4, 10),
        ([5] * 9, 5, 10),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int, dearest: float) -> None:
    counts = balance(costs, stages)
    assert max(stage_costs(costs, counts)) == dearest
    assert (len(counts), sum(counts)) == (stages, len(costs))


def test_the_dear_ends_stand_alone() -> None:
    assert balance([9, 1, 1, 1, 1, 9], 3) == (1, 4, 1)


def test_ties_go_to_the_smallest_sum_of_squares() -> None:
    assert balance([1, 1, 1, 1, 10], 3) == (2, 2, 1)
    assert balance([0] * 6, 3) == (2, 2, 2)
    assert sorted(balance([0.1] * 8, 3)) == [2, 3, 3]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_brute_force(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def rank(counts: tuple[int, ...]) -> tuple[float, float]:
        found = stage_costs(costs, counts)
        return max(found), sum(c * c for c in found)

    counts = balance(costs, stages)
    assert min(counts) >= 1
    assert rank(counts) == min(map(rank, cuts(len(costs), stages)))


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.data())
def test_brute_force_with_fractions(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    best = min(max(stage_costs(costs, counts)) for counts in cuts(len(costs), stages))
    assert max(stage_costs(costs, balance(costs, stages))) == pytest.approx(best, rel=1e-14)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_brute_force_with_a_limit(layers: list[tuple[int, int]], data: st.DataObject) -> None:
    costs, sizes = [c for c, _ in layers], [n for _, n in layers]
    stages = data.draw(st.integers(1, len(costs)))
    limit = data.draw(st.integers(0, 30))
    fit = [counts for counts in cuts(len(costs), stages) if max(stage_costs(sizes, counts)) <= limit]
    if not fit:
        with pytest.raises(PlanError, match=rf"bytes.* may have {limit}"):
            balance(costs, stages, sizes=sizes, limit=limit)
        return
    counts = balance(costs, stages, sizes=sizes, limit=limit)
    assert max(stage_costs(sizes, counts)) <= limit
    assert max(stage_costs(costs, counts)) == min(max(stage_costs(costs, c)) for c in fit)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=7), st.data())
def test_brute_force_with_links_and_unequal_devices(layers: list[tuple[int, int]], data: st.DataObject) -> None:
    """The step is as short as that of any cut whose dearest is the least, and the dearest at most twice that."""
    costs, crossing = [c for c, _ in layers], [n for _, n in layers]
    stages = data.draw(st.integers(1, len(costs)))
    slowness = data.draw(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=stages, max_size=stages))
    per_byte = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=stages - 1, max_size=stages - 1))
    micro_batches = data.draw(st.integers(1, 8))

    def parts(counts: tuple[int, ...]) -> list[float]:
        ends = list(accumulate(counts))
        return [
            *(cost * slow for cost, slow in zip(stage_costs(costs, counts), slowness)),
            *(crossing[end] * rate for end, rate in zip(ends, per_byte)),
        ]

    def time(counts: tuple[int, ...]) -> float:
        return sum(parts(counts)) + (micro_batches - 1) * max(parts(counts))

    counts = balance(costs, stages, slowness=slowness, crossing=crossing, per_byte=per_byte, micro_batches=micro_batches)
    least = min(max(parts(other)) for other in cuts(len(costs), stages))
    assert max(parts(counts)) <= 2 * least
    links = [other for other in cuts(len(costs), stages) if max(parts(other)) == least]
    if len(set(slowness)) == 1:  # then what the stages take together is the same for every cut
        assert time(counts) <= min(map(time, links))


def test_a_cut_moves_to_where_less_crosses_if_the_step_is_shorter() -> None:
    costs, crossing = [10] * 6, [0, 8, 8, 8, 1, 8]
    assert balance(costs, 2) == (3, 3)
    assert balance(costs, 2, crossing=crossing, per_byte=[1.0], micro_batches=1) == (4, 2)
    assert balance(costs, 2, crossing=crossing, per_byte=[1.0], micro_batches=8) == (3, 3)  # 8 less once, 10 more seven times
    assert balance(costs, 2, crossing=crossing, per_byte=[6.0], micro_batches=8) == (4, 2)  # else the link is the dearest


def test_a_slow_device_gets_less() -> None:
    assert balance([1] * 9, 2, slowness=[1.0, 2.0], micro_batches=64) == (6, 3)
    assert balance([1] * 9, 2, slowness=[2.0, 1.0], micro_batches=64) == (3, 6)


def test_many_layers_are_no_trouble() -> None:
    costs = [1 + (i * 37 % 11) / 7 for i in range(600)]
    counts = balance(costs, 16)
    assert max(stage_costs(costs, counts)) < sum(costs) / 16 + max(costs)


@pytest.mark.parametrize(
    ("costs", "stages", "more", "says"),
    [
        ([1, 2], 3, {}, "3 stages were asked for and the model has 2 layers; .* at most 2 stages"),
        ([], 1, {}, "1 stages .* 0 layers"),
        ([1], 0, {}, "0 stages were asked for; there is at least one"),
        ([1, -1], 1, {}, "layer 1 has the cost -1"),
        ([1, float("nan")], 1, {}, "layer 1 has the cost nan"),
        ([1, 1], 1, {"sizes": [1], "limit": 3}, "1 sizes for 2 layers"),
        ([1, 1], 1, {"limit": 3}, "limit of 3 bytes came without"),
        ([1] * 4, 2, {"sizes": [5, 9, 5, 5], "limit": 8}, "layer 1 has 9 bytes; a stage may have 8"),
        ([1] * 4, 2, {"sizes": [5] * 4, "limit": 8}, "2 stages have 10 bytes .* at best; a stage may have 8: use at least 4 stages"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(costs: list[float], stages: int, more: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        balance(costs, stages, **more)


@pytest.mark.parametrize(
    ("costs", "stages", "layer"),
    [([1, 1, 1, 1, 10], 2, 4), ([9, 1, 1, 1, 1, 9], 3, 0), ([5] * 6, 4, None), ([1, 2, 3, 4, 5, 6], 2, None), ([0.1] * 3, 3, 0)],
)
def test_the_layer_that_bounds_every_cut(costs: list[float], stages: int, layer: int | None) -> None:
    assert bound(costs, balance(costs, stages)) == layer
