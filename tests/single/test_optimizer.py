"""The optimizer on the workers: a shell copy steps as the original does, for every class of torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import same_tensor
from torch import Tensor, nn

import pipe
from pipe.errors import OptimizerError
from pipe.front import Front, Workers
from pipe.optimizer import apply_groups, state_on

NO_WORKERS = Workers(lambda: None, lambda set_to_none: None, lambda: None, lambda state: None)
Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def of(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda named: kind([p for _, p in named], **options)


MAKERS: dict[str, Make] = {
    "SGD": of(torch.optim.SGD, lr=0.1),
    "SGD nesterov": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": of(torch.optim.Adam),
    "Adam amsgrad": of(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "Adam tensor lr": of(torch.optim.Adam, lr=torch.tensor(0.01)),
    "Adam foreach": of(torch.optim.Adam, foreach=True),
    "Adam fused": of(torch.optim.Adam, fused=True),
    "AdamW": of(torch.optim.AdamW, maximize=True),
    "ASGD": of(torch.optim.ASGD),
    "Adadelta": of(torch.optim.Adadelta),
    "Adafactor": of(torch.optim.Adafactor),
    "Adagrad": of(torch.optim.Adagrad, initial_accumulator_value=0.3),
    "Adamax": of(torch.optim.Adamax),
    "Muon": lambda named: torch.optim.Muon([p for _, p in named if p.dim() == 2]),
    "NAdam": of(torch.optim.NAdam),
    "RAdam": of(torch.optim.RAdam),
    "RMSprop": of(torch.optim.RMSprop, centered=True, momentum=0.3),
    "Rprop": of(torch.optim.Rprop),
    "SparseAdam": of(torch.optim.SparseAdam),
    "named": lambda named: torch.optim.AdamW([(n, p) for n, p in named], lr=0.01),
    "groups": lambda named: torch.optim.SGD(
        [{"params": [p for _, p in named[1:]], "lr": 0.3}, {"params": [named[0][1]], "momentum": 0.5}], lr=0.1
    ),
}
SPARSE = {"SparseAdam"}


def weights() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (3, 6), "1.bias": (3,)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def give_gradients(named: list[tuple[str, nn.Parameter]], seed: int, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to_sparse() if sparse else gradient


def front_of(make: Make, named: list[tuple[str, nn.Parameter]]) -> Front:
    return Front(make(named), {id(p): n for n, p in named}, NO_WORKERS)


def test_every_class_of_torch_is_tried() -> None:
    kinds = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer", "LBFGS"}
    assert kinds <= {name.partition(" ")[0] for name in MAKERS}


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_a_shell_steps_as_the_original(name: str, warm: int) -> None:
    make, sparse, named = MAKERS[name], name in SPARSE, weights()
    original = make(named)
    for seed in range(warm):
        give_gradients(named, seed, sparse)
        original.step()
    shell = Front(original, {id(p): n for n, p in named}, NO_WORKERS).shell()
    reference, held = copy.deepcopy((original, named))  # before the front's hook: it clears gradients
    reference._optimizer_step_pre_hooks.clear()
    workers = [{n: nn.Parameter(p.detach().clone()) for n, p in named if n.startswith(stage)} for stage in ("0", "1")]
    copies = [shell.only(set(own)).build(own) for own in workers]
    for seed in range(10, 13):
        give_gradients(held, seed, sparse)
        reference.step()
        for own, parameters in zip(copies, workers):
            by_name = dict(held)
            for n, parameter in parameters.items():
                parameter.grad = by_name[n].grad.clone() if by_name[n].grad is not None else None
            own.step()
    for n, parameter in held:
        own = next(w for w in workers if n in w)
        assert same_tensor(own[n].detach(), parameter.detach()), n
    for kept, made in ((reference.state[p], copies[int(n[0])].state[workers[int(n[0])][n]]) for n, p in held if p in reference.state):
        assert kept.keys() == made.keys()
        assert all(same_tensor(made[key], value) if isinstance(value, Tensor) else made[key] == value for key, value in kept.items())


@pytest.mark.parametrize("name", MAKERS)
def test_a_shell_shares_nothing_with_the_original(name: str) -> None:
    named = weights()
    original = MAKERS[name](named)
    give_gradients(named, 0, name in SPARSE)
    original.step()
    before = copy.deepcopy(original.state_dict())
    own = {n: nn.Parameter(p.detach().clone()) for n, p in named}
    made = Front(original, {id(p): n for n, p in named}, NO_WORKERS).shell().build(own)
    give_gradients(list(own.items()), 1, name in SPARSE)
    made.step()
    made.param_groups[0]["lr"] = 17.0
    after = original.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert str(after["state"]) == str(before["state"])


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in SPARSE | {"Muon"}])
def test_in_the_engine(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    optimizer, own = MAKERS[name](list(model.named_parameters())), MAKERS[name](list(reference.named_parameters()))
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    with pipe.Engine(model, optimizer, nn.MSELoss(), stages=2, split=[1, 2], micro_batches=1, strategy="pipeline") as engine:
        for _ in range(3):
            own.zero_grad()
            nn.functional.mse_loss(reference(x), y).backward()
            own.step()
            engine.train_step(x, target=y)
        state = engine.state_dict()
        assert all(same_tensor(state[n], value) for n, value in reference.state_dict().items())
        kept = engine.optimizer_state_dict()
        assert set(kept) == {n for n, p in reference.named_parameters() if own.state.get(p)}


def test_sparse_gradients_in_the_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer, own = torch.optim.SparseAdam(model[0].parameters()), torch.optim.SparseAdam(reference[0].parameters())
    tokens, y = torch.randint(50, (8,)), torch.randn(8, 3)
    with pipe.Engine(model, optimizer, nn.MSELoss(), stages=2, micro_batches=2, max_grad_norm=0.01, strategy="pipeline") as engine:
        for _ in range(3):
            own.zero_grad()
            for part in range(2):
                rows = slice(4 * part, 4 * part + 4)
                (nn.functional.mse_loss(reference(tokens[rows]), y[rows]) * 0.5).backward()
            gradient = reference[0].weight.grad.coalesce()
            gradient.values().mul_(torch.clamp(0.01 / (gradient.values().norm() + 1e-6), max=1.0))
            reference[0].weight.grad = gradient
            own.step()
            engine.train_step(tokens, target=y)
        assert engine.gradients()["0.weight"].is_sparse
        torch.testing.assert_close(engine.state_dict()["0.weight"], reference[0].weight.detach(), rtol=1e-6, atol=0)


def test_groups_carry_changes_and_additions() -> None:
    named = weights()
    optimizer = torch.optim.SGD([named[0][1]], lr=0.1)
    front = Front(optimizer, {id(p): n for n, p in named}, NO_WORKERS)
    own = {n: nn.Parameter(p.detach().clone()) for n, p in named}
    made = front.shell().build(own)
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.add_param_group({"params": [p for _, p in named[1:3]], "momentum": 0.5})
    apply_groups(made, front.groups(), own)
    assert [group["lr"] for group in made.param_groups] == [0.7, 0.1]
    assert [group["momentum"] for group in made.param_groups] == [0, 0.5]
    assert [[id(p) for p in group["params"]] for group in made.param_groups] == [
        [id(own["0.weight"])],
        [id(own["0.bias"]), id(own["1.weight"])],
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]


def test_a_worker_without_parameters_has_no_copy() -> None:
    assert front_of(MAKERS["Adam"], weights()).shell().build({}) is None


def test_state_goes_where_the_parameter_is() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    kept = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "prev": [1, 2]}
    placed = state_on(kept, parameter)
    placed["exp_avg"].zero_()
    placed["prev"].append(3)
    assert torch.equal(kept["exp_avg"], torch.ones(2))
    assert kept["prev"] == [1, 2]
    assert torch.equal(placed["step"], torch.tensor(3.0))


def test_the_front_ties_step_and_zero_grad_and_gives_them_back() -> None:
    named, done = weights(), []
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    front = Front(
        optimizer,
        {id(p): n for n, p in named},
        Workers(lambda: done.append("step"), lambda _: done.append("zero"), lambda: None, lambda _: None),
    )
    give_gradients(named, 0, sparse=False)
    before = named[0][1].detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    front.stepped()  # its schedulers hear of it, the workers do not
    assert done == ["step", "zero"]
    assert torch.equal(named[0][1], before)
    front.release()
    give_gradients(named, 0, sparse=False)
    optimizer.step()
    assert done == ["step", "zero"]
    assert not torch.equal(named[0][1], before)


def test_what_a_front_refuses() -> None:
    named = weights()
    names = {id(p): n for n, p in named}
    with pytest.raises(OptimizerError, match=r"LBFGS.step needs a closure.*AdamW"):
        Front(torch.optim.LBFGS([p for _, p in named]), names, NO_WORKERS)
    with pytest.raises(OptimizerError, match=r"4 of the optimizer's 4 parameters are not the model's \(one has shape \(6, 4\)\)"):
        Front(MAKERS["SGD"](weights()), names, NO_WORKERS)
    front = front_of(MAKERS["SGD"], named)
    front.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(OptimizerError, match="1 of the optimizer's 5 parameters"):
        front.groups()
    with pytest.raises(OptimizerError, match="closure"):
        front_of(MAKERS["SGD"], named).optimizer.step(lambda: 0.0)
