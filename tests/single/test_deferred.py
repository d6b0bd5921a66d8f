"""Models on the meta device: values from a safetensors file or folder, or from each module's own reset_parameters.

The oracle is the same model built on the CPU, under the same seed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pipe
from pipe import weights as reading
from pipe.errors import OptimizerError, PlanError
from pipe.partition.measure import measure
from tests.single.steps import plain, same_tensor, same_weights, sgd

LOSS = nn.MSELoss()


class Scale(nn.Module):
    """A parameter of its own, and a buffer that no weights file has; reset_parameters makes both."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(8))
        self.register_buffer("offset", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.offset = torch.arange(8.0).to(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.offset


class First(nn.Module):
    """The first value of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.lstm(x)[0]
        return value


def sequence() -> nn.Sequential:
    block: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    return nn.Sequential(
        nn.Linear(6, 8), Scale(), nn.TransformerEncoderLayer(8, 2, 16, **block), First(), nn.BatchNorm1d(5), nn.Linear(8, 3)
    )


class Net(nn.Module):
    """No sequence: its order of registration is not that of its forward, its head is tied, and it holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.position = nn.Parameter(torch.empty(5, 8))
        self.enter, self.scale, self.tied, self.norm = nn.Linear(6, 8), Scale(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(5)
        self.tied.weight = self.head.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + self.position
        out: Tensor = self.head(self.norm(self.scale(torch.relu(self.tied(h))) + h))
        return out[..., :3]


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The model on the meta device, and the same one on the CPU; the generator is as it was before."""
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    with torch.device("meta"):
        return make(), reference


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, 6, generator=generator), torch.randn(8, 5, 3, generator=generator)) for _ in range(2)]


EXAMPLE = (batches()[0][0][:2],), {}


def same_state(engine: pipe.Engine, reference: nn.Module) -> None:
    state, want = engine.state_dict(), reference.state_dict()
    assert list(state) == list(want)
    for name, value in want.items():
        assert same_tensor(state[name], value), name


def saved(folder: Path, state: Mapping[str, Tensor], *, files: int = 0) -> Path:
    """The state as one file, or as a folder of several with an index."""
    if not files:
        save_file(dict(state), folder / "model.safetensors")
        return folder / "model.safetensors"
    index = {}
    for i in range(files):
        part = {name: value for k, (name, value) in enumerate(state.items()) if k % files == i}
        save_file(part, folder / f"model-{i}.safetensors")
        index.update(dict.fromkeys(part, f"model-{i}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


# --- reset_parameters ---


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_sequence_has_the_numbers_of_one_process(stages: int, schedule: str) -> None:
    model, reference = both(sequence)
    model[4].eval()
    reference[4].eval()
    own = sgd(reference)
    with pipe.Engine(model, sgd(model), LOSS, stages=stages, micro_batches=4, strategy="pipeline", schedule=schedule) as engine:
        before = torch.get_rng_state()
        same_state(engine, reference)
        assert torch.equal(torch.get_rng_state(), before)
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, LOSS)
            same_weights(engine, reference)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_captured_model_has_the_numbers_of_one_process(stages: int) -> None:
    model, reference = both(Net)
    with pipe.Engine(model, sgd(model), LOSS, stages=stages, micro_batches=2, example=EXAMPLE) as engine:
        same_state(engine, reference)
        split = ["scale", "norm", "head"][: stages - 1] if stages > 1 else "auto"
        with pipe.Engine(reference, sgd(reference), LOSS, stages=stages, micro_batches=2, split=split, example=EXAMPLE) as real:
            for x, y in batches():
                assert engine.train_step(x, target=y) == pytest.approx(real.train_step(x, target=y), rel=1e-5)
            assert engine.plan.strategy == real.plan.strategy
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("split", [[4], [1, 2, 1]])
def test_what_is_tied_has_one_value(split: list[int]) -> None:
    def make() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        made[2].weight = made[0].weight
        return made

    model, reference = both(make)
    with pipe.Engine(model, sgd(model), LOSS, stages=len(split), split=split, micro_batches=1, strategy="pipeline") as engine:
        same_state(engine, reference)
        own = sgd(reference)
        for x, y in batches():
            assert engine.train_step(x, target=y) == pytest.approx(plain(reference, own, x, y, 1, LOSS), rel=1e-6)
        state = engine.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])


def test_a_list_of_specs_and_of_modules_on_meta() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    torch.manual_seed(0)
    with torch.device("meta"):
        second, last = nn.Linear(8, 8), nn.Linear(8, 3)
    model = [pipe.LayerSpec(nn.Linear, 6, 8), second, pipe.LayerSpec(nn.Tanh), pipe.LayerSpec(nn.Linear, 8, 8), last]
    with pipe.Engine(model, None, LOSS, stages=3, split=[2, 2, 1], strategy="pipeline") as engine:
        same_state(engine, reference)


def test_real_ones_stay() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    kept = torch.randn(8, generator=torch.Generator().manual_seed(3))
    for each in (model, reference):
        each[0].bias = nn.Parameter(kept.clone())
    with pipe.Engine(model, sgd(model), LOSS, stages=2, strategy="pipeline") as engine:
        same_state(engine, reference)
    assert torch.equal(model[0].bias, kept)


def test_frozen_ones_attributes_and_hooks_stay() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    for each in (model, reference):
        each[0].weight.requires_grad_(False)
        each[1].weight.register_hook(lambda gradient: 2 * gradient)
    own = sgd(reference)
    with pipe.Engine(model, sgd(model), LOSS, stages=2, micro_batches=2, strategy="pipeline") as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 2, LOSS)
            same_weights(engine, reference)


# --- weights ---


@pytest.mark.parametrize("files", [0, 1, 3])
@pytest.mark.parametrize(("make", "stages"), [(sequence, 1), (sequence, 4), (Net, 1), (Net, 3)])
def test_weights_are_read(tmp_path: Path, make: Callable[[], nn.Module], stages: int, files: int) -> None:
    model, reference = both(make)
    for tensor in [*reference.parameters(), *(buffer for buffer in reference.buffers() if buffer.is_floating_point())]:
        tensor.data.uniform_(0.5, 1.0)
    state = {name: value for name, value in reference.state_dict().items() if name != "tied.weight"}
    path = saved(tmp_path, state, files=files)
    for part in reference.modules():
        if isinstance(part, Scale):
            part.offset = torch.arange(8.0)
    with pipe.Engine(model, sgd(model), LOSS, stages=stages, micro_batches=4, weights=path, example=EXAMPLE) as engine:
        same_state(engine, reference)
        x = batches()[0][0]
        assert torch.allclose(engine.predict(x), reference.eval()(x), atol=1e-5)


def test_training_goes_on_from_the_weights(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    own = torch.optim.AdamW(reference.parameters(), lr=0.1)
    path = saved(tmp_path, reference.state_dict())

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=0.1)

    with pipe.Engine(model, make, LOSS, stages=2, micro_batches=2, strategy="pipeline", weights=str(path)) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 2, LOSS)
            same_weights(engine, reference)


@pytest.mark.parametrize("name", ["head.weight", "tied.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    model, reference = both(Net)
    state = {key: value for key, value in reference.state_dict().items() if key not in ("head.weight", "tied.weight")}
    path = saved(tmp_path, {**state, name: torch.eye(8)})
    with pipe.Engine(model, None, LOSS, stages=2, weights=path, example=EXAMPLE) as engine:
        found = engine.state_dict()
    assert torch.equal(found["head.weight"], torch.eye(8))
    assert torch.equal(found["tied.weight"], torch.eye(8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_the_models_own(tmp_path: Path, dtype: torch.dtype) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    path = saved(tmp_path, {name: value.to(dtype) for name, value in reference.state_dict().items()})
    with pipe.Engine(model, None, LOSS, stages=2, weights=path) as engine:
        same_state(engine, reference.to(dtype).float())


def test_weights_load_over_specs(tmp_path: Path) -> None:
    _, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), Scale(), nn.Linear(8, 3)))
    path = saved(tmp_path, reference.state_dict())
    model = [pipe.LayerSpec(nn.Linear, 6, 8), pipe.LayerSpec(Scale), pipe.LayerSpec(nn.Linear, 8, 3)]
    with pipe.Engine(model, None, LOSS, stages=2, weights=path) as engine:
        same_state(engine, reference)
        x = batches()[0][0]
        assert torch.allclose(engine.predict(x), reference(x), atol=1e-6)


def test_weights_load_over_a_model_that_has_some_and_come_home(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(6, 8), Scale(), nn.Linear(8, 3)) for _ in range(2))
    path = saved(tmp_path, reference.state_dict())
    with pipe.Engine(model, None, LOSS, stages=2, weights=path) as engine:
        same_state(engine, reference)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_real_ones_stay_beside_weights(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    model[0].bias = nn.Parameter(torch.ones(8))
    path = saved(tmp_path, reference.state_dict())
    with pipe.Engine(model, None, LOSS, stages=2, weights=path) as engine:
        state = engine.state_dict()
    assert torch.equal(state["0.bias"], torch.ones(8))
    assert torch.equal(state["0.weight"], reference[0].weight)


def test_parametrized_modules_have_their_weights_in_a_file(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)))
    path = saved(tmp_path, reference.state_dict())
    with pipe.Engine(model, None, LOSS, stages=2, weights=path) as engine:
        same_state(engine, reference)


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PORTION", 64)
    stored = {"a": torch.randn(7, 5), "b": torch.tensor(3.0), "c": torch.randn(2, 40), "d": torch.zeros(0, 3), "e": torch.arange(3)}
    path = saved(tmp_path, stored)
    found = {name: torch.empty_like(value) for name, value in stored.items()}
    found["a"] = torch.empty(5, 7).t()
    reading.Weights(str(path)).read(found)
    assert all(torch.equal(found[name], value) for name, value in stored.items())


# --- measuring, the optimizer, coming home ---


def test_measuring_leaves_the_layers_on_meta() -> None:
    model, reference = both(sequence)
    x = batches()[0][0]
    costs, real = measure(list(model), (x,)), measure(list(reference), (x,))
    assert [(c.parameter_bytes, c.output_bytes) for c in costs] == [(c.parameter_bytes, c.output_bytes) for c in real]
    assert all(c.total > 0 for c in costs)
    assert all(p.is_meta for p in model.parameters())


def test_the_optimizers_groups_and_state_are_by_parameter() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))

    def make(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [of[0].weight], "lr": 0.1}, {"params": [of[0].bias, of[1].weight]}], lr=0.01)

    optimizer, own = make(model), make(reference)
    scheduler, beside = (torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, own))
    with pipe.Engine(model, optimizer, LOSS, stages=2, micro_batches=2, strategy="pipeline") as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 2, LOSS)
            scheduler.step()
            beside.step()
            same_state(engine, reference)
        got, want = engine.optimizer.state_dict()["state"], own.state_dict()["state"]
    assert list(got) == list(want)
    assert all(torch.equal(got[i][key], value) for i, kept in want.items() for key, value in kept.items())


def test_state_on_meta_is_refused() -> None:
    model, _ = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    with pipe.Engine(model, torch.optim.Adagrad(model.parameters()), LOSS, stages=2, strategy="pipeline") as engine:
        with pytest.raises(OptimizerError, match=r"Adagrad made state for '0.weight', which is not built on the controller"):
            engine.train_step(*batches()[0][:1], target=batches()[0][1])


def test_there_is_nothing_to_write_into() -> None:
    model, _ = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    with pipe.Engine(model, sgd(model), LOSS, stages=2, strategy="pipeline") as engine:
        engine.train_step(batches()[0][0], target=batches()[0][1])
        with pytest.raises(PlanError, match=r"no model to write to, since 0.bias is on the meta device; use engine.state_dict\(\)"):
            engine.sync_model()


def test_a_state_can_be_loaded_instead() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    state = {name: torch.ones_like(value) for name, value in reference.state_dict().items()}
    with pipe.Engine(model, None, LOSS, stages=2, strategy="pipeline") as engine:
        engine.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())


# --- what is refused ---


class NoWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class NoBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Forgets(NoWay):
    def reset_parameters(self) -> None:
        pass


class OldStyle(NoWay):
    def reset_parameters(self) -> None:
        self.gain.data.fill_(2.0)


class Fails(NoWay):
    def reset_parameters(self) -> None:
        raise ZeroDivisionError("oh")


class Owner(nn.Module):
    """Its reset_parameters fills what its child holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.child = nn.Parameter(torch.empty(6)), nn.Linear(6, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.child.bias)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.child(x * self.gain)
        return value


def built(model: Any, **options: Any) -> Mapping[str, Tensor]:
    with pipe.Engine(model, None, LOSS, stages=2, strategy="pipeline", **options) as engine:
        return engine.state_dict()


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (NoWay, "1.gain on the meta device: NoWay has no reset_parameters that fills it: pass weights= .a safetensors file or folder."),
        (Forgets, "1.gain on the meta device: Forgets has no reset_parameters that fills it: pass weights="),
        (NoBuffer, "1.offset on the meta device: .* and no weights file holds a buffer that is not persistent: define reset_buffers"),
        (Fails, "1.reset_parameters raised ZeroDivisionError: oh; modules are initialised one by one"),
    ],
)
def test_a_module_that_cannot_fill_its_tensors_is_named(layer: Callable[[], nn.Module], says: str) -> None:
    model, _ = both(lambda: nn.Sequential(nn.Linear(6, 6), layer()))
    with pytest.raises(PlanError, match=says):
        built(model)


def test_a_buffer_that_no_file_has_is_named_with_weights_too(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 6), NoBuffer()))
    with pytest.raises(PlanError, match=r"1.offset on the meta device: NoBuffer has no reset_parameters .* not persistent: define reset"):
        built(model, weights=saved(tmp_path, reference.state_dict()))


def test_writes_to_data_count() -> None:
    model, _ = both(lambda: nn.Sequential(nn.Linear(6, 6), OldStyle()))
    assert torch.equal(built(model)["1.gain"], torch.full((6,), 2.0))


def test_a_layer_may_fill_what_its_child_holds_but_not_across_a_cut() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 6), Owner()))
    found = built(model)
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())
    model, reference = both(Owner)
    with pytest.raises(PlanError, match=r"reset_parameters raised AttributeError: .* let it fill its own tensors only, or pass weights="):
        built(model, example=((torch.ones(2, 6),), {}))


def test_names_that_do_not_fit_are_told_at_the_door(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    state = reference.state_dict()
    del state["1.weight"]
    path = saved(tmp_path, {**state, "2.weight": torch.ones(1)})
    says = "1 names of the model are not in it: 1.weight; 1 names in it are not the model's: 2.weight; it has the names of the unsplit"
    with pytest.raises(PlanError, match=says):
        pipe.Engine(model, None, LOSS, stages=2, weights=path)
    with pytest.raises(PlanError, match=r"4 names of the model are not in it: 0.bias, 0.weight, 1.bias, 1.weight; 4 names in it"):
        pipe.Engine(model, None, LOSS, stages=2, weights=saved(tmp_path, {f"net.{k}": v for k, v in reference.state_dict().items()}))


def test_another_shape_is_told(tmp_path: Path) -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    path = saved(tmp_path, {**reference.state_dict(), "1.weight": torch.ones(3, 9)})
    with pytest.raises(PlanError, match=r"'1.weight' has shape \(3, 9\) in weights .* and \(3, 8\) in the model; shapes are equal"):
        built(model, weights=path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "weights file '.*/given' cannot be read on host .* copy the files there, or use a shared folder"),
        ({}, "is a folder with 0 files .* name the file itself"),
        ({"a.safetensors": "x" * 99}, "weights file '.*/given/a.safetensors' cannot be read on host "),
        ({"a.safetensors": "", "b.safetensors": ""}, "is a folder with 2 files "),
        ({"model.safetensors.index.json": "{}"}, "model.safetensors.index.json is no index with a weight_map .KeyError"),
        ({"model.safetensors.index.json": "nothing"}, "model.safetensors.index.json is no index with a weight_map .JSONDecodeError"),
    ],
)
def test_files_that_are_none_are_told(tmp_path: Path, content: Mapping[str, str] | None, says: str) -> None:
    model, _ = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    given = tmp_path / "given"
    if content is not None:
        given.mkdir()
        for name, text in content.items():
            (given / name).write_text(text)
    with pytest.raises(PlanError, match=says):
        pipe.Engine(model, None, LOSS, stages=2, weights=given)


def test_weights_are_a_path() -> None:
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    with pytest.raises(PlanError, match="weights is a OrderedDict; it is the path of a safetensors file or folder"):
        pipe.Engine(model, None, LOSS, stages=2, weights=reference.state_dict())  # type: ignore[arg-type]


def test_a_copy_of_the_model_is_untouched(tmp_path: Path) -> None:
    model, _ = both(Net)
    before = copy.deepcopy(model)
    with pipe.Engine(model, None, LOSS, stages=2, example=EXAMPLE) as engine:
        engine.state_dict()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert model.tied.weight is model.head.weight
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
