"""Fine-tunes a small Llama with LoRA adapters of PEFT: the base stays frozen, and the adapters are saved alone.

Needs transformers and peft: pip install transformers peft. Run it with: pipe-launch --stages 2 examples/lora.py
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pipe

WORDS, LENGTH = 32, 16


def batches(steps: int) -> list[Tensor]:
    """Sequences that count upwards from a random number, which the base has never seen."""
    starts = torch.randint(WORDS, (steps, 16, 1))
    return list((starts + torch.arange(LENGTH)) % WORDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--short", action="store_true", help="20 steps: a quick check that all works")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
    )
    base = LlamaForCausalLM(config)  # in real life: from_pretrained
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}

    with pipe.Engine(model, torch.optim.AdamW(adapters, lr=1e-2), seed=0) as engine:
        for step, batch in enumerate(batches(20 if options.short else options.steps), 1):
            loss = engine.train_step(input_ids=batch, labels=batch)
            if step == 1 or step % 50 == 0:
                print(f"step {step}: loss {loss:.3f}", flush=True)
        print(f"loss {loss:.3f}")
        print(engine.plan.table())
    with tempfile.TemporaryDirectory() as folder:  # the engine has written the weights back into the model
        model.save_pretrained(folder)
        saved = load_file(f"{folder}/adapter_model.safetensors")
        print(f"saved {sum(t.numel() for t in saved.values()):,} of {sum(p.numel() for p in model.parameters()):,} numbers")
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in frozen.items())


if __name__ == "__main__":
    main()
