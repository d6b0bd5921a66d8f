"""Every public method and property of Engine, in every state it can be in; and what is refused, with the remedy in the message."""

from __future__ import annotations

import atexit
import copy
import logging
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import batches, layers, plain, same_tensor, same_weights, sgd, train_beside
from torch import Tensor, nn

import pipe
from pipe.action import Action, Op
from pipe.errors import BatchError, OptimizerError, PlanError, StageError

X, Y = batches(8, 1)[0]


def engine_of(model: Any = None, optimizer: Any = sgd, loss_fn: Any = "mse", **options: Any) -> pipe.Engine:
    model = layers() if model is None else model
    made = optimizer(model) if optimizer is sgd else optimizer
    settings = {"stages": 2, "micro_batches": 4, "strategy": "pipeline"} | options
    return pipe.Engine(model, made, nn.MSELoss() if loss_fn == "mse" else loss_fn, **settings)


# --- in every state ---

KEPT = Path(tempfile.mkdtemp(prefix="pipe-test-")) / "kept"  # a checkpoint
atexit.register(shutil.rmtree, KEPT.parent, ignore_errors=True)

USES: dict[str, Callable[[pipe.Engine], Any]] = {
    "train_step": lambda e: e.train_step(X, target=Y),
    "forward_backward": lambda e: e.forward_backward(X, target=Y),
    "optimizer_step": lambda e: e.optimizer_step(),
    "zero_grad": lambda e: e.zero_grad(),
    "clip_grad_norm": lambda e: e.clip_grad_norm(1.0),
    "predict": lambda e: e.predict(X),
    "eval_step": lambda e: e.eval_step(X, target=Y),
    "train": lambda e: e.train(),
    "eval": lambda e: e.eval(),
    "fit": lambda e: e.fit([(X, Y)], progress=False),
    "optimizer": lambda e: e.optimizer,
    "state_dict": lambda e: e.state_dict(),
    "load_state_dict": lambda e: e.load_state_dict(layers().state_dict()),
    "optimizer_state_dict": lambda e: e.optimizer_state_dict(),
    "load_optimizer_state_dict": lambda e: e.load_optimizer_state_dict({}),
    "save": lambda e: e.save(KEPT),
    "load": lambda e: (e.save(KEPT), e.load(KEPT)),
    "gradients": lambda e: e.gradients(),
    "sync_model": lambda e: e.sync_model(),
    "plan": lambda e: e.plan,
    "trace": lambda e: e.trace,
    "report": lambda e: e.report(),
    "close": lambda e: e.close(),
}
WORKS_CLOSED = {"save", "load", "zero_grad", "train", "eval", "optimizer", "state_dict", "load_state_dict", "sync_model", "plan", "close"}
READS_LAST = {"trace", "report"}


def test_every_public_name_is_tried() -> None:
    assert {name for name in dir(pipe.Engine) if not name.startswith("_")} == set(USES)


@pytest.mark.parametrize("name", USES)
def test_before_the_first_batch(name: str) -> None:
    with engine_of() as engine:
        if name in READS_LAST:
            with pytest.raises(PlanError, match="no trace yet"):
                USES[name](engine)
        else:
            USES[name](engine)
        assert name == "close" or engine.train_step(X, target=Y) > 0


@pytest.mark.parametrize("name", USES)
def test_after_training(name: str) -> None:
    reference = layers()
    own = sgd(reference)
    want = [plain(reference, own, X, Y, 4, nn.MSELoss()) for _ in range(2)]
    with engine_of() as engine:
        assert engine.train_step(X, target=Y) == want[0]
        USES[name](engine)
        if name not in ("train_step", "forward_backward", "optimizer_step", "fit", "load_state_dict", "close"):
            assert engine.train_step(X, target=Y) == want[1]
            same_weights(engine, reference, gradients=True)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", USES)
def test_after_close(name: str, trained: bool) -> None:
    model = layers()
    engine = engine_of(model)
    if trained:
        engine.train_step(X, target=Y)
        before = engine.state_dict()
    engine.close()
    if name in WORKS_CLOSED or (trained and name in READS_LAST):
        found = USES[name](engine)
        if trained and name == "state_dict":
            assert all(same_tensor(found[key], value) for key, value in before.items())
    else:
        with pytest.raises(PlanError, match="no trace yet" if name in READS_LAST else "the engine is closed.*make a new one"):
            USES[name](engine)


def test_close_twice_and_threads_end() -> None:
    before = set(threading.enumerate())
    engine = engine_of()
    engine.train_step(X, target=Y)
    assert len(set(threading.enumerate()) - before) == 2
    engine.close()
    engine.close()
    assert set(threading.enumerate()) == before


def test_an_engine_that_is_dropped_can_be_collected_after_close() -> None:
    model = layers()
    hooks = (len(model._forward_pre_hooks), len(model._state_dict_pre_hooks))
    engine = engine_of(model)
    engine.train_step(X, target=Y)
    assert (len(model._forward_pre_hooks), len(model._state_dict_pre_hooks)) != hooks
    engine.close()
    assert (len(model._forward_pre_hooks), len(model._state_dict_pre_hooks)) == hooks


def test_two_engines_of_one_model_one_after_the_other() -> None:
    model, reference = layers(), layers()
    own = torch.optim.SGD(reference.parameters(), 0.1)
    for stages in (2, 3, 1):
        with engine_of(model, torch.optim.SGD(model.parameters(), 0.1), stages=stages) as engine:
            for x, y in batches():
                assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
    assert all(same_tensor(model.state_dict()[name], value) for name, value in reference.state_dict().items())


def test_two_engines_at_once() -> None:
    models, reference = [layers(), layers()], layers()
    own = sgd(reference)
    with engine_of(models[0]) as a, engine_of(models[1], stages=3) as b:
        for x, y in batches():
            assert a.train_step(x, target=y) == b.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())


def test_an_exception_inside_with_comes_out_and_weights_come_home() -> None:
    model = layers()
    before = copy.deepcopy(model.state_dict())

    def script() -> None:
        with engine_of(model) as engine:
            engine.train_step(X, target=Y)
            1 / 0

    with pytest.raises(ZeroDivisionError):
        script()
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert not any(thread.name.startswith("pipe worker") for thread in threading.enumerate())


# --- sizes and strategies ---


@pytest.mark.parametrize(("rows", "micro_batches"), [(8, 1), (1, 4), (1, 1), (3, 8)])
def test_few_micro_batches_are_a_pipeline_if_asked_for(rows: int, micro_batches: int) -> None:
    with train_beside(layers(), batches(rows), micro_batches=micro_batches, stages=2) as engine:
        assert engine.plan.strategy == "pipeline"
        assert engine.plan.reason.startswith("asked for")
        assert len([e for e in engine.trace.events if e.action.op is Op.F]) == 2 * min(rows, micro_batches)


def test_what_is_chosen_without_a_number() -> None:
    with engine_of(stages=2, micro_batches=None, strategy=None) as engine:
        engine.predict(X)
        assert (engine.plan.strategy, engine.plan.stages, engine.plan.micro_batches, engine.plan.schedule) == ("pipeline", 2, 8, "gpipe")
    with engine_of(stages=None, micro_batches=None, strategy=None) as engine:
        assert (engine.plan.strategy, engine.plan.stages, engine.plan.micro_batches) == ("single", 1, 1)
        assert "without pipe-launch" in engine.plan.reason


def test_a_batch_that_cannot_be_cut_makes_it_naive_out_loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipe")
    model, reference = layers(), layers()
    own = sgd(reference)
    with engine_of(model, strategy=None, batch_dim=None) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 1, nn.MSELoss())
        assert engine.plan.strategy == "naive"
        assert engine.plan.stages == 2
        assert engine.plan.micro_batches == 1
        assert "cannot be cut" in engine.plan.reason
        same_weights(engine, reference)
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("naive: 2 stages") and "cannot be cut" in line for line in said) == 1


def test_the_plan_follows_batches_that_can_and_cannot_be_cut() -> None:
    with engine_of(strategy=None) as engine:
        found = []
        for rows in (8, 1, 8, 1):
            x, y = batches(rows, 1)[0]
            engine.train_step(x, target=y)
            found.append((engine.plan.strategy, engine.plan.micro_batches, engine.trace.plan["strategy"]))
    assert found == [("pipeline", 4, "pipeline"), ("naive", 1, "naive")] * 2


@pytest.mark.parametrize("strategy", ["naive", "single", None])
def test_strategies_give_the_same_numbers(strategy: str | None) -> None:
    model, reference = layers(), layers()
    own = sgd(reference)
    with engine_of(model, strategy=strategy, micro_batches=1) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 1, nn.MSELoss())
        same_weights(engine, reference)
        assert engine.plan.strategy == (strategy or "naive")
        assert engine.plan.stages == (1 if strategy == "single" else 2)


def test_single_with_stages_says_who_is_idle() -> None:
    with engine_of(strategy="single", stages=3) as engine:
        assert "2 of 3 workers stay idle" in engine.plan.reason


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "ddp"}, "'ddp' with 2 workers without pipe-launch.*pipe-launch --strategy ddp --replicas 2"),
        ({"strategy": "hybrid"}, "'hybrid' got 2 stages and 1 replica.*--replicas 2"),
        ({"strategy": "fsdp"}, "strategy 'fsdp' is not known.*pipeline"),
        ({"replicas": 2}, "replicas=2 without pipe-launch.*pipe-launch --stages 2 --replicas 2"),
        ({"stages": 6}, "6 stages.*5 layers"),
        ({"stages": 0}, "stages is 0.*at least 1"),
        ({"stages": 2.0}, "stages is 2.0.*whole number"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"stages_per_worker": 2}, "stages_per_worker is 2"),
        ({"schedule": "zb-h1"}, "'zb-h1' is not available in this version"),
        ({"schedule": "gpip"}, "'gpip' is unknown; did you mean 'gpipe'"),
        ({"schedule": 3}, "schedule is a int"),
        ({"schedule": pipe.schedule("gpipe", 3, 4)}, "for 3 workers and 3 stages.*--stages 3"),
        ({"schedule": pipe.schedule("gpipe", 2, 3)}, "micro_batches=4 and the schedule given is for 3"),
        ({"split": [1, 2]}, "split.*adds up to 3"),
        ({"split": [5, 0]}, "each stage needs at least one"),
        ({"split": [1, 1, 3]}, "3 numbers for 2 stages"),
        ({"split": ["7"]}, "names '7', which is no layer"),
        ({"split": "even"}, "split='even'"),
        ({"loss_reduction": "none"}, "loss_reduction is 'none'.*'mean' or 'sum'"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"recompute": "always"}, "recompute='always' is not in this version"),
        ({"wire_dtype": "bf16"}, "wire_dtype='bf16' is not in this version"),
        ({"offload": "all"}, "offload='all' is not in this version"),
        ({"timeout": -1}, "timeout is -1"),
    ],
    ids=str,
)
def test_what_cannot_be_met_is_said_before_anything_starts(options: dict[str, Any], text: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(PlanError, match=text):
        engine_of(**options)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("strategy", [None, "single", "pipeline"])
def test_a_module_that_is_no_sequence_trains_whole_on_one_stage(strategy: str | None) -> None:
    torch.manual_seed(0)
    model = Custom().double()
    reference = copy.deepcopy(model)
    own = sgd(reference)
    with engine_of(model, strategy=strategy, stages=1) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


@pytest.mark.parametrize("model", [3, nn.Linear, "resnet18", []], ids=str)
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(PlanError):
        pipe.Engine(model, None)


# --- cuts and forms of models ---


def test_a_split_by_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, module in {"stem": nn.Linear(6, 8), "act": nn.Tanh(), "body": nn.Linear(8, 8), "head": nn.Linear(8, 3)}.items():
        model.add_module(name, module)
    with train_beside(model.double(), batches(), stages=3, split=["body", "head"]) as engine:
        assert engine.plan.split == (2, 1, 1)
        assert next(iter(engine.state_dict())) == "stem.weight"


def test_an_automatic_cut_says_how_it_was_found() -> None:
    with engine_of() as engine:
        provisional = engine.plan
        assert sum(provisional.split) == 5
        engine.train_step(X, target=Y)
        assert "cut by measured time" in engine.plan.reason
    with engine_of() as engine:
        engine.gradients()
        assert "cut by parameter bytes" in engine.plan.reason
    with engine_of(example=((X[:2],), {})) as engine:
        assert "cut by measured time" in engine.plan.reason


def test_a_list_of_modules() -> None:
    model = layers()
    held = list(model)
    reference = copy.deepcopy(model)
    own = sgd(reference)
    with engine_of(held, sgd(model)) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)
    assert torch.equal(held[0].weight, reference[0].weight)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_specs_equal_the_module_of_one_process(stages: int) -> None:
    torch.manual_seed(5)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Embedding(4, 4), nn.Linear(8, 3, bias=False))
    reference[2] = nn.Identity()  # drew numbers for nothing, and so does its spec
    torch.manual_seed(5)
    specs = [
        pipe.LayerSpec(nn.Linear, 6, 8),
        pipe.LayerSpec(nn.Tanh),
        pipe.LayerSpec(lambda: nn.Sequential(nn.Identity(), nn.Embedding(4, 4))[:1]),
        pipe.LayerSpec(nn.Linear, 8, 3, bias=False),
    ]
    own = sgd(reference)
    with pipe.Engine(
        specs,
        lambda named: torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9),
        nn.MSELoss(),
        stages=stages,
        micro_batches=4,
        strategy="pipeline",
    ) as engine:
        for x, y in batches(dtype=torch.float32):
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        state = engine.state_dict()
        assert list(state) == list(reference.state_dict())
        assert all(same_tensor(state[name], value) for name, value in reference.state_dict().items())
        with pytest.raises(PlanError, match=r"LayerSpec.*state_dict"):
            engine.sync_model()
    with pytest.raises(PlanError, match="closed"):
        engine.state_dict()


def test_a_mix_of_specs_and_modules() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    with pipe.Engine([first, pipe.LayerSpec(nn.Linear, 8, 3)], None, nn.MSELoss(), stages=2) as engine:
        torch.testing.assert_close(engine.predict(X.float()), reference(X.float()).detach())


def test_a_module_that_stands_twice_stays_one() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), shared, nn.Tanh(), shared, nn.Linear(8, 3)).double()
    train_beside(model, batches(), stages=2, split=[1, 4]).close()


def test_a_tied_weight_on_one_stage() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    model = nn.Sequential(nn.Linear(6, 8), a, nn.Tanh(), b, nn.Linear(8, 3)).double()
    with train_beside(model, batches(), stages=2, split=[1, 4]) as engine:
        assert torch.equal(engine.state_dict()["1.weight"], engine.state_dict()["3.weight"])


def test_hooks_of_a_layer_work_on_its_stage() -> None:
    model, reference = layers(), layers()

    def halves(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    for each in (model, reference):
        each[2].weight.register_hook(lambda gradient: gradient * 3)
        each[4].bias.register_post_accumulate_grad_hook(halves)
        each[0].register_forward_hook(lambda module, args, output: output * 2)
        each[3].register_full_backward_hook(lambda module, gradients, outputs: (gradients[0] * 2,))
    own = sgd(reference)
    with engine_of(model, split=[2, 3]) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


# --- the optimizer ---


@dataclass
class Decay:
    """A callable that makes two groups of named parameters."""

    seen: list[str]

    def __call__(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        self.seen += [name for name, _ in named]
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.3},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)


def test_a_callable_is_called_once_with_all_names() -> None:
    model, reference = layers(), layers()
    make = Decay([])
    own = Decay([])(list(reference.named_parameters()))
    with engine_of(model, make) as engine:
        for x, y in batches():
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0]
    assert make.seen == [name for name, _ in reference.named_parameters()]


def test_groups_are_the_source_of_truth() -> None:
    model, reference = layers(), layers()
    optimizer, own = Decay([])(list(model.named_parameters())), Decay([])(list(reference.named_parameters()))
    with engine_of(model, optimizer) as engine:
        for i, (x, y) in enumerate(batches()):
            for each in (optimizer, own):
                each.param_groups[1]["lr"] = 0.1 / (i + 1)
                each.param_groups[0]["momentum"] = 0.2 * i
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


def test_a_group_that_is_added_later_is_trained_from_then_on() -> None:
    model, reference = layers(), layers()
    optimizers = []
    for each in (model, reference):
        optimizers.append(torch.optim.SGD(each[4].parameters(), lr=0.1, momentum=0.9))
    with engine_of(model, optimizers[0]) as engine:
        for i, (x, y) in enumerate(batches()):
            if i == 1:
                optimizers[0].add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
                optimizers[1].add_param_group({"params": list(reference[0].parameters()), "lr": 0.05})
            reference.zero_grad()
            assert engine.train_step(x, target=y) == plain(reference, optimizers[1], x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


def test_freezing_and_thawing_between_steps() -> None:
    model, reference = layers(), layers()
    own, loss_fn = sgd(reference), nn.MSELoss()
    with engine_of(model, stages=3) as engine:
        for i, (x, y) in enumerate(batches(steps=4)):
            for each in (model, reference):
                each[0].requires_grad_(i % 2 == 0)
                each[2].weight.requires_grad_(i > 1)
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, loss_fn)
            same_weights(engine, reference)


def test_the_users_own_step_and_zero_grad_work() -> None:
    model, reference = layers(), layers()
    optimizer, own = sgd(model), sgd(reference)
    with engine_of(model, optimizer) as engine:
        for x, y in batches():
            optimizer.zero_grad()
            assert set(engine.gradients().values()) == {None}
            loss = engine.forward_backward(x, target=y)
            optimizer.step()
            assert loss == plain(reference, own, x, y, 4, nn.MSELoss())
            same_weights(engine, reference)
        engine.optimizer.zero_grad()
        assert set(engine.gradients().values()) == {None}
        with pytest.raises(OptimizerError, match="closure"):
            optimizer.step(lambda: 0.0)
    assert "zero_grad" not in vars(optimizer)
    before = model[0].weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()  # the optimizer is the user's again
    assert not torch.equal(before, model[0].weight)


def test_the_controllers_weights_do_not_move_by_themselves() -> None:
    model = layers()
    optimizer = sgd(model)
    model(X).sum().backward()
    before = model[0].weight.detach().clone()
    with engine_of(model, optimizer) as engine:
        engine.train_step(X, target=Y)
        assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[0].weight, before)


def test_parameters_that_the_optimizer_does_not_hold_get_gradients() -> None:
    model, reference = layers(), layers()
    optimizer, own = (torch.optim.SGD(m[4].parameters(), 0.1) for m in (model, reference))
    with engine_of(model, optimizer, split=[2, 3]) as engine:
        engine.train_step(X, target=Y)
        plain(reference, own, X, Y, 4, nn.MSELoss())
        same_weights(engine, reference)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS.step needs a closure"),
        (lambda model: torch.optim.SGD(layers().parameters(), 0.1), "6 of the optimizer's 6 parameters are not the model's"),
        (lambda model: lambda named: 3, "optimizer is a int"),
        (lambda model: 3, "optimizer is a int"),
    ],
    ids=["closure", "foreign", "callable", "number"],
)
def test_optimizers_that_are_refused(make: Callable[[nn.Module], Any], text: str) -> None:
    model = layers()
    with pytest.raises(OptimizerError, match=text):
        engine_of(model, make(model))


@pytest.mark.parametrize("name", ["train_step", "optimizer_step", "optimizer", "optimizer_state_dict", "load_optimizer_state_dict"])
def test_without_an_optimizer(name: str) -> None:
    with engine_of(optimizer=None) as engine:
        engine.forward_backward(X, target=Y)
        with pytest.raises(OptimizerError, match=f"{name} needs an optimizer and the engine was given None"):
            USES[name](engine)
        engine.zero_grad()
        assert set(engine.gradients().values()) == {None}


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_never_says_that_the_optimizer_did_not_step(before: bool) -> None:
    model = layers()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if before else None
    with warnings.catch_warnings(), engine_of(model, optimizer) as engine:
        warnings.simplefilter("error")
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        engine.train_step(X, target=Y)
        scheduler.step()
        engine.zero_grad()
        engine.forward_backward(X, target=Y)
        engine.optimizer_step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_the_optimizers_state_goes_to_an_engine_of_any_cut() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    reference = layers()
    own = adam(reference)
    data = batches(steps=4)
    wanted = [plain(reference, own, x, y, 4, nn.MSELoss()) for x, y in data]
    first = layers()
    with engine_of(first, adam(first), stages=3) as engine:
        assert [engine.train_step(x, target=y) for x, y in data[:2]] == wanted[:2]
        weights, state = engine.state_dict(), engine.optimizer_state_dict()
    assert list(state) == [name for name, _ in reference.named_parameters()]
    assert all(kept["step"] == 2 for kept in state.values())
    second = layers()
    with engine_of(second, adam(second), stages=2) as engine:
        assert engine.load_state_dict(weights) == ([], [])
        engine.load_optimizer_state_dict(state)
        assert [engine.train_step(x, target=y) for x, y in data[2:]] == wanted[2:]
        same_weights(engine, reference)
        with pytest.raises(OptimizerError, match=r"'9.weight' is no parameter of the model"):
            engine.load_optimizer_state_dict({"9.weight": {}})


def test_an_optimizer_that_is_warm_stays_warm() -> None:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model = layers()
    optimizer, (first, *data) = adamw(model), batches(steps=4)
    plain(model, optimizer, *first, 4, nn.MSELoss())
    reference = copy.deepcopy(model)
    own = adamw(reference)
    own.load_state_dict(optimizer.state_dict())
    with engine_of(model, optimizer, stages=3) as engine:
        for x, y in data:
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)


# --- weights ---


def test_loading_weights_before_and_after_the_first_batch() -> None:
    other = layers()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    for first in (False, True):
        with engine_of() as engine:
            if first:
                engine.train_step(X, target=Y)
            engine.load_state_dict(other.state_dict())
            torch.testing.assert_close(engine.predict(X), other(X).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("built", [False, True])
def test_strict_loading(built: bool) -> None:
    state = layers().state_dict()
    del state["0.bias"]
    state["9.weight"] = torch.zeros(1)
    with engine_of() as engine:
        if built:
            engine.predict(X)
        with pytest.raises(RuntimeError, match=r"(?s)0.bias.*9.weight"):
            engine.load_state_dict(state)
        found = engine.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["9.weight"])
        with pytest.raises(RuntimeError, match=r"(?s)size mismatch for 2.weight"):
            engine.load_state_dict({"2.weight": torch.zeros(2)}, strict=False)


def test_a_stale_model_warns_once_and_not_after_sync() -> None:
    model = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(model) as engine:
            model(X)
            model.state_dict()
            engine.train_step(X, target=Y)
            engine.sync_model()
            found = model(X)
            torch.testing.assert_close(found.detach(), engine.predict(X), rtol=1e-12, atol=0)
            engine.train_step(X, target=Y)
            with pytest.warns(UserWarning, match=r"engine\.predict.*engine\.sync_model"):
                model(X)
            model(X)
            model.state_dict()
        model(X)


def test_a_stale_model_warns_when_it_is_saved() -> None:
    model = layers()
    with engine_of(model) as engine:
        engine.train_step(X, target=Y)
        with pytest.warns(UserWarning, match="sync_model"):
            model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_keep_their_type(dtype: torch.dtype) -> None:
    model = layers(dtype)
    with engine_of(model) as engine:
        engine.train_step(X.to(dtype), target=Y.to(dtype))
        assert {value.dtype for value in engine.state_dict().values()} == {dtype}
        assert {gradient.dtype for gradient in engine.gradients().values() if gradient is not None} == {dtype}
        assert engine.predict(X.to(dtype)).dtype == dtype
    assert model[0].weight.dtype == dtype


def test_what_is_given_out_is_the_callers() -> None:
    with engine_of() as engine:
        engine.train_step(X, target=Y)
        want = engine.predict(X)
        for value in [*engine.state_dict().values(), *engine.gradients().values(), want]:
            assert value is not None
            assert not value.requires_grad
        for value in engine.state_dict().values():
            value.zero_()
        torch.testing.assert_close(engine.predict(X), want, rtol=0, atol=0)


# --- losses ---


class OwnLoss(nn.Module):
    """Makes the loss itself, in one of the forms that users' models have."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, h: Tensor, target: Tensor) -> Any:
        loss = nn.functional.mse_loss(h, target)
        if self.form == "attribute":
            return Result(loss, h)
        return {"tensor": loss, "mapping": {"loss": loss, "h": h}, "tuple": (loss, h), "list": [loss, h]}[self.form]


@dataclass
class Result:
    loss: Tensor
    h: Tensor


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("form", ["tensor", "mapping", "tuple", "list", "attribute"])
def test_a_model_that_makes_its_own_loss(form: str, stages: int) -> None:
    model, reference = nn.Sequential(*layers(), OwnLoss(form)), layers()
    own = sgd(reference)
    with engine_of(model, loss_fn=None, stages=stages) as engine:
        for x, y in batches():
            before = plain(copy.deepcopy(reference), torch.optim.SGD(reference.parameters(), 0), x, y, 4, nn.MSELoss())
            assert engine.eval_step(x, target=y) == before
            assert engine.train_step(x, target=y) == plain(reference, own, x, y, 4, nn.MSELoss())
        same_weights(engine, reference)
        if form == "mapping":
            found = engine.predict(X, target=Y)
            assert set(found) == {"loss", "h"}
            assert found["loss"].dim() == 0
            assert found["h"].shape == (8, 3)
            torch.testing.assert_close(found["loss"], nn.functional.mse_loss(found["h"], Y), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_fn", [None, lambda output, target: (output - target).square().mean(1), lambda output, target: 3.0])
def test_a_loss_that_is_no_0_dim_tensor(loss_fn: Any) -> None:
    with engine_of(loss_fn=loss_fn) as engine:
        with pytest.raises(StageError, match=r"a loss is a 0-dim tensor.*mean") as caught:
            engine.train_step(X, **({} if loss_fn is None else {"target": Y}))
        assert (caught.value.stage, caught.value.micro_batch) == (1, 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_losses_weighted_by_valid_tokens(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    tokens, target = torch.randint(9, (4, 10)), torch.full((4, 10), -100)
    for row, count in enumerate((1, 1, 9, 9)):
        target[row, :count] = torch.randint(5, (count,))

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), wanted.flatten(), ignore_index=-100)

    reference = copy.deepcopy(model)
    loss = loss_fn(reference(tokens), target)
    loss.backward()
    with engine_of(model, loss_fn=loss_fn, micro_batches=2, schedule=schedule, loss_weight=lambda wanted: (wanted != -100).sum()) as engine:
        assert engine.forward_backward(tokens, target=target) == pytest.approx(loss.item(), rel=1e-12)
        found = engine.gradients()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)
        with pytest.raises(BatchError, match="loss_weight gave"):
            engine.train_step(tokens, target=torch.full((4, 10), -100))


def test_losses_that_are_summed() -> None:
    model, reference = layers(), layers()
    loss_fn = nn.MSELoss(reduction="sum")
    total = 0.0
    for xs, ys in zip(X.tensor_split(3), Y.tensor_split(3)):
        loss = loss_fn(reference(xs), ys)
        loss.backward()
        total += loss.item()
    with engine_of(model, loss_fn=loss_fn, micro_batches=3, loss_reduction="sum") as engine:
        assert engine.forward_backward(X, target=Y) == total
        assert engine.eval_step(X, target=Y) == total
        same_weights(engine, reference)


def test_a_loss_module_with_tensors_of_its_own() -> None:
    weight = torch.tensor([0.2, 0.5, 0.3]).double()
    target = Y.argmax(1)
    with engine_of(loss_fn=nn.CrossEntropyLoss(weight=weight)) as engine:
        want = [nn.functional.cross_entropy(layers()(xs), ys, weight=weight).item() / 4 for xs, ys in zip(X.split(2), target.split(2))]
        assert engine.train_step(X, target=target) == pytest.approx(sum(want), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_inside_train_step(max_norm: float, dtype: torch.dtype) -> None:
    model, reference = layers(dtype), layers(dtype)
    own = sgd(reference)
    with engine_of(model, stages=3, max_grad_norm=max_norm) as engine:
        for x, y in batches(dtype=dtype):
            own.zero_grad()
            for xs, ys in zip(x.split(2), y.split(2)):
                (nn.functional.mse_loss(reference(xs), ys) * 0.25).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            own.step()
            engine.train_step(x, target=y)
            same_weights(engine, reference)


def test_clipping_between_backward_and_step() -> None:
    model, reference = layers(), layers()
    own = sgd(reference)
    with engine_of(model, stages=3) as engine:
        for x, y in batches():
            own.zero_grad()
            for xs, ys in zip(x.split(2), y.split(2)):
                (nn.functional.mse_loss(reference(xs), ys) * 0.25).backward()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            own.step()
            engine.zero_grad()
            engine.forward_backward(x, target=y)
            assert engine.clip_grad_norm(0.05) == norm.item()
            engine.optimizer_step()
            same_weights(engine, reference)


def test_clipping_without_gradients_and_with_wrong_numbers() -> None:
    with engine_of() as engine:
        assert engine.clip_grad_norm(1.0) == 0.0
        for max_norm, norm_type in ((-1.0, 2.0), (float("nan"), 2.0), (1.0, float("nan"))):
            with pytest.raises(StageError, match="max_norm is"):
                engine.clip_grad_norm(max_norm, norm_type)
        engine.train_step(X, target=Y)


# --- arguments ---


class Scaled(nn.Module):
    def __init__(self, own: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.own = own

    def forward(self, x: Tensor, scale: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
        y = self.linear(x) * gain
        return y if scale is None else y * scale


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.linear(x) + shift


def keyworded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled("a"), nn.Tanh(), Scaled("b"), nn.Tanh(), Ends()).double()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_keyword_arguments_go_to_the_layers_that_name_them(stages: int) -> None:
    model = keyworded()
    reference = copy.deepcopy(model)
    scale, shift = torch.randn(8, 1).double(), torch.randn(3).double()

    def whole(x: Tensor, scale: Tensor) -> Tensor:
        h = reference[1](reference[0](x, scale, gain=2.0))
        return reference[4](reference[3](reference[2](h, scale, gain=2.0)), shift)

    for xs, ss, ys in zip(X.split(2), scale.split(2), Y.split(2)):
        (nn.functional.mse_loss(whole(xs, ss), ys) * 0.25).backward()
    with engine_of(model, stages=stages, batch_dim={"shift": None}) as engine:
        engine.forward_backward(X, target=Y, scale=scale, shift=shift, gain=2.0)
        same_weights(engine, reference)
        torch.testing.assert_close(engine.predict(x=X, scale=scale, shift=shift, gain=2.0), whole(X, scale).detach(), rtol=1e-12, atol=0)


def test_an_unknown_keyword_names_every_layer_and_what_it_takes() -> None:
    with engine_of(keyworded()) as engine:
        with pytest.raises(PlanError, match=r"(?s)no layer's forward takes 'mask'.*layer '0' takes gain, scale, x.*layer '4' takes shift"):
            engine.train_step(X, target=Y, mask=X)
        engine.train_step(X, target=Y, shift=torch.zeros(1, 3).double())


def test_a_missing_keyword_is_an_error_of_its_stage() -> None:
    with engine_of(keyworded()) as engine:
        with pytest.raises(StageError, match="shift") as caught:
            engine.train_step(X, target=Y)
        assert (caught.value.stage, caught.value.remote_type) == (1, "TypeError")


def test_a_target_without_a_loss_function_goes_to_forward() -> None:
    with engine_of(loss_fn=None) as engine, pytest.raises(PlanError, match="no layer's forward takes 'target'"):
        engine.train_step(X, target=Y)


def test_an_input_that_requires_grad_is_refused_in_training_only() -> None:
    x = X.clone().requires_grad_()
    with engine_of() as engine:
        with pytest.raises(BatchError, match=r"'input' requires grad.*detach"):
            engine.train_step(x, target=Y)
        assert not engine.predict(x).requires_grad
        assert engine.train_step(X, target=Y) > 0


def test_a_tensor_of_another_size_is_refused_before_anything_is_sent() -> None:
    with engine_of() as engine:
        with pytest.raises(BatchError, match=r"'target' of shape \(7, 3\).*8 rows.*batch_dim"):
            engine.train_step(X, target=Y[:7])
        with engine_of() as fresh:
            assert engine.train_step(X, target=Y) == fresh.train_step(X, target=Y)


def test_a_non_contiguous_batch_is_as_its_contiguous_copy() -> None:
    with engine_of() as engine, engine_of() as other:
        x, y = X.T.contiguous().T, Y.repeat_interleave(2, 1)[:, ::2]
        assert not x.is_contiguous()
        assert engine.train_step(x, target=y) == other.train_step(X, target=Y)


# --- predict ---


class Many(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {
            "rows": x,
            "mean": x.mean(),
            "count": x.shape[1],
            "nothing": None,
            "name": "many",
            "pair": (x[:, 0], [x.sum(1)]),
            "first": float(x[0, 0]),
        }


@pytest.mark.parametrize("stages", [1, 2])
def test_predict_merges_any_structure(stages: int) -> None:
    torch.manual_seed(0)
    first = nn.Linear(6, 4).double()
    with engine_of([first, Many()], None, stages=stages, micro_batches=3) as engine:
        found = engine.predict(X)
    h = torch.cat([first(part) for part in X.tensor_split(3)]).detach()
    assert torch.equal(found["rows"], h)
    torch.testing.assert_close(found["mean"], h.mean(), rtol=1e-12, atol=0)
    assert (found["count"], found["nothing"], found["name"]) == (4, None, "many")
    assert torch.equal(found["pair"][0], h[:, 0])
    assert torch.equal(found["pair"][1][0], h.sum(1))
    assert found["first"] == [float(h[0, 0]), float(h[3, 0]), float(h[6, 0])]


class Reuses(nn.Module):
    """Gives out its weight, and a buffer that each forward writes over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("buffer", torch.zeros(2, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        self.buffer.copy_(x)
        return self.buffer, self.weight


@pytest.mark.parametrize("stages", [1, 2])
def test_what_predict_gives_is_not_a_part_of_the_model(stages: int) -> None:
    with engine_of([nn.Identity(), Reuses()], None, stages=stages) as engine:
        rows, weight = engine.predict(X)
        assert torch.equal(rows, X)
        assert not weight.requires_grad
        weight.zero_()
        assert torch.equal(engine.state_dict()["1.weight"], torch.ones(6, dtype=torch.float64))


def test_predict_on_another_batch_dimension() -> None:
    class Sequence(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape == (5, 2, 6)
            return x * 2

    x = torch.randn(5, 8, 6)
    with engine_of([Sequence(), Sequence()], None, batch_dim=1) as engine:
        assert torch.equal(engine.predict(x), x * 4)


class Modes(nn.Module):
    seen: list[bool] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        Modes.seen.append((self.training, self.inner.training))
        return x


def test_evaluation_restores_each_modules_own_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Modes(), nn.Linear(6, 3)).double()
    model[1].inner.eval()
    Modes.seen = []
    with engine_of(model, split=[1, 2], micro_batches=1) as engine:
        engine.train_step(X, target=Y)
        engine.predict(X)
        engine.train_step(X, target=Y)
        engine.eval_step(X, target=Y)
        engine.train_step(X, target=Y)
        engine.train()
        engine.train_step(X, target=Y)
    assert Modes.seen == [(True, False), (False, False), (True, False), (False, False), (True, False), (True, True)]


def test_evaluation_restores_the_mode_after_a_failure() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Modes(), nn.Linear(6, 3)).double()
    Modes.seen = []
    with engine_of(model, split=[1, 2], micro_batches=1) as engine:
        with pytest.raises(StageError):
            engine.eval_step(X, target=Y.repeat(1, 2)[:, :5])
        engine.train_step(X, target=Y)
    assert Modes.seen == [(False, False), (True, True)]


# --- failures in the tail ---

LATE = threading.Event()
ARMED = threading.Event()


class Late(torch.autograd.Function):
    """Its backward raises, if armed, but not before the test says so: the loss is known by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ARMED.is_set():
            assert LATE.wait(60)
            raise ArithmeticError("in the tail")
        return gradient


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Late.apply(x)
        return found


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    ARMED.clear()
    LATE.clear()


def failing(norm: bool = False) -> nn.Sequential:
    """Stage 0 fails in its backward; stage 1 is done by then."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Fails(), nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3)).double()


def fail_in_the_tail(engine: pipe.Engine, step: Callable[..., float], x: Tensor, y: Tensor) -> None:
    engine.gradients()  # settles the step before
    ARMED.set()
    assert step(x, target=y) > 0  # returns with its loss
    LATE.set()


@pytest.mark.parametrize("name", [name for name in USES if name not in ("plan", "optimizer")])
def test_a_failed_tail_is_raised_by_the_next_call_once(name: str) -> None:
    reference = failing()
    own = sgd(reference)
    engine = engine_of(failing(), split=[2, 3])
    (a, b), (c, d), (e, f) = batches()
    assert engine.train_step(a, target=b) == plain(reference, own, a, b, 4, nn.MSELoss())
    fail_in_the_tail(engine, engine.train_step, c, d)
    with pytest.raises(StageError, match="in the tail") as caught:
        USES[name](engine)
    assert (caught.value.stage, caught.value.micro_batch, caught.value.remote_type) == (0, 0, "ArithmeticError")
    ARMED.clear()
    if name != "close":
        same_weights(engine, reference, gradients=False)
        assert engine.train_step(e, target=f) == plain(reference, own, e, f, 4, nn.MSELoss())
        same_weights(engine, reference)
        engine.close()


def test_a_failed_tail_is_raised_by_the_end_of_the_with_block() -> None:
    model, reference = failing(), failing()
    own = sgd(reference)
    (a, b), (c, d), _ = batches()
    plain(reference, own, a, b, 4, nn.MSELoss())

    def script() -> None:
        with engine_of(model, split=[2, 3]) as engine:
            engine.train_step(a, target=b)
            fail_in_the_tail(engine, engine.train_step, c, d)

    with pytest.raises(StageError, match="in the tail"):
        script()
    assert all(same_tensor(model.state_dict()[name], value) for name, value in reference.state_dict().items())  # what was good is kept
    assert not any(thread.name.startswith("pipe worker") for thread in threading.enumerate())


def test_the_users_exception_hides_a_failed_tail() -> None:
    def script() -> None:
        with engine_of(failing(), split=[2, 3]) as engine:
            fail_in_the_tail(engine, engine.train_step, X, Y)
            1 / 0

    with pytest.raises(ZeroDivisionError):
        script()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["train_step", "forward_backward"])
def test_after_a_failed_tail_no_stage_keeps_half_a_step(how: str, norm: bool) -> None:
    with engine_of(failing(norm), split=[2, 3]) as engine, engine_of(failing(norm), split=[2, 3]) as fresh:
        (a, b), (c, d), (e, f) = batches()
        assert engine.train_step(a, target=b) == fresh.train_step(a, target=b)
        fresh.gradients()  # settles it
        fail_in_the_tail(engine, getattr(engine, how), c, d)
        with pytest.raises(StageError, match="in the tail"):
            engine.predict(X)
        assert set(engine.gradients().values()) == {None}
        ARMED.clear()
        state = fresh.state_dict()
        assert all(same_tensor(value, state[name]) for name, value in engine.state_dict().items())
        assert engine.train_step(e, target=f) == fresh.train_step(e, target=f)
        state, gradients = fresh.state_dict(), fresh.gradients()
        assert all(same_tensor(value, state[name]) for name, value in engine.state_dict().items())
        assert all(same_tensor(value, gradients[name]) for name, value in engine.gradients().items())


def test_a_failed_tail_of_an_engine_that_nobody_calls_again_is_not_lost() -> None:
    from pipe.engine import close_all

    engine = engine_of(failing(), split=[2, 3])
    fail_in_the_tail(engine, engine.train_step, X, Y)
    with pytest.raises(StageError, match="in the tail"):
        close_all()
    engine.close()


# --- what can be looked at ---


def test_the_plan_the_trace_and_the_report() -> None:
    with engine_of(split=[2, 3], schedule="1f1b") as engine:
        engine.train_step(X, target=Y)
        plan, trace, report = engine.plan, engine.trace, engine.report()
        assert (plan.strategy, plan.stages, plan.replicas, plan.micro_batches, plan.schedule) == ("pipeline", 2, 1, 4, "1f1b")
        assert (plan.split, plan.stages_per_worker, len(plan.places)) == ((2, 3), 1, 2)
        assert pipe.Plan.from_json(plan.to_json()) == plan
        assert trace.schedule == pipe.schedule("1f1b", 2, 4)
        assert [e.action for e in trace.events if e.action.op is Op.OPTIMIZER] == [Action(Op.OPTIMIZER, 0, s) for s in (0, 1)]
        assert (trace.workers, trace.clock, trace.step, trace.plan["strategy"]) == (2, "wall", 1, "pipeline")
        assert trace.peak_in_flight == (2, 1)
        assert trace.sent_bytes == (8 * 8 * 8, 8 * 8 * 8)
        assert all(0 <= e.start <= e.end for e in trace.events)
        ends = {e.action: e.end for e in trace.events}
        for event in trace.events:
            if event.action.op.scheduled:
                assert all(ends[need] <= event.start for need in trace.schedule.needs(event.action))
        done = max(e.end for e in trace.events if e.action.op.scheduled)
        assert all(e.start >= done for e in trace.events if e.action.op is Op.OPTIMIZER)  # the wait for the others is no work
        assert 0 < trace.bubble < 1
        assert trace.chart().count("\n") >= 1
        assert [row.stages for row in report.workers] == [(0,), (1,)]
        assert report.step_seconds == trace.makespan
        assert report.samples_per_second == pytest.approx(8 / trace.makespan)
        text = str(report)
        assert text.isascii()
        assert all(place in text for place in plan.places)
        engine.predict(X)
        assert [e.action.op for e in engine.trace.events] == [Op.F] * 8
        engine.forward_backward(X, target=Y)
        assert engine.trace.schedule == pipe.schedule("1f1b", 2, 4)
        assert engine.trace.step == 2


def test_a_trace_goes_to_a_file_and_back(tmp_path: Any) -> None:
    with engine_of() as engine:
        engine.train_step(X, target=Y)
        engine.trace.save(tmp_path / "step.jsonl")
        assert pipe.Trace.load(tmp_path / "step.jsonl") == engine.trace


def test_a_good_run_says_its_plan_and_its_stages_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipe")
    with engine_of(split=[2, 3]) as engine:
        for _ in range(3):
            engine.train_step(X, target=Y)
        engine.predict(X)
    first, *stages = [record.getMessage() for record in caplog.records]
    assert first == "pipeline: 2 stages, 4 micro-batches, gpipe; asked for"
    assert [line.split(",")[0] for line in stages] == ["stage 0: layers 0 to 1 (2)", "stage 1: layers 2 to 4 (3)"]
    assert all("a thread" in line for line in stages)


def test_advice_after_twenty_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipe")
    with engine_of() as engine:
        for _ in range(25):
            engine.train_step(X, target=Y)
    assert sum("speed-up over one device" in record.getMessage() for record in caplog.records) == 1


def test_tensorboard_events_of_a_run(tmp_path: Any) -> None:
    with engine_of(logdir=tmp_path) as engine:
        for _ in range(2):
            engine.train_step(X, target=Y)
    assert (tmp_path / "pipeline" / "step-000001.jsonl").exists()
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_autocast_of_the_caller_is_in_force_on_the_stages() -> None:
    torch.manual_seed(0)
    seen: list[torch.dtype] = []

    class Sees(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x

    model = nn.Sequential(nn.Linear(6, 8), Sees(), nn.Linear(8, 3))
    reference, (x, y) = copy.deepcopy(model), batches(dtype=torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        want = 0.0
        for xs, ys in zip(x.split(2), y.split(2)):
            loss = nn.functional.mse_loss(reference(xs).float(), ys) * 0.25
            want += loss.item()
            loss.backward()
    for kind in ("caller", "precision"):
        seen.clear()
        own = copy.deepcopy(model)
        with pipe.Engine(
            own,
            None,
            lambda output, target: nn.functional.mse_loss(output.float(), target),
            stages=2,
            split=[1, 2],
            micro_batches=4,
            strategy="pipeline",
            precision="bf16" if kind == "precision" else "fp32",
        ) as engine:
            if kind == "caller":
                with torch.autocast("cpu", torch.bfloat16):
                    assert engine.forward_backward(x, target=y) == want
            else:
                assert engine.forward_backward(x, target=y) == want
            assert set(seen) == {torch.bfloat16}
            same_weights(engine, reference)


def test_a_mapping_as_batch_through_fit() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, *, x: Tensor, gain: Tensor) -> Tensor:
            return self.linear(x) * gain

    model = nn.Sequential(Asks(), nn.Linear(8, 3)).double()
    batch: Mapping[str, Any] = {"x": X, "gain": torch.ones(8, 1).double(), "target": Y}
    with engine_of(model) as engine:
        found = engine.fit([dict(batch)] * 2, epochs=2, progress=False)
    assert found[1].loss < found[0].loss
    assert [result.samples for result in found] == [16, 16]
