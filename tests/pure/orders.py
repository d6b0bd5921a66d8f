"""Random schedules that can run to their end: each action goes to its worker's order once all that it needs stands somewhere."""

from __future__ import annotations

from hypothesis import strategies as st

from pipe.action import Action, Op, Schedule


@st.composite
def valid_orders(draw: st.DrawFn, workers: int = 4, stages: int = 6, micro_batches: int = 5) -> Schedule:
    """A valid schedule of any shape: stages anywhere, whole and split backwards mixed, any order."""
    count = draw(st.integers(1, workers))
    homes = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=stages))
    last, work = len(homes) - 1, range(draw(st.integers(1, micro_batches)))
    split = {(m, s): draw(st.booleans()) for m in work for s in range(len(homes))}
    left = [Action(op, m, s) for (m, s), two in split.items() for op in ((Op.F, Op.I, Op.W) if two else (Op.F, Op.B))]
    done: set[Action] = set()
    orders: list[list[Action]] = [[] for _ in range(count)]

    def ready(a: Action) -> bool:
        if a.op is Op.F:  # what a route needs beyond the neighbour is done by then
            return a.stage == 0 or Action(Op.F, a.micro_batch, a.stage - 1) in done
        if a.op is Op.W:
            return Action(Op.I, a.micro_batch, a.stage) in done
        after = {Action(op, a.micro_batch, a.stage + 1) for op in (Op.B, Op.I)}
        return Action(Op.F, a.micro_batch, a.stage) in done and (a.stage == last or bool(after & done))

    while left:
        action = draw(st.sampled_from([a for a in left if ready(a)]))
        left.remove(action)
        done.add(action)
        orders[homes[action.stage]].append(action)
    routes = draw(st.lists(st.sets(st.integers(0, last), min_size=2), max_size=4)) if last else []
    return Schedule(tuple(map(tuple, orders)), tuple(tuple(sorted(route)) for route in routes))
