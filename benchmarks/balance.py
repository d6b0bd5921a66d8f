"""How near the cut that is chosen comes to the best one: the dearest stage against that of the best of all cuts.

    python benchmarks/balance.py [--markdown]

Every node of the model's graph is measured by itself; then all cuts of these costs are tried (by dynamic programming, which is exact), and
the engine's own choice, which looks at places where little crosses only, is added up from the same costs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from itertools import pairwise

import torch
import torchvision
from torch import Tensor, nn

from pipe.captured import Captured
from pipe.partition.balance import balance, stage_costs
from pipe.partition.measure import measure


def gpt2() -> nn.Module:
    """Twelve layers of transformers' GPT-2, narrow."""
    import transformers

    config = transformers.GPT2Config(vocab_size=2048, n_embd=256, n_layer=12, n_head=4, n_positions=128)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "resnet50": (lambda: torchvision.models.resnet50(weights=None), {"x": torch.randn(2, 3, 96, 96)}),
    "vit_b_16": (lambda: torchvision.models.vit_b_16(weights=None), {"x": torch.randn(2, 3, 224, 224)}),
}
if importlib.util.find_spec("transformers") is not None:
    MODELS["gpt2, 12 layers"] = (gpt2, {name: torch.randint(2048, (2, 128)) for name in ("input_ids", "labels")})


def ratio(name: str, stages: int) -> tuple[int, float]:
    """The number of nodes, and the dearest stage of the cut at candidates by that of the best cut."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    graph = Captured(make(), inputs).layers
    parts = [graph.part(at, at + 1) for at in range(len(graph))]
    costs = [cost.total for cost in measure(parts, (), inputs, names=list(map(str, range(len(graph)))))]
    best = max(stage_costs(costs, balance(costs, stages)))
    ends = [*graph.candidates(stages), len(graph)]
    units = [sum(costs[begin:end]) for begin, end in pairwise([0, *ends])]
    return len(graph), max(stage_costs(units, balance(units, stages))) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [("model", "nodes", "stages", "dearest stage / best")]
    for name in MODELS:
        for stages in (2, 4):
            nodes, found = ratio(name, stages)
            rows.append((name, str(nodes), str(stages), f"{found:.3f}"))
    for i, row in enumerate(rows):
        print("| " + " | ".join(row) + " |" if asked.markdown else "  ".join(cell.ljust(12) for cell in row))
        if asked.markdown and i == 0:
            print("| " + " | ".join("---" for _ in row) + " |")


if __name__ == "__main__":
    main()
