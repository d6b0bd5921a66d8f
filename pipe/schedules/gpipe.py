"""GPipe: every forward, then every backward."""

from __future__ import annotations

from pipe.action import Action, Op, Schedule


def gpipe(workers: int, micro_batches: int) -> Schedule:
    """Every forward, then every backward.

    Bubble (S-1)/(M+S-1) at equal stages and free links. Every worker holds M micro-batches at its peak.
    Source: Huang et al., 2019, GPipe, section 2.3.
    """

    def order(s: int) -> tuple[Action, ...]:
        return tuple(Action(op, m, s) for op in (Op.F, Op.B) for m in range(micro_batches))

    return Schedule(tuple(order(s) for s in range(workers)))
