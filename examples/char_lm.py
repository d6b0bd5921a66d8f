"""Trains a small transformer to write Python, character by character, on the sources of Python's own library.

Run it with: pipe-launch --stages 2 --schedule 1f1b examples/char_lm.py
"""

import argparse
import math
import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipe

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 128, 4, 4
MODULES = ("argparse", "ast", "datetime", "difflib", "doctest", "heapq", "inspect", "os", "pathlib", "random", "statistics", "typing")


class Embed(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.character(text) + self.position(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer. Classes of this script reach the other workers by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(x)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def sample(engine: pipe.Engine, text: Tensor, length: int) -> Tensor:
    """The texts (rows, length), each character drawn from what the model expects after those before."""
    for _ in range(length - text.shape[1]):
        scores = engine.predict(text[:, -CONTEXT:])[:, -1]
        text = torch.cat([text, torch.multinomial(F.softmax(scores / 0.7, 1), 1)], 1)
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--short", action="store_true", help="50 steps: a quick check that all works")
    options = parser.parse_args()
    steps, length = (50, 40) if options.short else (options.steps, 160)

    torch.manual_seed(0)
    source = "".join((Path(os.__file__).parent / f"{name}.py").read_text("utf-8") for name in MODULES)
    characters = sorted(set(source))
    text = torch.tensor([characters.index(c) for c in source])
    unigram = -sum(n / len(source) * math.log(n / len(source)) for n in Counter(source).values())

    layers = [Embed(len(characters)), *(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(characters))]
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=3e-3)
    with pipe.Engine(layers, optimizer, loss_of, micro_batches=8, max_grad_norm=1.0) as engine:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        losses = []
        for step in range(1, steps + 1):
            rows = torch.randint(len(text) - CONTEXT, (32, 1)) + torch.arange(CONTEXT + 1)  # 32 pieces of text, and what follows
            losses.append(engine.train_step(text[rows[:, :-1]], target=text[rows[:, 1:]]))
            scheduler.step()
            if step % (steps // 5) == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
        print(engine.report())
        start = torch.tensor([[characters.index(c) for c in "\n    def "]] * 4)  # four at once: a batch that can be cut
        written = sample(engine, start, length)
    print(f"loss {sum(losses[-10:]) / 10:.3f} at the end; single characters without context: {unigram:.3f}")
    print("sample:", *("".join(characters[c] for c in row) for row in written[:2]), sep="\n")


if __name__ == "__main__":
    main()
