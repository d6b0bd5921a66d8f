"""Layer costs -> how many consecutive layers each stage gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from pipe.errors import PlanError


def balance(costs: Sequence[float], stages: int, *, sizes: Sequence[int] | None = None, limit: int | None = None) -> tuple[int, ...]:
    """How many consecutive layers each stage gets so that the dearest stage is as cheap as it can be: exact.

    Of the cuts that are equally good in this, the one with the smallest sum of squares of the stages' costs, then of their numbers of
    layers.

    Args:
        costs: of each layer, in any unit.
        sizes: bytes of each layer; needed with a limit.
        limit: the most bytes that one stage may have.

    Raises:
        PlanError: more stages than layers, or no cut keeps within the limit.
    """
    _check(costs, stages, sizes, limit)
    nbytes = list(sizes) if sizes is not None and limit is not None else [0] * len(costs)
    most = limit or 0
    if max(nbytes) > most or len(_fill(nbytes, nbytes, most, most)) > stages:
        raise PlanError(_too_big(nbytes, stages, most))
    whole = _whole(costs)
    dearest = _smallest_cap(whole, lambda cap: len(_fill(whole, nbytes, cap, most)) <= stages)
    return _smoothest(whole, nbytes, stages, dearest, most)


def bound(costs: Sequence[float], counts: Sequence[int]) -> int | None:
    """The layer that by itself costs as much as the dearest stage of this cut, so that no cut into more stages helps; None if none does."""
    whole = _whole(costs)
    dearest = max(range(len(whole)), key=whole.__getitem__)
    ends = accumulate(counts)
    return dearest if max(sum(whole[end - count : end]) for end, count in zip(ends, counts)) == whole[dearest] else None


def stage_costs(costs: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """The sum of its layers' costs for each stage."""
    ends = list(accumulate(counts))
    return tuple(math.fsum(costs[end - count : end]) for end, count in zip(ends, counts))


def _check(costs: Sequence[float], stages: int, sizes: Sequence[int] | None, limit: int | None) -> None:
    if stages < 1:
        raise PlanError(f"{stages} stages were asked for; there is at least one: give 1 or more")
    if stages > len(costs):
        raise PlanError(
            f"{stages} stages were asked for and the model has {len(costs)} layers; a stage holds at least one layer: "
            f"use at most {len(costs)} stages"
        )
    for what, numbers in (("cost", costs), ("size", sizes or ())):
        for i, number in enumerate(numbers):
            if not 0 <= number < math.inf:
                raise PlanError(f"layer {i} has the {what} {number!r}; it must be finite and not negative: measure it again")
    if sizes is not None and len(sizes) != len(costs):
        raise PlanError(f"there are {len(sizes)} sizes for {len(costs)} layers; each layer has one: give {len(costs)}")
    if limit is not None and sizes is None:
        raise PlanError(f"a limit of {limit} bytes came without the layers' sizes; it is compared with them: give sizes, too")


def _whole(costs: Sequence[float]) -> list[int]:
    """The costs in a unit in which all are whole numbers, so that sums are exact and equal cuts compare equal."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(below for _, below in ratios)  # they are powers of two
    return [above * (unit // below) for above, below in ratios]


def _fill(costs: Sequence[int], others: Sequence[int], cap: int, other_cap: int) -> list[int]:
    """As few stages as possible with sums of at most `cap` and `other_cap`, each filled before the next; no layer is above either."""
    counts = [0]
    cost = other = 0
    for c, o in zip(costs, others):
        cost, other = cost + c, other + o
        if cost <= cap and other <= other_cap:
            counts[-1] += 1
        else:
            counts.append(1)
            cost, other = c, o
    return counts


def _smallest_cap(costs: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The smallest number from the dearest layer up to the sum of all for which `fits` holds, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return high


def _smoothest(costs: Sequence[int], nbytes: Sequence[int], stages: int, cap: int, most: int) -> tuple[int, ...]:
    """The cut within both limits with the smallest sums of squares, by dynamic programming over (stages so far, layers so far)."""
    layers = len(costs)
    best: list[tuple[int, int] | None] = [(0, 0)] + [None] * layers  # best[i]: of the first i layers in the stages so far; None: no cut
    begins: list[list[int]] = []  # begins[s][i]: where stage s begins if it ends before layer i
    for _ in range(stages):
        now: list[tuple[int, int] | None] = [None] * (layers + 1)
        begin = [0] * (layers + 1)
        for i in range(1, layers + 1):
            cost = size = 0
            for j in range(i - 1, -1, -1):
                cost, size = cost + costs[j], size + nbytes[j]
                if cost > cap or size > most:
                    break
                before, known = best[j], now[i]
                if before is None:
                    continue
                sums = before[0] + cost * cost, before[1] + (i - j) ** 2
                if known is None or sums < known:
                    now[i], begin[i] = sums, j
        best = now
        begins.append(begin)
    counts: list[int] = []
    end = layers
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return tuple(reversed(counts))


def _too_big(sizes: Sequence[int], stages: int, limit: int) -> str:
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > limit:
        return f"layer {largest} has {sizes[largest]} bytes; a stage may have {limit}: raise the limit (--memory) or split the layer"
    least = _smallest_cap(sizes, lambda cap: len(_fill(sizes, sizes, cap, cap)) <= stages)
    enough = len(_fill(sizes, sizes, limit, limit))
    return (
        f"{stages} stages have {least} bytes in the largest at best; a stage may have {limit}: "
        f"use at least {enough} stages or raise the limit (--memory)"
    )
