"""Random models from descriptions that print: chains whose layers pass a structure along, with skips, frozen parts, integers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import pipe

WIDTH, WORDS = 4, 5
KINDS = ("linear", "relu_", "tanh", "norm", "embed", "push", "use", "pop", "add_", "parameter", "branch", "sometimes", "detached")
Value = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One layer: what it does, and whether its parameters are frozen."""

    kind: str
    frozen: bool = False


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, and the batches that it gets."""

    layers: tuple[Layer, ...]
    split: tuple[int, ...]  # of layers, the first (which opens the structure) and the last (which closes it) included
    micro_batches: int
    rows: tuple[int, ...]  # of each step
    schedule: str
    optimizer: str
    dtype: torch.dtype = torch.float32
    ties: tuple[tuple[int, int], ...] = field(default=())  # of linear layers, by their place among all linear layers


class Open(nn.Module):
    """From x and ids to a structure: floats, integers, booleans, None and plain values side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Value:
        return {"h": self.linear(x), "ids": ids, "even": ids % 2 == 0, "skips": (), "none": None, "scale": 0.5}


class Step(nn.Module):
    """Does what its kind says to the structure."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.kind = layer.kind
        if layer.kind in ("linear", "branch", "sometimes"):
            self.linear = nn.Linear(WIDTH, WIDTH)
        elif layer.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif layer.kind == "embed":
            self.embedding = nn.Embedding(WORDS, WIDTH)
        elif layer.kind == "parameter":
            self.weight = nn.Parameter(torch.randn(1, WIDTH))
        for parameter in self.parameters():
            parameter.requires_grad_(not layer.frozen)

    def forward(self, value: Value) -> Value:
        h, skips = value["h"], value["skips"]
        if self.kind == "linear":
            h = self.linear(h)
        elif self.kind == "relu_":
            h = F.relu_(h * 1.0)
        elif self.kind == "tanh":
            h = torch.tanh(h)
        elif self.kind == "norm":
            h = self.norm(h)
        elif self.kind == "embed":
            h = h + self.embedding(value["ids"])
        elif self.kind == "push":
            skips = (*skips, h)
        elif self.kind == "use":
            h = h + value["scale"] * skips[0] if skips else h
        elif self.kind == "pop":
            h, skips = (h * torch.sigmoid(skips[-1]), skips[:-1]) if skips else (h, skips)
        elif self.kind == "add_":
            h = (h + 0.0).add_(1.0)
        elif self.kind == "parameter":
            skips = (*skips, self.weight)
        elif self.kind == "branch":  # an output that may never be used
            skips = (self.linear(h), *skips)
        elif self.kind == "sometimes":
            h = h + self.linear(h) if bool(value["even"][0]) else h
        else:
            h = h + h.detach()
        return {**value, "h": h, "skips": skips}


class Close(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, value: Value) -> Tensor:
        out: Tensor = self.linear(value["h"])
        return out


def build(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Open(), *(Step(layer) for layer in case.layers), Close()).to(case.dtype)
    linears = [step.linear for step in model if isinstance(step, Step) and hasattr(step, "linear")]
    for one, other in case.ties:
        assert isinstance(linears[one], nn.Linear)
        linears[other].weight = linears[one].weight
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check(case: Case) -> None:
    """Loss, gradients (None where None) and weights of every step are the plain loop's: bit for bit, with ties to 1e-12."""
    model = build(case)
    reference = copy.deepcopy(model)
    own = make_optimizer(case, reference)
    options: dict[str, Any] = {"stages": len(case.split), "split": list(case.split), "schedule": case.schedule, "strategy": "pipeline"}
    options["batch_dim"] = {"x": 0, "ids": 0}  # a square x beside ids is ambiguous
    generator = torch.Generator().manual_seed(1)
    with pipe.Engine(model, make_optimizer(case, model), nn.MSELoss(), micro_batches=case.micro_batches, **options) as engine:
        for rows in case.rows:
            x = torch.randn(rows, WIDTH, generator=generator, dtype=case.dtype)
            y = torch.randn(rows, 2, generator=generator, dtype=case.dtype)
            ids = torch.randint(WORDS, (rows,), generator=generator)
            want = plain(reference, own, case.micro_batches, x, ids, y)
            got = engine.train_step(x, ids, target=y)
            assert same(torch.tensor(got), torch.tensor(want), case)
            gradients, state = engine.gradients(), engine.state_dict()
            assert list(gradients) == [name for name, _ in reference.named_parameters()]
            for name, parameter in reference.named_parameters():
                gradient = gradients[name]
                assert (gradient is None) == (parameter.grad is None), name
                assert gradient is None or parameter.grad is None or same(gradient, parameter.grad, case), name
            for name, value in reference.state_dict(keep_vars=True).items():
                assert same(state[name], value.detach(), case), name
                twin = next(n for n, other in reference.named_parameters() if other is value)
                assert torch.equal(state[name], state[twin]), name


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, x: Tensor, ids: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    total, pieces = 0.0, min(micro_batches, len(x))
    for xs, ns, ys in zip(x.tensor_split(pieces), ids.tensor_split(pieces), y.tensor_split(pieces)):
        loss = F.mse_loss(through(model, xs, ns), ys) * (len(xs) / len(x))
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def through(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    """The model on one micro-batch; nn.Sequential takes one argument, its first layer two."""
    first, *rest = model.children()
    value = first(x.contiguous(), ids.contiguous())
    for layer in rest:
        value = layer(value)
    out: Tensor = value
    return out


def same(got: Tensor, want: Tensor, case: Case) -> bool:
    if not case.ties:
        return torch.equal(got, want)
    return torch.allclose(got, want.to(got.dtype), rtol=1e-10, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = False, stages: int | None = None) -> Case:
    """Any case, of so many stages if they are given; with ties, a pair of layers shares its weight, in float64."""
    kinds = st.builds(Layer, st.sampled_from(KINDS), st.sampled_from([False, False, False, True]))
    layers = list(draw(st.lists(kinds, max_size=8)))
    if ties:
        layers += [Layer("linear"), Layer("tanh"), Layer("linear")]
    if stages is None:
        stages = draw(st.integers(1, min(4, len(layers) + 2)))
    layers += [Layer("tanh")] * (stages - len(layers) - 2)
    cuts = sorted(draw(st.sets(st.integers(1, len(layers) + 1), min_size=stages - 1, max_size=stages - 1)))
    split = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, len(layers) + 2]))
    linears = [i for i, layer in enumerate(layers) if layer.kind in ("linear", "branch", "sometimes")]
    pair = st.lists(st.integers(0, len(linears) - 1), min_size=2, max_size=2, unique=True).map(lambda two: (min(two), max(two)))
    return Case(
        tuple(layers),
        split,
        draw(st.integers(1, 6)),
        tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
        draw(st.sampled_from(["gpipe", "1f1b"])),
        "sgd" if ties else draw(st.sampled_from(["sgd", "adamw"])),
        torch.float64 if ties else draw(st.sampled_from([torch.float32, torch.float64])),
        (draw(pair),) if ties else (),
    )
