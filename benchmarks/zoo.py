"""Which models are cut by themselves, and train in stages as in one: the table in docs/zoo.md.

    python benchmarks/zoo.py [--only NAME ...] [--sample] [--markdown]

Each model is cut into 2, 3 and 4 stages, threads of one process, and trained for two steps; every loss and gradient is compared with
the engine of one stage (bit for bit; weights that several stages share, 1e-6 of their largest number), and that one with PyTorch alone
where the model has neither dropout nor BatchNorm (1e-5). Models of timm and transformers are listed where these packages are installed.
Each model has a process of its own, and a time limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LIMIT = 600.0  # seconds a model
STAGES = (2, 3, 4)
SAMPLE = (
    *("torchvision:resnet18", "torchvision:mobilenet_v3_small", "torchvision:densenet121", "torchvision:swin_t", "torchvision:mnasnet0_5"),
    *("torchvision:convnext_tiny", "torchvision:efficientnet_b0", "torchvision:shufflenet_v2_x0_5", "torchvision:squeezenet1_0"),
    *("torchvision:regnet_y_400mf", "torchvision:fcn_resnet50", "torchvision:vgg11_bn"),
)
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA = {**TEXT, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
VISION = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    name: str
    parameters: int = 0
    way: str = ""  # torch.fx or torch.export
    nodes: int = 0
    result: str = ""
    seconds: float = 0.0


Inputs = Mapping[str, Any]
Case = tuple[Callable[[], nn.Module], Inputs, Any]  # the model, its arguments and the target


def image_loss(output: Any, target: Tensor) -> Tensor:
    """Of a classifier or of segmentation, with the auxiliary outputs that some give in training."""
    parts = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum((nn.functional.cross_entropy(part, target) for part in parts), torch.zeros(()))


# --- the models ---


def torchvision_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    from torchvision import models

    def image(name: str, size: int) -> Case:
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return (
            lambda: models.get_model(name, weights=None, num_classes=5, **options),
            {"x": torch.randn(4, 3, size, size)},
            torch.randint(5, (4,)),
        )

    def segmentation(name: str) -> Case:
        def make() -> nn.Module:
            return models.get_model(name, weights=None, weights_backbone=None, num_classes=3)

        return make, {"x": torch.randn(4, 3, 64, 64)}, torch.randint(3, (4, 64, 64))

    sizes = {"inception_v3": 299, "alexnet": 64, "maxvit_t": 224}
    for name in models.list_models(module=models):
        size = sizes.get(name, 224 if name.startswith("vit_") else 64)
        yield f"torchvision:{name}", lambda name=name, size=size: image(name, size)  # type: ignore[misc]
    for name in models.list_models(module=models.segmentation):
        if not name.startswith("lraspp"):
            yield f"torchvision:{name}", lambda name=name: segmentation(name)  # type: ignore[misc]


def timm_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    import timm

    def image(name: str) -> Case:
        config = timm.get_pretrained_cfg(name)
        fixed = config.fixed_input_size if config is not None else False
        size = config.input_size[-1] if config is not None and fixed else 96
        return (
            lambda: timm.create_model(name, pretrained=False, num_classes=5),
            {"x": torch.randn(4, 3, size, size)},
            torch.randint(5, (4,)),
        )

    for name in one_a_family(timm.list_models()):
        yield f"timm:{name}", lambda name=name: image(name)  # type: ignore[misc]


def one_a_family(names: list[str]) -> list[str]:
    """The smallest model of each file of timm that has at most 60 million parameters."""
    import timm

    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(timm.model_entrypoint(name).__module__, []).append(name)
    found = []
    for members in families.values():
        sizes = {}
        for name in members:
            with torch.device("meta"):
                try:
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
                except Exception:  # one that cannot be built without values
                    continue
        if sizes and min(sizes.values()) <= 60e6:
            found.append(min(sizes, key=lambda name: sizes[name]))
    return sorted(found)


def transformers_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    import transformers as hf

    ids = torch.randint(3, 96, (4, 12))
    language = {"input_ids": ids, "labels": ids}
    masked = {"input_ids": ids, "attention_mask": torch.ones(4, 12, dtype=torch.long), "labels": ids}
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}
    seq2seq = {"input_ids": ids, "labels": ids}
    gpt = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2}
    t5 = {
        "vocab_size": 96,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    bart = dict(
        **{
            "vocab_size": 96,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        **{
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        decoder_start_token_id=2,
    )
    sound = {"input_features": torch.randn(4, 16, 40), "labels": ids}
    clip = {"text_config": {**TEXT, "eos_token_id": 95}, "vision_config": VISION, "projection_dim": 16}
    table: dict[str, tuple[str, str, dict[str, Any], Inputs]] = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", gpt, language),
        "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, language),
        "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA, language),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, language),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA, language),
        "gemma": ("GemmaForCausalLM", "GemmaConfig", LLAMA, language),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA, language),
        "phi": ("PhiForCausalLM", "PhiConfig", {**TEXT, "pad_token_id": 0}, language),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA, language),
        "opt": ("OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, masked),
        "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 2}, masked),
        "falcon": ("FalconForCausalLM", "FalconConfig", TEXT, language),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, language),
        "gptj": ("GPTJForCausalLM", "GPTJConfig", {**gpt, "rotary_dim": 8}, language),
        "gpt_neo": (
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            {
                "vocab_size": 96,
                "hidden_size": 32,
                "num_layers": 4,
                "num_heads": 2,
                "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 2]],
            },
            language,
        ),
        "olmo": ("OlmoForCausalLM", "OlmoConfig", LLAMA, language),
        "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**TEXT, "num_key_value_heads": 2}, language),
        "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", LLAMA, language),
        "bert": ("BertForMaskedLM", "BertConfig", TEXT, masked),
        "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, "max_position_embeddings": 80}, masked),
        "distilbert": (
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 2, "max_position_embeddings": 64},
            masked,
        ),
        "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, masked),
        "electra": ("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 32}, masked),
        "deberta": ("DebertaForMaskedLM", "DebertaConfig", TEXT, masked),
        "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", TEXT, masked),
        "mpnet": ("MPNetForMaskedLM", "MPNetConfig", TEXT, masked),
        "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {"vocab_size": 96, "d_model": 32, "n_layer": 4, "n_head": 2, "d_inner": 48}, language),
        "camembert": ("CamembertForMaskedLM", "CamembertConfig", {**TEXT, "max_position_embeddings": 80}, masked),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5, seq2seq),
        "bart": ("BartForConditionalGeneration", "BartConfig", bart, seq2seq),
        "mbart": ("MBartForConditionalGeneration", "MBartConfig", bart, seq2seq),
        "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", bart, seq2seq),
        "whisper": (
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {**bart, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64},
            sound,
        ),
        "vit": ("ViTForImageClassification", "ViTConfig", VISION, images),
        "deit": ("DeiTForImageClassification", "DeiTConfig", VISION, images),
        "beit": ("BeitForImageClassification", "BeitConfig", VISION, images),
        "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", VISION, images),
        "swin": (
            "SwinForImageClassification",
            "SwinConfig",
            {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
            images,
        ),
        "convnext": (
            "ConvNextForImageClassification",
            "ConvNextConfig",
            {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "image_size": 32},
            images,
        ),
        "segformer": (
            "SegformerForImageClassification",
            "SegformerConfig",
            {"hidden_sizes": [16, 32, 32, 48], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 32},
            images,
        ),
        "resnet": (
            "ResNetForImageClassification",
            "ResNetConfig",
            {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [2, 2]},
            images,
        ),
        "clip": ("CLIPModel", "CLIPConfig", clip, {"input_ids": ids, "pixel_values": images["pixel_values"], "return_loss": True}),
    }
    for name, (model, config, options, inputs) in table.items():
        if hasattr(hf, model):
            yield (
                f"transformers:{name}",
                lambda model=model, config=config, options=options, inputs=inputs: (  # type: ignore[misc]
                    lambda: getattr(hf, model)(getattr(hf, config)(**options)),
                    inputs,
                    None,
                ),
            )


def cases() -> dict[str, Callable[[], Case]]:
    """All that can be built here."""
    found = dict(torchvision_cases())
    for package, more in (("timm", timm_cases), ("transformers", transformers_cases)):
        if importlib.util.find_spec(package) is not None:
            found |= dict(more())
    return found


# --- one model ---


def check(name: str) -> Row:
    """Builds, cuts and trains it."""
    make, inputs, target = cases()[name]()
    began = time.perf_counter()
    want, parameters = train(make, inputs, target, 1)[:2]
    if (wrong := beside_plain(make, inputs, target, want)) is not None:
        return Row(name, parameters, "", 0, wrong, time.perf_counter() - began)
    way, nodes = "", 0
    for stages in STAGES:
        got, _, way, nodes = train(make, inputs, target, stages)
        if (wrong := difference(got, want, 1e-6)) is not None:
            return Row(name, parameters, way, nodes, f"{stages} stages: {wrong}", time.perf_counter() - began)
    return Row(name, parameters, way, nodes, "equal", time.perf_counter() - began)


Numbers = tuple[list[float], dict[str, Tensor | None], set[str]]  # losses, gradients, names of weights that several places share


def train(make: Callable[[], nn.Module], inputs: Inputs, target: Any, stages: int) -> tuple[Numbers, int, str, int]:
    """Two steps; the losses, the gradients of the first, and how it was cut."""
    import pipe

    torch.manual_seed(0)
    model = make().train()
    shared = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = set(shared) - {name for name, _ in model.named_parameters()}
    owners = {id(model.get_parameter(name)) for name in tied}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"stages": stages, "micro_batches": 2, "seed": 1}
    options |= {"strategy": "pipeline"} if stages > 1 else {}
    with pipe.Engine(model, optimizer, None if target is None else image_loss, **options) as engine:
        given = dict(inputs) if target is None else {**inputs, "target": target}
        losses = [engine.train_step(**given)]
        gradients = engine.gradients()
        losses.append(engine.train_step(**given))
        captured = engine._model.captured
        way = "" if captured is None else "torch.fx" if captured.layers._root is engine._model.whole else "torch.export"
        nodes = 0 if captured is None else len(captured.layers)
        names = {name for name, p in engine._model.parameters if id(p) in owners}
        count = sum(p.numel() for p in model.parameters())
    return (losses, gradients, names | tied), count, way, nodes


def beside_plain(make: Callable[[], nn.Module], inputs: Inputs, target: Any, found: Numbers) -> str | None:
    """How the engine of one stage differs from PyTorch alone; None: it does not, or the model draws or has statistics of a batch."""
    torch.manual_seed(0)
    model = make().train()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return None
    once, again = plain(model, inputs, target), plain(model, inputs, target)
    if difference(again, once, 0.0) is not None:  # it draws random numbers
        return None
    wrong = difference((found[0][:1], found[1], set(once[1])), once, 1e-5)
    return None if wrong is None else f"one stage beside PyTorch: {wrong}"


def plain(model: nn.Module, inputs: Inputs, target: Any) -> Numbers:
    """One step in two micro-batches; the names of all weights, since kernels of other batch sizes round differently."""
    model.zero_grad()
    total = 0.0
    for i in range(2):
        output = model(**{name: value.chunk(2)[i] if isinstance(value, Tensor) else value for name, value in inputs.items()})
        loss = (output.loss if target is None else image_loss(output, target.chunk(2)[i])) * 0.5
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return [total], gradients, set(gradients)


def difference(got: Numbers, want: Numbers, tolerance: float) -> str | None:
    """The first thing that differs; weights that are shared may by `tolerance` of their largest number, and so may what follows them."""
    loose = want[2]
    if got[0][0] != want[0][0] and not (loose and abs(got[0][0] - want[0][0]) <= tolerance * abs(want[0][0])):
        return f"loss {got[0][0]!r}, not {want[0][0]!r}"
    for name, gradient in want[1].items():
        own = got[1][name]
        if own is None or gradient is None:
            if own is not gradient:
                return f"gradient of {name} is {'None' if own is None else 'there'}"
        elif not torch.equal(own, gradient):
            off = float((own - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30))
            if name not in loose or off > tolerance:
                return f"gradient of {name} is {off:.1e} off"
    if got[0][1:] and not loose and got[0][1] != want[0][1]:
        return f"second loss {got[0][1]!r}, not {want[0][1]!r}"
    return None


# --- all of them ---


def in_a_process(name: str) -> Row:
    """The row of a model, whatever happens to its process."""
    try:
        ended = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, result=f"took more than {LIMIT:g} s")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if lines:
        return Row(**json.loads(lines[-1]))
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    return Row(name, result=said[-1][:300] if said else f"ended with code {ended.returncode}")


def markdown(rows: list[Row]) -> Iterator[str]:
    """A table, and what did not work below."""
    yield "| model | parameters | captured by | nodes | 2, 3 and 4 stages | seconds |"
    yield "| --- | ---: | --- | ---: | --- | ---: |"
    for row in rows:
        result = row.result.replace("|", "/")
        yield f"| {row.name} | {row.parameters:,} | {row.way} | {row.nodes or ''} | {result} | {row.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="models whose names hold one of these")
    parser.add_argument("--sample", action="store_true", help="twelve models of torchvision")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        print(json.dumps(asdict(check(asked.one))))
        return
    names = list(SAMPLE) if asked.sample else list(cases())
    names = [name for name in names if not asked.only or any(part in name for part in asked.only)]
    rows = []
    for name in names:
        rows.append(in_a_process(name))
        if not asked.markdown:
            print(f"{rows[-1].seconds:6.1f} s  {name:45} {rows[-1].way:13} {rows[-1].result}", flush=True)
    equal = sum(row.result == "equal" for row in rows)
    if asked.markdown:
        print("\n".join(markdown(rows)))
    print(f"\n{equal} of {len(rows)} models are equal in 2, 3 and 4 stages.")
    sys.exit(equal < len(rows))


if __name__ == "__main__":
    main()
