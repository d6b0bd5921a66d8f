"""The plan: which strategy a wish gets, on what grounds, and in what order it works."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.action import Op, Schedule
from pipe.errors import PlanError
from pipe.plan import Plan, Wish, decide, uncut
from pipe.schedules import NAMES, schedule

#   wish, layers, world -> strategy, stages, replicas, micro-batches, words of the reason
TABLE: list[tuple[dict[str, Any], int | None, int | None, tuple[str, int, int, int, str]]] = [
    ({}, 5, None, ("single", 1, 1, 1, "started without pipe-launch and without stages")),
    ({}, None, None, ("single", 1, 1, 1, "started without pipe-launch")),
    ({"micro_batches": 3}, 5, None, ("single", 1, 1, 3, "without stages")),
    ({"stages": 1}, 5, 1, ("single", 1, 1, 1, "one worker")),
    ({"stages": 3}, 5, None, ("pipeline", 3, 1, 12, "5 layers in 3 stages")),
    ({"stages": 3, "micro_batches": 2}, 3, None, ("pipeline", 3, 1, 2, "3 layers in 3 stages")),
    ({}, 5, 4, ("pipeline", 4, 1, 16, "5 layers in 4 stages")),
    ({"replicas": 2}, 5, 4, ("hybrid", 2, 2, 8, "5 layers in 2 stages")),
    ({"stages": 2, "replicas": 2}, 5, 4, ("hybrid", 2, 2, 8, "5 layers in 2 stages")),
    ({"stages": 2, "replicas": 2, "strategy": "hybrid"}, 5, 4, ("hybrid", 2, 2, 8, "asked for")),
    ({"stages": 1, "replicas": 3}, 5, 3, ("ddp", 1, 3, 1, "replicas asked for")),
    ({"stages": 1, "replicas": 3}, None, 3, ("ddp", 1, 3, 1, "replicas asked for")),
    ({"strategy": "ddp"}, 5, 4, ("ddp", 1, 4, 1, "asked for; 4 workers became 4 replicas")),
    ({"strategy": "ddp", "replicas": 4, "micro_batches": 2}, 5, 4, ("ddp", 1, 4, 2, "asked for")),
    ({"strategy": "ddp"}, 5, None, ("ddp", 1, 1, 1, "asked for")),
    ({}, None, 3, ("pipeline", 3, 1, 12, "captured, and cut into 3 stages")),
    ({"stages": 3}, 2, 3, ("ddp", 1, 3, 1, "it has 2 layers, fewer than the stages; 3 workers became 3 replicas")),
    ({"strategy": "single", "stages": 3}, 5, 3, ("single", 1, 1, 1, "asked for; 2 of 3 workers stay idle")),
    ({"strategy": "single"}, None, None, ("single", 1, 1, 1, "asked for")),
    ({"strategy": "naive", "stages": 2, "micro_batches": 8}, 5, None, ("naive", 2, 1, 1, "asked for")),
    ({"strategy": "pipeline", "stages": 1}, None, None, ("pipeline", 1, 1, 4, "asked for")),
    ({"strategy": "pipeline", "stages": 2, "micro_batches": 1}, 5, None, ("pipeline", 2, 1, 1, "asked for")),
]


@pytest.mark.parametrize(("wish", "layers", "world", "want"), TABLE, ids=str)
def test_what_a_wish_gets(wish: dict[str, Any], layers: int | None, world: int | None, want: tuple[str, int, int, int, str]) -> None:
    plan = decide(Wish(**wish), layers=layers, world=world)
    assert (plan.strategy, plan.stages, plan.replicas, plan.micro_batches) == want[:4]
    assert want[4] in plan.reason
    assert str(plan).startswith(f"{plan.strategy}: {plan.stages} stage")
    assert "\n" not in str(plan)
    assert str(plan).isascii()
    assert plan.workers == plan.stages * plan.replicas


REFUSED: list[tuple[dict[str, Any], int | None, int | None, str]] = [
    ({"stages": 3, "strategy": "pipeline"}, 2, 3, r"cannot be cut into 3 stages: it has 2 layers.*'auto', which falls back to ddp"),
    ({"stages": 3}, 2, None, r"cannot be cut into 3 stages: it has 2 layers, fewer than the stages; give fewer stages"),
    ({"stages": 2}, 1, None, r"it has 1 layer, fewer"),
    ({"stages": 2, "strategy": "hybrid"}, 5, None, r"'hybrid' got 2 stages and 1 replica.*--replicas 2"),
    ({"replicas": 2}, 5, None, r"replicas=2 without pipe-launch.*'pipe-launch --stages 1 --replicas 2 script.py'"),
    ({"stages": 2, "strategy": "ddp"}, 5, None, r"'ddp' with 2 workers without pipe-launch.*--replicas 2"),
    ({"stages": 3, "replicas": 2}, 5, 4, r"stages=3 x replicas=2 needs 6 workers and pipe-launch started 4"),
    ({"stages": 2, "schedule": schedule("1f1b", 3, 4)}, 5, None, r"for 3 workers and 3 stages, and the job has 2 workers"),
    ({"stages": 2, "schedule": schedule("1f1b", 2, 4), "micro_batches": 8}, 5, None, r"micro_batches=8 and the schedule given is for 4"),
    ({"stages": 2, "schedule": Schedule.parse("F0@0 B0@0\nB0@1 F0@1")}, 5, None, r"deadlock: .*B0@1 on worker 1 waits for F0@1"),
]


@pytest.mark.parametrize(("wish", "layers", "world", "text"), REFUSED, ids=str)
def test_what_is_refused(wish: dict[str, Any], layers: int | None, world: int | None, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        decide(Wish(**wish), layers=layers, world=world)


def test_a_model_that_turns_out_to_be_uncuttable() -> None:
    why = "Custom cannot be traced"
    auto, asked = Wish(stages=3), Wish(stages=3, strategy="pipeline", micro_batches=2)
    plan = uncut(auto, decide(auto, layers=None, world=3), why, 3)
    assert (plan.strategy, plan.replicas, plan.micro_batches) == ("ddp", 3, 1)
    assert "cannot be cut into 3 stages: Custom cannot be traced; 3 workers became 3 replicas" in plan.reason
    for wish, world in ((auto, None), (asked, 3)):
        with pytest.raises(PlanError, match="cannot be cut into 3 stages: Custom cannot be traced; give fewer stages"):
            uncut(wish, decide(wish, layers=None, world=world), why, world)


@pytest.mark.parametrize("name", ["stages", "stages_per_worker", "replicas", "micro_batches"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_numbers_are_whole_and_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"{name} is {value!r}; it is a whole number of at least 1: leave it out"):
        Wish(**{name: value})


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"strategy": "fsdp"}, "'fsdp' is not known; it is one of auto, single, naive, pipeline, ddp, hybrid"),
        ({"stages_per_worker": 2}, "stages_per_worker is 2; this version runs one stage a worker"),
        ({"schedule": "zbv"}, "'zbv' is not available in this version; use one of 'gpipe', '1f1b'"),
        ({"schedule": "1fb1"}, "did you mean '1f1b'"),
        ({"schedule": ["gpipe"]}, "schedule is a list; it is a name such as 'gpipe'"),
    ],
)
def test_words_are_known(wish: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Wish(**wish)


def test_a_schedule_that_is_given_says_how_many_micro_batches() -> None:
    own = schedule("1f1b", 2, 6)
    plan = decide(Wish(stages=2, schedule=own), layers=4)
    assert (plan.schedule, plan.micro_batches, plan.strategy) == ("given", 6, "pipeline")
    assert plan.order(6) == own
    with pytest.raises(PlanError, match=r"makes 5 micro-batches a replica and the schedule given is for 6.*'gpipe'"):
        plan.order(5)


texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(
    strategy=texts,
    numbers=st.tuples(*[st.integers(1, 64)] * 3),
    split=st.lists(st.integers(1, 99)),
    places=st.lists(texts),
    orders=st.none() | st.just(str(schedule("gpipe", 2, 2))),
)
def test_json_both_ways(strategy: str, numbers: tuple[int, int, int], split: list[int], places: list[str], orders: str | None) -> None:
    plan = Plan(strategy, *numbers, split=tuple(split), reason=strategy, places=tuple(places), orders=orders)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["micro_batches"] == numbers[2]


@given(st.integers(1, 6), st.integers(0, 40))
def test_replicas_share_the_micro_batches(replicas: int, pieces: int) -> None:
    counts = Plan("hybrid", 2, replicas, 4).counts(pieces)
    assert sum(counts) == pieces
    assert len(counts) == replicas
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "replicas", "pieces"), [(1, 1, 1), (2, 1, 5), (1, 3, 4), (2, 2, 7), (3, 2, 1), (2, 3, 2)])
def test_the_order_with_replicas(name: str, stages: int, replicas: int, pieces: int) -> None:
    plan = Plan("hybrid", stages, replicas, 4, schedule=name)
    order = plan.order(pieces)
    assert order.workers == stages * replicas
    first = 0
    for r, count in enumerate(plan.counts(pieces)):
        own = schedule(name, stages, count)
        for s in range(stages):
            found = order.orders[r * stages + s]
            assert [(a.op, a.micro_batch - first, a.stage) for a in found] == [(a.op, a.micro_batch, a.stage) for a in own.orders[s]]
        first += count
    done = [a.micro_batch for a in order.home if a.op is Op.B and a.stage == 0]
    assert sorted(done) == list(range(pieces))
    for action in order.home:
        for need in order.needs(action):
            assert order.home[need] // stages == order.home[action] // stages  # messages stay inside a replica


def test_the_plan_in_one_line() -> None:
    plan = Plan("hybrid", 2, 3, 8, schedule="1f1b", reason="asked for")
    assert str(plan) == "hybrid: 2 stages x 3 replicas, 8 micro-batches, 1f1b; asked for"
    assert str(replace(plan, strategy="single", stages=1, replicas=1, micro_batches=1)) == "single: 1 stage, 1 micro-batch; asked for"
