"""Copies for threads and bytes for processes keep what makes a module: ties, hooks, strides, awkward attributes."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from pipe.copying import by_value, copy_module, dump_module, load_module
from pipe.errors import PlanError

torch.set_num_threads(1)


def sent(module: nn.Module) -> nn.Module:
    return load_module(dump_module(module))


both = pytest.mark.parametrize("way", [copy_module, sent])


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in use
        return nn.utils.weight_norm(module)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(x))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 8), lambda: torch.randn(2, 8)),
    "old weight_norm": (lambda: nn.Sequential(old_weight_norm(nn.Linear(8, 8)), nn.ReLU()), lambda: torch.randn(2, 8)),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), lambda: torch.randn(2, 8)),
    "weight_norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), lambda: torch.randn(2, 8)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), lambda: torch.randn(2, 8)),
    "tied": (Tied, lambda: torch.randint(7, (3,))),
    "lstm": (lambda: nn.LSTM(8, 8, 2), lambda: torch.randn(3, 2, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(8), lambda: torch.randn(4, 8)),
    "channels_last": (
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).to(torch.float64),
        lambda: torch.randn(2, 3, 5, 5, dtype=torch.float64),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0), lambda: torch.randn(3, 2, 8)),
}


def result(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sin().sum().backward()
    return [out.detach(), *[p.grad for p in module.parameters()]]


@both
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_it_is_the_same_module_and_an_independent_one(way: Callable[[Any], Any], name: str, used: bool) -> None:
    torch.manual_seed(0)
    make, data = MODULES[name]
    module, x = make(), data()
    if used:  # the old weight_norm's weight has a graph now
        module(x)
    other = way(module)
    assert list(other.state_dict()) == list(module.state_dict())
    assert len(list(other.parameters())) == len(list(module.parameters()))
    for a, b in zip(module.state_dict().values(), other.state_dict().values()):
        assert torch.equal(a, b)
        assert (a.stride(), a.dtype) == (b.stride(), b.dtype)
        assert a.data_ptr() != b.data_ptr()
    assert all(map(torch.equal, result(other, x), result(module, x)))


@both
def test_ties_and_requires_grad_stay(way: Callable[[Any], Any]) -> None:
    tied = Tied()
    tied.head.bias = nn.Parameter(torch.ones(7), requires_grad=False)
    other = way(tied)
    assert other.head.weight is other.embedding.weight
    assert other.again is other.embedding
    assert not other.head.bias.requires_grad
    assert type(other.head.bias) is nn.Parameter


@both
def test_layers_that_are_copied_together_stay_tied(way: Callable[[Any], Any]) -> None:
    tied = Tied()
    first, second = way(nn.ModuleList([tied.embedding, tied.head]))
    assert first.weight is second.weight


def double(gradient: Tensor) -> Tensor:
    return gradient * 2


def count(parameter: Tensor) -> None:
    parameter.counted = getattr(parameter, "counted", 0) + 1  # type: ignore[attr-defined]


@both
def test_hooks_of_parameters_go_along(way: Callable[[Any], Any]) -> None:
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.register_hook(double)
    linear.weight.register_post_accumulate_grad_hook(count)
    linear.weight.kind = "matrix"  # type: ignore[assignment]
    other = way(linear)
    other(torch.ones(1, 2)).sum().backward()
    assert torch.equal(other.weight.grad, torch.full((2, 2), 2.0))
    assert (other.weight.counted, other.weight.kind) == (1, "matrix")
    assert not hasattr(linear.weight, "counted")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2)), 0
        self.weight.register_hook(self.look)

    def look(self, gradient: Tensor) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@both
def test_a_hook_that_is_a_method_belongs_to_the_copy(way: Callable[[Any], Any]) -> None:
    scaled = Scaled()
    other = way(scaled)
    other(torch.ones(2)).sum().backward()
    assert (scaled.seen, other.seen) == (0, 1)


class Awkward(nn.Module):
    """Holds what cannot be copied, at several depths, and a tensor with a graph."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner[0].cache = {"locks": [threading.RLock(), 3], "file": path.open("w")}  # type: ignore[assignment]
        self.last = self.inner(torch.ones(1, 2))
        self.views = [torch.arange(6.0)[1:].view(5, 1).expand(5, 2)]

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.last = self.inner(x)
        return self.last


def test_a_copy_shares_what_cannot_be_copied(tmp_path: Path) -> None:
    module = Awkward(tmp_path / "log")
    other = copy_module(module)
    cache, copied = module.inner[0].cache, other.inner[0].cache
    assert other.lock is module.lock
    assert copied["file"] is cache["file"]
    assert copied["locks"][0] is cache["locks"][0]
    assert copied["locks"] is not cache["locks"]
    assert other.inner[0].weight is not module.inner[0].weight
    assert torch.equal(other.last, module.last)
    assert not other.last.requires_grad
    assert other.last.data_ptr() != module.last.data_ptr()
    x = torch.randn(3, 2)
    assert torch.equal(other(x), module(x))
    cache["file"].close()


class Fresh:
    """Makes a lock for every attempt to copy it."""

    def __reduce__(self) -> Any:
        return Fresh, (threading.Lock(),)


def test_what_is_made_anew_at_every_attempt_is_refused() -> None:
    module = nn.Linear(1, 1)
    module.fresh = Fresh()  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"a lock in Linear cannot be copied.*__getstate__"):
        copy_module(module)


def test_lambdas_closures_and_local_classes_can_be_sent() -> None:
    scale = torch.tensor(3.0)

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = lambda x: x * torch.sigmoid(x)
            self.part = partial(torch.clamp, min=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.act(x)) * scale

    x = torch.randn(4)
    assert torch.equal(load_module(dump_module(Local()))(x), Local()(x))
    loss = load_module(dump_module(lambda output, target: ((output - target) ** 2).sum() * scale))
    assert float(loss(torch.ones(2), torch.zeros(2))) == 6


def test_tensors_are_sent_without_what_they_are_views_of() -> None:
    module = nn.Module()
    module.register_buffer("row", torch.arange(100_000.0).view(100, 1000)[3, 1:8:2])
    data = dump_module(module)
    assert len(data) < 10_000
    row = load_module(data).row
    assert torch.equal(row, module.row)
    assert row.stride() == (2,)


def test_meta_sparse_and_empty_tensors_can_be_sent() -> None:
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("flag", torch.tensor(True))
    other = sent(module)
    assert other.weight.is_meta
    assert torch.equal(other.sparse.to_dense(), torch.eye(2))
    assert other.empty.shape == (0, 3)
    assert bool(other.flag)


LOCK = threading.Lock()


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    module = Awkward(tmp_path / "log")
    with pytest.raises(PlanError, match=r"^attribute 'lock' is a _thread.lock, which cannot be sent .*pipe.LayerSpec.*__getstate__"):
        dump_module(module)
    with pytest.raises(PlanError, match=r"^layer '2': attribute 'lock' is a _thread.lock"):
        dump_module((nn.Linear(1, 1), module), names=("1", "2"))
    with pytest.raises(PlanError, match=r"^layer '1': attribute 'lock'"):
        dump_module([nn.Linear(1, 1), module])
    del module.lock
    with pytest.raises(PlanError, match=r"^attribute 'inner.0.cache.locks.0' is a _thread.RLock"):
        dump_module(module)
    module.inner[0].cache.pop("file").close()
    lock = threading.Lock()
    with pytest.raises(PlanError, match=r"^attribute 'lock' is a _thread.lock"):
        dump_module(lambda output: lock)
    with pytest.raises(PlanError, match=r"^it is a _thread.lock"):
        dump_module(lock)
    linear = nn.Linear(1, 1)
    linear.weight.register_hook(lambda g: g if lock else None)
    with pytest.raises(PlanError, match=r"^a parameter's hook: attribute 'lock' is a _thread.lock"):
        dump_module(linear)


def test_a_lock_that_a_method_refers_to_is_named() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "nn": nn, "LOCK": LOCK}
    exec("class Block(nn.Module):\n    def forward(self, x):\n        with LOCK:\n            return x\n", namespace)
    with pytest.raises(PlanError, match=r"^layer '0': attribute 'Block.forward.LOCK' is a _thread.lock"):
        dump_module([namespace["Block"]()])


SCRIPT = """
import sys, enum, dataclasses, torch
from torch import nn
import neighbour
from pipe.copying import by_value, dump_module

class Kind(enum.Enum):
    A = 1

@dataclasses.dataclass
class Config:
    kind: Kind = Kind.A

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.act = Config(), lambda x: x * neighbour.FACTOR

    def forward(self, x):
        assert self.config.kind is Kind.A
        return neighbour.Inner()(self.act(x))

names = by_value(sys.path[0])
assert names == ("neighbour",), names
open(sys.argv[1], "wb").write(dump_module(Block()))
"""
NEIGHBOUR = "from torch import nn\nFACTOR = 3\nclass Inner(nn.Module):\n    def forward(self, x): return x + 1\n"


def test_a_script_and_its_folder_reach_a_process_that_has_neither(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "train.py").write_text(SCRIPT)
    (tmp_path / "script" / "neighbour.py").write_text(NEIGHBOUR)
    subprocess.run([sys.executable, tmp_path / "script" / "train.py", tmp_path / "module"], check=True, timeout=100)
    read = "import sys, torch; from pipe.copying import load_module; print(load_module(open(sys.argv[1], 'rb').read())(torch.ones(1)))"
    done = subprocess.run([sys.executable, "-c", read, tmp_path / "module"], check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout.strip() == "tensor([4.])"


def test_by_value_leaves_installed_packages_and_our_own(tmp_path: Path) -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    try:
        names = by_value(Path(__file__).parents[2])
        assert __name__ in names
        assert not any(name.partition(".")[0] in ("pipe", "launch", "torch", "pytest") for name in names)
        assert by_value(tmp_path) == ()
    finally:
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
