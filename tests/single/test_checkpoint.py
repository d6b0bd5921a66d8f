"""Checkpoints: any number of stages goes on from any other's, bit for bit; a crash leaves the one before whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pipe
from pipe.errors import OptimizerError, PlanError, StageError
from tests.single.steps import batches, same_tensor

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model() -> nn.Sequential:
    """Dropout, BatchNorm, and a weight that first and last layer share."""
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    last = nn.Linear(6, 6)
    last.weight = tied.weight
    return nn.Sequential(tied, nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), last, nn.Linear(6, 3)).double()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [p for p in net.parameters() if p.dim() > 1]}, {"params": [net[6].bias], "lr": 0.02}], lr=0.01)  # type: ignore[index]


def engine_of(stages: int, optimizer: Make = adam, seed: int | None = 7, **options: Any) -> pipe.Engine:
    net = model()
    return pipe.Engine(net, optimizer(net), nn.MSELoss(), stages=stages, micro_batches=3, seed=seed, **options)


def state_of(engine: pipe.Engine) -> list[dict[str, Any]]:
    return [engine.state_dict(), *engine.optimizer_state_dict().values()]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return same_tensor(a, b) if isinstance(a, Tensor) else a == b

    return len(one) == len(other) and all(a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a) for a, b in zip(one, other))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (3, 1), (4, 2)])
def test_training_goes_on_as_if_it_had_not_been_broken(tmp_path: Path, before: int, after: int) -> None:
    data = batches(rows=9, steps=5)
    with engine_of(before) as engine:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
        for x, y in data[:2]:
            engine.train_step(x, target=y)
            scheduler.step()
        engine.save(tmp_path / "kept")
        want = [engine.train_step(x, target=y) for x, y in data[2:]]
        wanted = state_of(engine)
    for early in (True, False):  # before its workers are made, and after
        with engine_of(after, seed=None) as engine:
            if not early:
                engine.train_step(*data[4][:1], target=data[4][1])
            engine.load(tmp_path / "kept")
            assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.01 * 0.49, 0.02 * 0.49])
            assert [engine.train_step(x, target=y) for x, y in data[2:]] == pytest.approx(want, rel=1e-12)
            found = state_of(engine)
        if before == after == 2:
            assert same(found, wanted)


def test_dropout_goes_on_with_the_numbers_of_the_next_step(tmp_path: Path) -> None:
    """Without ties sums have one order, so that all is equal to the bit."""

    def dropping(stages: int) -> pipe.Engine:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
        return pipe.Engine(
            net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), nn.MSELoss(), stages=stages, micro_batches=2, seed=stages
        )

    data = batches(steps=4)
    with dropping(2) as engine:
        for x, y in data[:2]:
            engine.train_step(x, target=y)
        engine.save(tmp_path / "kept")
        want = [engine.train_step(x, target=y) for x, y in data[2:]]
        wanted = state_of(engine)
    with dropping(3) as engine:
        engine.load(str(tmp_path / "kept"))
        assert [engine.train_step(x, target=y) for x, y in data[2:]] == want
        assert same(state_of(engine), wanted)


def test_the_files_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    with engine_of(3, split=[2, 3, 2]) as engine:
        ((x, y),) = batches(rows=9, steps=1)
        engine.train_step(x, target=y)
        engine.save(tmp_path / "kept")
        state = engine.state_dict()
    index = json.loads((tmp_path / "kept" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state) - {"5.weight"}  # tied to 0.weight: once
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / "kept" / file).items()}
    assert all(same_tensor(tensor, state[name]) for name, tensor in found.items())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    plain = model()
    assert plain.load_state_dict(found, strict=False).missing_keys == ["5.weight"]
    assert same_tensor(plain.state_dict()["5.weight"], state["5.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_saving_again_replaces_the_one_before_and_a_crash_leaves_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((x, y),) = batches(rows=9, steps=1)
    with engine_of(2) as engine:
        engine.train_step(x, target=y)
        engine.save(tmp_path / "kept")
        first = engine.state_dict()
        engine.train_step(x, target=y)
        for broken in ("_write", "_replace"):
            with monkeypatch.context() as patch:
                patch.setattr(f"pipe.checkpoint.Writer.{broken}", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.save(tmp_path / "kept")
            assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        second = engine.state_dict()
        for wanted in (first, second):
            with engine_of(2) as other:
                other.load(tmp_path / "kept")
                assert same([other.state_dict()], [wanted])
            engine.save(tmp_path / "kept")
        (tmp_path / "kept").rename(tmp_path / "kept.previous")  # where a crash between two renames leaves it
        with engine_of(2) as other:
            other.load(tmp_path / "kept")
            assert same([other.state_dict()], [second])
        engine.save(tmp_path / "kept")
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_where_a_worker_does_not_see_the_folder_its_part_comes_and_goes_by_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipe.checkpoint.Saving.is_here", False)
    monkeypatch.setattr("pipe.checkpoint.Loading.is_here", False)
    ((x, y),) = batches(rows=9, steps=1)
    with engine_of(2) as engine, engine_of(3) as other:
        for each in (engine, other):
            each.train_step(x, target=y)
        engine.train_step(x, target=y)
        engine.save(tmp_path / "kept")
        other.load(tmp_path / "kept")
        assert same(state_of(other), state_of(engine))
        assert other.gradients().keys() == engine.gradients().keys()
        assert not any(gradient is not None for gradient in other.gradients().values())


def test_an_engine_without_workers_saves_the_users_model(tmp_path: Path) -> None:
    with engine_of(2) as engine:
        engine.save(tmp_path / "kept")
    with engine_of(3) as other:
        other.load(tmp_path / "kept")
        assert same([other.state_dict()], [model().state_dict()])


@pytest.mark.parametrize("kind", ["specs", "meta"])
def test_weights_that_only_the_stages_have_are_saved_and_loaded_before_the_first_batch(tmp_path: Path, kind: str) -> None:
    def made() -> pipe.Engine:
        layers: Any = [pipe.LayerSpec(nn.Linear, 6, 8), pipe.LayerSpec(nn.Tanh), pipe.LayerSpec(nn.Linear, 8, 3)]
        if kind == "meta":
            with torch.device("meta"):
                layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return pipe.Engine(
            layers, lambda named: torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9), nn.MSELoss(), stages=2, micro_batches=2
        )

    (x, y), *_ = batches(dtype=torch.float32)
    with made() as engine:
        engine.save(tmp_path / "fresh")
        engine.train_step(x, target=y)
        engine.save(tmp_path / "kept")
        wanted, loss = state_of(engine), engine.train_step(x, target=y)
    torch.manual_seed(99)
    with made() as other:
        other.load(tmp_path / "kept")
        assert same(state_of(other), wanted)
        assert other.train_step(x, target=y) == loss


def test_the_scale_of_float16_goes_on(tmp_path: Path) -> None:
    (x, y), *_ = batches(rows=9, dtype=torch.float32)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    for _ in range(2):
        with pipe.Engine(net, torch.optim.SGD(net.parameters(), 0.1), nn.MSELoss(), precision="fp16", stages=2) as engine:
            if (tmp_path / "kept").exists():
                engine.load(tmp_path / "kept")
                assert engine._controller._scale is not None
                assert engine._controller._scale.state == (65536.0, 3)
            for _ in range(3):
                engine.train_step(x, target=y)
            engine.save(tmp_path / "kept")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with engine_of(2) as engine:
        with pytest.raises(PlanError, match=r"holds no checkpoint .it has no engine.json.; give the folder that engine.save wrote"):
            engine.load(tmp_path)
        engine.save(tmp_path / "kept")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        with pytest.raises(PlanError, match=r"is there and is no checkpoint; .*: give a folder of its own"):
            engine.save(tmp_path / "mine")
        with pytest.raises(PlanError, match=r"no checkpoint can be written to .*notes.txt"):
            engine.save(tmp_path / "mine" / "notes.txt" / "kept")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    with pytest.raises(PlanError, match="has the state of Adam and the optimizer is SGD: use the same one"):
        engine_of(2, lambda net: torch.optim.SGD(net.parameters(), 0.1)).load(tmp_path / "kept")
    with pytest.raises(OptimizerError, match="the checkpoint's optimizer has 2 groups and this one 1"):
        engine_of(2, lambda net: torch.optim.Adam(net.parameters())).load(tmp_path / "kept")
    other = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(PlanError, match=r"is another model's: it lacks .* and has .* others"):
        pipe.Engine(other, None, nn.MSELoss()).load(tmp_path / "kept")
    (tmp_path / "kept" / "engine.json").write_text("{")
    with pytest.raises(PlanError, match=r"engine.json in .* is not whole"):
        engine_of(2).load(tmp_path / "kept")


def test_state_that_is_no_tensor_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> str:
            return "words"

        def set_extra_state(self, state: str) -> None:
            assert state == "words"

    ((x, y),) = batches(steps=1)
    net = nn.Sequential(nn.Linear(6, 6), Extra(6, 3)).double()
    with pipe.Engine(net, None, nn.MSELoss(), stages=2, micro_batches=2) as engine:
        engine.forward_backward(x, target=y)
        with pytest.raises((PlanError, StageError), match="state_dict is a str; a checkpoint holds tensors: make it a buffer"):
            engine.save(tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []
