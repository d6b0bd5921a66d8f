"""Layer costs -> how many consecutive layers each stage gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipe.errors import PlanError


def balance(
    costs: Sequence[float],
    stages: int,
    *,
    sizes: Sequence[int] | None = None,
    limit: int | None = None,
    slowness: Sequence[float] = (),
    crossing: Sequence[int] = (),
    per_byte: Sequence[float] = (),
    micro_batches: int = 1,
) -> tuple[int, ...]:
    """How many consecutive layers each stage gets so that the dearest of stages and links is as cheap as it can be: exact.

    Of the cuts that are equally good in this, the one with the smallest sum of squares of the stages' costs, then of their numbers of
    layers. Where links or devices differ in cost, a dearest that is up to twice as dear is taken if the step is shorter with it:

        time = sum of stages + sum of links + (micro_batches - 1) x dearest          (the fill of the pipeline, and its period)

    Args:
        costs: of each layer, in any unit.
        sizes: bytes of each layer; needed with a limit.
        limit: the most bytes that one stage may have.
        slowness: of each stage's worker: by what the costs are multiplied there.
        crossing: bytes that cross, one way, where a stage begins with this layer; one number a layer, the first unused.
        per_byte: of the link before each stage but the first: what a byte there and back costs, in the unit of the costs.
        micro_batches: of a step.

    Raises:
        PlanError: more stages than layers, or no cut keeps within the limit.
    """
    _check(costs, stages, sizes, limit)
    nbytes = list(sizes) if sizes is not None and limit is not None else [0] * len(costs)
    problem = _Problem.of(costs, stages, nbytes, limit or 0, slowness, crossing, per_byte)
    dearest = problem.dearest()
    if dearest is None:
        raise PlanError(_too_big(nbytes, stages, limit or 0))
    slacks = _SLACKS if problem.uneven else _SLACKS[:1]
    found = [problem.smoothest(dearest + dearest * slack // 100) for slack in slacks]
    return min(found, key=lambda counts: problem.time(counts, micro_batches)) if problem.uneven else found[0]


_SLACKS = (0, 2, 5, 10, 20, 50, 100)  # per cent


@dataclass(frozen=True)
class _Problem:
    """Costs as whole numbers of one unit, so that sums are exact and equal cuts compare equal."""

    upto: Sequence[int]  # upto[i]: the cost of layers 0 to i - 1
    nbytes: Sequence[int]  # likewise
    most: int
    slowness: Sequence[int]  # of each stage
    links: Sequence[Sequence[int]]  # links[s][i]: what it costs that stage s begins with layer i

    @classmethod
    def of(
        cls,
        costs: Sequence[float],
        stages: int,
        nbytes: Sequence[int],
        most: int,
        slowness: Sequence[float],
        crossing: Sequence[int],
        per_byte: Sequence[float],
    ) -> _Problem:
        own, slow, rates = _whole(costs), _whole(slowness or [1.0] * stages), _whole(per_byte or [0.0])
        unit = [_unit(costs), _unit(slowness or [1.0]), _unit(per_byte or [0.0])]
        links = [[0] * len(costs)] * stages
        if crossing and per_byte:
            links = [[0] * len(costs), *([n * rate * unit[0] * unit[1] for n in crossing] for rate in rates)]
        upto = list(accumulate(own, initial=0))
        return cls(upto, list(accumulate(nbytes, initial=0)), most, [n * unit[2] for n in slow], links)

    @property
    def stages(self) -> int:
        return len(self.slowness)

    @property
    def layers(self) -> int:
        return len(self.upto) - 1

    @property
    def uneven(self) -> bool:
        """Whether links cost something, or one device more than another."""
        return len(set(self.slowness)) > 1 or any(map(any, self.links))

    def cost(self, s: int, begin: int, end: int) -> int:
        """Of stage s with these layers."""
        return (self.upto[end] - self.upto[begin]) * self.slowness[s]

    def dearest(self) -> int | None:
        """The smallest that the dearest of stages and links can be; None: no cut keeps within the limit."""
        best: list[int | None] = [0] + [None] * self.layers  # best[i]: of the first i layers in the stages so far; None: no cut
        for s in range(self.stages):
            now: list[int | None] = [None] * (self.layers + 1)
            for i in range(s + 1, self.layers + 2 - self.stages + s):
                least: int | None = None
                for j in range(i - 1, s - 1, -1):
                    cost = self.cost(s, j, i)
                    if self.nbytes[i] - self.nbytes[j] > self.most or (least is not None and cost >= least):
                        break
                    if (before := best[j]) is not None:
                        here = max(cost, before, self.links[s][j])
                        least = here if least is None else min(least, here)
                now[i] = least
            best = now
        return best[-1]

    def smoothest(self, cap: int) -> tuple[int, ...]:
        """The cut with no stage or link above the cap that has the smallest sum of links, then sums of squares."""
        best: list[tuple[int, int, int] | None] = [(0, 0, 0)] + [None] * self.layers
        begins: list[list[int]] = []  # begins[s][i]: where stage s begins if it ends before layer i
        for s in range(self.stages):
            now: list[tuple[int, int, int] | None] = [None] * (self.layers + 1)
            begin = [0] * (self.layers + 1)
            for i in range(s + 1, self.layers + 2 - self.stages + s):
                for j in range(i - 1, s - 1, -1):
                    cost = self.cost(s, j, i)
                    if cost > cap or self.nbytes[i] - self.nbytes[j] > self.most:
                        break
                    before, known = best[j], now[i]
                    if before is None or self.links[s][j] > cap:
                        continue
                    sums = before[0] + self.links[s][j], before[1] + cost * cost, before[2] + (i - j) ** 2
                    if known is None or sums < known:
                        now[i], begin[i] = sums, j
            best = now
            begins.append(begin)
        counts: list[int] = []
        end = self.layers
        for begin in reversed(begins):
            counts.append(end - begin[end])
            end = begin[end]
        return tuple(reversed(counts))

    def time(self, counts: Sequence[int], micro_batches: int) -> int:
        """Of a step."""
        ends = list(accumulate(counts))
        stages = [self.cost(s, end - count, end) for s, (count, end) in enumerate(zip(counts, ends))]
        links = [self.links[s][end - count] for s, (count, end) in enumerate(zip(counts, ends))]
        return sum(stages) + sum(links) + (micro_batches - 1) * max(*stages, *links)


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


def _unit(costs: Sequence[float]) -> int:
    """A unit of which all costs are whole multiples, as so many to one of theirs: denominators are powers of two."""
    return max(float(cost).as_integer_ratio()[1] for cost in costs)


def _whole(costs: Sequence[float]) -> list[int]:
    """The costs in that unit."""
    unit = _unit(costs)
    return [above * (unit // below) for above, below in (float(cost).as_integer_ratio() for cost in costs)]


def _too_big(sizes: Sequence[int], stages: int, limit: int) -> str:
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > limit:
        return f"layer {largest} has {sizes[largest]} bytes; a stage may have {limit}: raise the limit (--memory) or split the layer"
    least = _Problem.of(sizes, stages, [0] * len(sizes), 0, (), (), ()).dearest()
    enough, room = 1, limit
    for size in sizes:
        enough, room = (enough, room - size) if size <= room else (enough + 1, limit - size)
    return (
        f"{stages} stages have {least} bytes in the largest at best; a stage may have {limit}: "
        f"use at least {enough} stages or raise the limit (--memory)"
    )
