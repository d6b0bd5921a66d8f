"""1F1B: a backward as soon as there can be one, so that few micro-batches are held."""

from __future__ import annotations

from pipe.action import Action, Op, Schedule


def one_f_one_b(workers: int, micro_batches: int) -> Schedule:
    """Some forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.

    Bubble (S-1)/(M+S-1) at equal stages and free links, as GPipe's; stage s holds min(M, S-s) micro-batches at its peak.
    Source: Narayanan et al., 2021, Efficient Large-Scale Language Model Training (PipeDream-Flush), section 2.2; Fan et al., 2021,
    DAPPLE, section 3.
    """

    def order(s: int) -> tuple[Action, ...]:
        ahead = min(micro_batches, workers - 1 - s)
        fill = [Action(Op.F, m, s) for m in range(ahead)]
        turns = [Action(op, m + shift, s) for m in range(micro_batches - ahead) for op, shift in ((Op.F, ahead), (Op.B, 0))]
        drain = [Action(Op.B, m, s) for m in range(micro_batches - ahead, micro_batches)]
        return tuple(fill + turns + drain)

    return Schedule(tuple(order(s) for s in range(workers)))
