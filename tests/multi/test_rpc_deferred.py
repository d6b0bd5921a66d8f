"""Over RPC: models on the meta device, whose workers make or load only their own part; and what that costs the controller in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.multi.conftest import Launch
from tests.multi.test_rpc_numbers import ENV

TRAINED = """
import json
import sys
import torch
from safetensors.torch import save_file
from torch import nn
import pipe

kind, folder = sys.argv[1:]

class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.empty(8), persistent=False)
        self.reset_buffers()

    def reset_buffers(self):
        self.offset = torch.arange(8.0)

    def forward(self, x):
        return x + self.offset

class Captured(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)
        self.embedding, self.position, self.body = nn.Embedding(12, 8), Position(), sequence()
        self.embedding.weight = self.head.weight

    def forward(self, x):
        return self.head(self.body(self.position(self.embedding(x))))

def sequence():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.TransformerEncoderLayer(16, 2, 16, 0.0), nn.Linear(16, 8))

def tied():
    layers = [nn.Embedding(12, 8), Position(), *sequence(), nn.Linear(8, 12, bias=False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)

def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

make = {"captured": Captured, "tied": tied}[kind]
torch.manual_seed(0)
reference = make()
torch.manual_seed(0)
with torch.device("meta"):
    model = make()
if folder != "none":
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    state = reference.state_dict()
    names = [name for name in state if name not in ("embedding.weight", "6.weight")]  # a tied one once
    for i, name in enumerate(names):
        save_file({name: state[name]}, f"{folder}/part-{i}.safetensors")
    index = {"weight_map": {name: f"part-{i}.safetensors" for i, name in enumerate(names)}}
    with open(f"{folder}/model.safetensors.index.json", "w") as file:
        json.dump(index, file)
want = {name: value.clone() for name, value in reference.state_dict().items()}
optimizer, own = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
x, y = torch.randint(12, (2, 8, 5), generator=torch.Generator().manual_seed(1))
example = (x[:2],), {}
with pipe.Engine(model, optimizer, loss_fn, weights=None if folder == "none" else folder, example=example, micro_batches=1) as engine:
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())
    for _ in range(2):
        own.zero_grad()
        loss = loss_fn(reference(x), y)
        loss.backward()
        own.step()
        assert abs(engine.train_step(x, target=y) - loss.item()) < 1e-6
    state = engine.state_dict()
    assert list(state) == list(want)
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in reference.state_dict().items())
    print(engine.plan.strategy, engine.plan.stages)
assert all(p.is_meta for p in model.parameters())
"""


@pytest.mark.parametrize(("kind", "weights"), [("captured", True), ("tied", False)])
def test_trains_as_the_same_model_with_real_weights(launch: Launch, tmp_path: Path, kind: str, weights: bool) -> None:
    options = ("--stages", "3", "--strategy", "pipeline", "--verify", "2")
    ended = launch(*options, script=TRAINED, arguments=(kind, str(tmp_path) if weights else "none"), env=ENV)
    assert (ended.code, ended.out) == (0, "pipeline 3\n"), ended.err
    assert "verify: 2 steps" in ended.err


ABSENT = """
import sys
import torch
from torch import nn
import pipe

with torch.device("meta"):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
try:
    with pipe.Engine(model, None, strategy="pipeline", split=[1, 1], weights=sys.argv[1]) as engine:
        engine.state_dict()
except pipe.PlanError as error:
    print(error)
"""


def test_a_file_that_a_worker_does_not_have_is_named_with_its_host(launch: Launch, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"0.weight": "a.safetensors", "1.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ended = launch("--stages", "2", script=ABSENT, arguments=(str(tmp_path),), env=ENV)
    assert ended.code == 0, ended.err
    assert f"weights file '{tmp_path}/b.safetensors' cannot be read on host " in ended.out
    assert "each worker reads its own part under this path on its own host: copy the files there" in ended.out
    assert "(worker 1 on " in ended.out


WIDTH, LAYERS = 4096, 16  # 64 MiB a layer, 1 GiB in all

LARGE = f"""
import resource
import sys
import torch
from torch import nn
import pipe

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

began = peak()
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
weights = None if sys.argv[1] == "none" else sys.argv[1]
with pipe.Engine(model, None, split=[{LAYERS // 2}] * 2, micro_batches=1, strategy="pipeline", weights=weights) as engine:
    output = engine.predict(torch.ones(1, {WIDTH}))
    stage = sum(p.numel() * p.element_size() for p in model.parameters()) // 2
    print((peak() - began) / stage)
    print(output.unique().tolist() if weights else bool(output.isfinite().all()))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("weights", [True, False])
def test_the_controller_needs_little_more_memory_than_its_own_stage(launch: Launch, tmp_path: Path, weights: bool) -> None:
    """The controller serves one of two equal stages of a model of 1 GiB, whose weights are 2 / width, so that each layer doubles."""
    if weights:
        names = [f"{i}.weight" for i in range(LAYERS)]
        for i, name in enumerate(names):
            save_file({name: torch.full((WIDTH, WIDTH), 2 / WIDTH)}, tmp_path / f"{i}.safetensors")
        index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(names)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        ended = launch("--stages", "2", script=LARGE, arguments=(str(tmp_path) if weights else "none",), env=ENV)
    finally:
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    assert ended.code == 0, ended.err
    grown, output = ended.out.splitlines()
    assert 0.9 < float(grown) < 1.2
    assert output == (f"[{2.0**LAYERS}]" if weights else "True")
