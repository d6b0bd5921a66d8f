"""Trains a small GPT-2 of Hugging Face transformers, unmodified, on the sources of Python's own library, byte by byte.

Needs transformers: pip install transformers. Run it with: pipe-launch --stages 2 examples/gpt2.py
"""

import argparse
import math
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipe

CONTEXT = 64
MODULES = ("argparse", "ast", "datetime", "difflib", "heapq", "inspect", "os", "pathlib", "random", "statistics", "typing")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--short", action="store_true", help="20 steps: a quick check that all works")
    options = parser.parse_args()
    steps = 20 if options.short else options.steps

    torch.manual_seed(0)
    source = b"".join((Path(os.__file__).parent / f"{name}.py").read_bytes() for name in MODULES)
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)  # its first and last layer share a weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)

    with pipe.Engine(model, optimizer, max_grad_norm=1.0, seed=0) as engine:  # no loss_fn: the model returns its loss
        for step in range(1, steps + 1):
            starts = torch.randint(len(text) - CONTEXT, (16,))
            batch = torch.stack([text[start : start + CONTEXT] for start in starts])
            loss = engine.train_step(input_ids=batch, labels=batch)
            schedule.step()
            if step % 50 == 0 or step in (1, steps):
                print(f"step {step}: {loss / math.log(2):.2f} bits a byte", flush=True)
        print(engine.plan.table())
        print(engine.report())


if __name__ == "__main__":
    main()
