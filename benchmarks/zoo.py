"""Which models are cut by themselves, and train in stages as in one: the table in docs/zoo.md.

    python benchmarks/zoo.py [--only NAME ...] [--sample] [--markdown]

Each model is cut into 2, 3 and 4 stages, threads of one process, and trained for two steps; every loss and gradient is compared with
the engine of one stage (bit for bit; weights that several stages share, 1e-6 of their largest number), and that one with PyTorch alone
where the model has neither dropout nor BatchNorm (1e-5). Models of timm and transformers are listed where these packages are installed.
Each model has a process of its own, and a time limit. `--only timm:` lists one package; the list of timm takes minutes, since every
model of it is measured.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LIMIT = 600.0  # seconds a model
STAGES = (2, 3, 4)
TIED = 1e-6  # of the largest number of a gradient that is summed in another order; of a loss after it
PLAIN = 1e-5  # of the same, beside PyTorch alone
SAMPLE = (
    *(
        "torchvision:resnet18",
        "torchvision:mobilenet_v3_small",
        "torchvision:densenet121",
        "torchvision:mobilenet_v2",
        "torchvision:mnasnet0_5",
    ),
    *("torchvision:mnasnet1_0", "torchvision:efficientnet_b0", "torchvision:shufflenet_v2_x0_5", "torchvision:squeezenet1_0"),
    *("torchvision:regnet_y_400mf", "torchvision:fcn_resnet50", "torchvision:squeezenet1_1"),
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
SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}  # of an encoder or a decoder
VISION = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    name: str
    parameters: int = 0
    way: str = ""  # torch.fx or torch.export
    nodes: int = 0
    plain: str = ""  # whether it was compared with PyTorch alone
    result: str = ""
    seconds: float = 0.0


Inputs = Mapping[str, Any]
Case = tuple[Callable[[], nn.Module], Inputs, Any]  # the model, its arguments and the target


def image_loss(output: Any, target: Tensor) -> Tensor:
    """Of a classifier or of segmentation, with the auxiliary outputs that some give in training."""
    parts = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum((nn.functional.cross_entropy(part, target) for part in parts), torch.zeros(()))


# --- the models ---


@dataclass(frozen=True)
class Package:
    """Where models come from: their names, and what builds one and its inputs."""

    names: Callable[[], list[str]]
    case: Callable[[str], Case]


def torchvision_names() -> list[str]:
    """All classifiers, and the segmentation models fcn and deeplab."""
    from torchvision import models

    segmentation = [name for name in models.list_models(module=models.segmentation) if not name.startswith("lraspp")]
    names: list[str] = models.list_models(module=models) + segmentation
    return names


def torchvision_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Each of these models under its full name."""
    return ((f"torchvision:{name}", functools.partial(torchvision_case, name)) for name in torchvision_names())


def torchvision_case(name: str) -> Case:
    """As small an image as the model takes."""
    from torchvision import models

    if name in models.list_models(module=models.segmentation):
        options: dict[str, Any] = {"weights_backbone": None, "num_classes": 3}
        return (
            lambda: models.get_model(name, weights=None, **options),
            {"x": torch.randn(4, 3, 64, 64)},
            torch.randint(3, (4, 64, 64)),
        )
    size = {"inception_v3": 299, "maxvit_t": 224}.get(name, 224 if name.startswith("vit_") else 64)
    options = {"num_classes": 5} | ({"init_weights": False} if name in ("googlenet", "inception_v3") else {})
    return lambda: models.get_model(name, weights=None, **options), {"x": torch.randn(4, 3, size, size)}, torch.randint(5, (4,))


def timm_names() -> list[str]:
    """The smallest model of each file of timm that has at most 60 million parameters; not those for tests, where there are others."""
    import timm

    families: dict[str, list[str]] = {}
    for name in timm.list_models(exclude_filters="test_*"):
        families.setdefault(timm.model_entrypoint(name).__module__, []).append(name)
    found = []
    for members in families.values():
        sizes = {name: size for name in members if (size := timm_size(name))}
        if sizes and min(sizes.values()) <= 60e6:
            found.append(min(sizes, key=sizes.__getitem__))
    return sorted(found)


def timm_size(name: str) -> int:
    """Parameters of a model; 0: it cannot be built without values."""
    import timm

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name).parameters())
    except Exception:  # whatever a constructor does with values that are not there
        return 0


def timm_case(name: str) -> Case:
    """Images of 96 x 96, or of the size that the model is made for."""
    import timm

    config = timm.get_pretrained_cfg(name)
    size = config.input_size[-1] if config is not None and config.fixed_input_size else 96
    return (
        lambda: timm.create_model(name, pretrained=False, num_classes=5),
        {"x": torch.randn(4, 3, size, size)},
        torch.randint(5, (4,)),
    )


def transformers_names() -> list[str]:
    """Those of the table that this version has."""
    import transformers

    return [name for name, (model, *_) in transformers_table().items() if hasattr(transformers, model)]


def transformers_case(name: str) -> Case:
    """A model of a tiny configuration, which returns its loss."""
    import transformers

    model, config, options, inputs = transformers_table()[name]
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options)), inputs, None


def transformers_table() -> dict[str, tuple[str, str, dict[str, Any], Inputs]]:
    """By name: the classes of the model and of its configuration, the configuration, and the inputs."""
    ids = torch.randint(3, 96, (4, 12))
    language = {"input_ids": ids, "labels": ids}
    masked = {"input_ids": ids, "attention_mask": torch.ones(4, 12, dtype=torch.long), "labels": ids}
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}
    seq2seq = {"input_ids": ids, "labels": ids}
    gpt = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2}
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    t5 |= {"decoder_start_token_id": 0}
    bart = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in SIDE.items()}
    bart |= {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bart |= {"decoder_start_token_id": 2}
    sound = {"input_features": torch.randn(4, 16, 40), "labels": ids}
    clip = {"text_config": {**TEXT, "eos_token_id": 95}, "vision_config": VISION, "projection_dim": 16}
    return {
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


PACKAGES = {
    "torchvision": Package(torchvision_names, torchvision_case),
    "timm": Package(timm_names, timm_case),
    "transformers": Package(transformers_names, transformers_case),
}


def listed(only: Sequence[str]) -> list[str]:
    """The models that can be built here and whose names hold one of `only`; a package whose models cannot is not asked for its list."""
    named = {part.partition(":")[0] for part in only}
    asked = named if only and all(":" in part for part in only) else set(PACKAGES)
    found = [
        f"{package}:{name}"
        for package, source in PACKAGES.items()
        if package in asked and importlib.util.find_spec(package) is not None
        for name in source.names()
    ]
    return [name for name in found if not only or any(part in name for part in only)]


# --- one model ---


def check(name: str) -> Row:
    """Builds, cuts and trains it."""
    package, _, own = name.partition(":")
    torch.manual_seed(0)
    make, inputs, target = PACKAGES[package].case(own)
    began = time.perf_counter()
    want, parameters, *_ = train(make, inputs, target, 1)
    once = alone(make, inputs, target)
    wrong = beside(once, want)
    row = Row(name, parameters, plain="" if once is None else "differs" if wrong else "equal")
    for stages in STAGES:
        if wrong is not None:
            break
        try:
            got, _, way, nodes = train(make, inputs, target, stages)
        except Exception as error:  # whatever the engine refuses, or the model raises
            wrong = said(error)
        else:
            row, wrong = replace(row, way=way, nodes=nodes), difference(got, want, TIED)
        wrong = wrong and f"{stages} stages: {wrong}"
    return replace(row, result=wrong or "equal", seconds=time.perf_counter() - began)


def said(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:400]


Gradients = Mapping[str, Tensor | None]


class Numbers(NamedTuple):
    """What the steps gave, step by step, and the names of weights whose gradients may be summed in another order."""

    losses: list[float]
    gradients: list[Gradients]
    loose: set[str]


def train(make: Callable[[], nn.Module], inputs: Inputs, target: Any, stages: int) -> tuple[Numbers, int, str, int]:
    """Two steps: their numbers, how many parameters the model has, by what it was captured, and into how many nodes."""
    import pipe

    torch.manual_seed(0)
    model = make().train()
    options: dict[str, Any] = {"stages": stages, "micro_batches": 2, "seed": 1}
    options |= {"strategy": "pipeline"} if stages > 1 else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []
    gradients: list[Gradients] = []
    with pipe.Engine(model, optimizer, None if target is None else image_loss, **options) as engine:
        given = dict(inputs) if target is None else {**inputs, "target": target}
        for _ in range(2):
            losses.append(engine.train_step(**given))
            gradients.append({name: None if g is None else g.clone() for name, g in engine.gradients().items()})
        captured = engine._model.captured
        way = "" if captured is None else "torch.fx" if captured.layers._root is engine._model.whole else "torch.export"
        nodes = 0 if captured is None else len(captured.layers)
        shared = {tie.name for tie in engine._controller.assembly.ties}  # of layers that the model calls several times
    return Numbers(losses, gradients, tied(model) | shared), sum(p.numel() for p in model.parameters()), way, nodes


def tied(model: nn.Module) -> set[str]:
    """All names of the weights that have several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {name for own in names.values() if len(own) > 1 for name in own}


def alone(make: Callable[[], nn.Module], inputs: Inputs, target: Any) -> Numbers | None:
    """PyTorch's own numbers; None: the model draws random numbers, or has statistics of a batch."""
    torch.manual_seed(0)
    model = make().train()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return None
    once, again = plain(model, inputs, target), plain(model, inputs, target)
    return once if difference(again, once, 0.0) is None else None


def beside(once: Numbers | None, found: Numbers) -> str | None:
    """How the engine of one stage differs from PyTorch alone; None: it does not, or they cannot be compared."""
    if once is None:
        return None
    if abs(found.losses[0] - once.losses[0]) > PLAIN * abs(once.losses[0]):
        return f"one stage beside PyTorch: loss {found.losses[0]!r}, not {once.losses[0]!r}"
    wrong = differing(found.gradients[0], once.gradients[0], once.loose, PLAIN)
    return None if wrong is None else f"one stage beside PyTorch: {wrong}"


def beside_plain(make: Callable[[], nn.Module], inputs: Inputs, target: Any, found: Numbers) -> str | None:
    """The same, from the model."""
    return beside(alone(make, inputs, target), found)


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
    return Numbers([total], [gradients], set(gradients))


def difference(got: Numbers, want: Numbers, tolerance: float) -> str | None:
    """The first thing that differs at all; gradients of loose weights may by `tolerance`, and so may the losses of later steps, which
    follow from them (the gradients there are not compared)."""
    for step, (one, other) in enumerate(zip(got.losses, want.losses)):
        loose = got.loose | want.loose
        follows = step > 0 and loose
        if one != other and not (follows and abs(one - other) <= tolerance * abs(other)):
            return f"loss of step {step + 1} is {one!r}, not {other!r}"
        if not follows and (wrong := differing(got.gradients[step], want.gradients[step], loose, tolerance)):
            return f"{wrong} in step {step + 1}"
    return None


def differing(got: Gradients, want: Gradients, loose: set[str], tolerance: float) -> str | None:
    """The first gradient that differs at all; that of a loose weight may by `tolerance` of its largest number."""
    for name, gradient in want.items():
        own = got[name]
        if own is None or gradient is None:
            if own is not gradient:
                return f"gradient of {name} is {'None' if own is None else 'there'}"
        elif not torch.equal(own, gradient):
            off = float((own - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30))
            if name not in loose or not off <= tolerance:
                return f"gradient of {name} is {off:.1e} off"
    return None


# --- all of them ---


def in_a_process(name: str) -> Row:
    """The row of a model, whatever happens to its process."""
    began = time.perf_counter()
    try:
        ended = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, result=f"took more than {LIMIT:g} s", seconds=LIMIT)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if lines:
        return Row(**json.loads(lines[-1]))
    last = [line for line in ended.stderr.splitlines() if line.strip()]
    result = last[-1][:400] if last else f"ended with code {ended.returncode}"
    return Row(name, result=result, seconds=time.perf_counter() - began)


HEAD = (
    "| model | parameters | captured by | nodes | one stage beside PyTorch | 2, 3 and 4 stages | seconds |\n"
    "| --- | ---: | --- | ---: | --- | --- | ---: |"
)


def markdown(row: Row) -> str:
    """A line of the table."""
    result = row.result.replace("|", "/")
    return f"| {row.name} | {row.parameters:,} | {row.way} | {row.nodes or ''} | {row.plain} | {result} | {row.seconds:.0f} |"


def text(row: Row) -> str:
    """A line to read as it comes."""
    return f"{row.seconds:6.1f} s  {row.name:45} {row.way:13} {row.plain:7} {row.result}"


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
    names = [name for name in SAMPLE if not asked.only or any(part in name for part in asked.only)] if asked.sample else listed(asked.only)
    if not names:
        parser.error(f"--only {' '.join(asked.only)} names no model that can be built here; without it all are run")
    if asked.markdown:
        print(HEAD, flush=True)
    equal = 0
    for name in names:
        row = in_a_process(name)
        equal += row.result == "equal"
        print(markdown(row) if asked.markdown else text(row), flush=True)
    print(f"\n{equal} of {len(names)} models are equal in 2, 3 and 4 stages.")
    sys.exit(equal < len(names))


if __name__ == "__main__":
    main()
