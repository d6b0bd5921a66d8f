import copy
import pickle
from collections import OrderedDict
from itertools import islice

import pytest
import torch
from torch import nn

from pipe.errors import PlanError
from pipe.partition.sequence import Chain, keywords, layers_of, resolve, route, why_whole
from pipe.partition.spec import LayerSpec, build_layers, skeleton
from pipe.partition.ties import find

torch.set_num_threads(1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask, scale=1.0):
        return self.linear(x) * mask * scale


class Open(nn.Module):
    def forward(self, x, **kwargs):
        self.seen = kwargs
        return x


class Two(nn.Module):
    def forward(self, a, b=None, *, bias=0.0):
        return a + b + bias


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()


def names_of(n: int) -> list[str]:
    return [f"layer{i}" for i in range(n)]


# --- layers and their names ---


def test_a_sequential_keeps_its_childrens_names_also_of_a_module_that_stands_twice() -> None:
    relu = nn.ReLU()
    found = layers_of(nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), a=relu, head=nn.Linear(2, 2), b=relu)))
    assert found is not None
    assert (found.names, found.kind, len(found)) == (("embed", "a", "head", "b"), "sequential", 4)
    assert found.layers[1] is found.layers[3] is relu


@pytest.mark.parametrize("make", [list, tuple, nn.ModuleList])
def test_a_list_is_named_like_a_sequential_of_it(make) -> None:
    layers = [nn.Linear(2, 2), nn.ReLU()]
    found = layers_of(make(layers))
    assert found is not None
    assert (found.names, found.layers, found.kind) == (("0", "1"), tuple(layers), "list")


def test_specs_and_modules_may_be_mixed() -> None:
    spec = LayerSpec(nn.Linear, 2, 2)
    found = layers_of([nn.ReLU(), spec])
    assert found is not None
    assert found.layers[1] is spec


def test_what_is_no_plain_sequence_is_not_cut() -> None:
    class Skips(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    holding = nn.Sequential(nn.Linear(2, 2))
    holding.scale = nn.Parameter(torch.ones(1))
    for model, why in [(nn.Linear(2, 2), "neither"), (Skips(nn.ReLU()), "forward"), (hooked, "hooks"), (holding, "scale")]:
        assert layers_of(model) is None
        assert why in why_whole(model)


def test_a_list_that_is_empty_or_holds_a_function_is_refused() -> None:
    with pytest.raises(PlanError, match="empty"):
        layers_of([])
    with pytest.raises(PlanError, match=r"entry 1 .*function.*wrap"):
        layers_of([nn.ReLU(), lambda x: x])


# --- where to cut ---


@pytest.mark.parametrize(
    ("split", "stages", "counts"),
    [
        ("auto", 2, None),
        ([5], 1, (5,)),
        ([2, 3], 2, (2, 3)),
        ((1, 1, 3), 3, (1, 1, 3)),
        (["layer2"], 2, (2, 3)),
        (["layer0", "layer2"], 2, (2, 3)),
        (["layer1", "layer4"], 3, (1, 3, 1)),
        ([], 1, (5,)),
    ],
)
def test_resolve(split, stages, counts) -> None:
    assert resolve(split, names_of(5), stages) == counts


@pytest.mark.parametrize(
    ("split", "stages", "why"),
    [
        ("layer2", 2, "is neither"),
        (3, 2, "is neither"),
        ([2.5, 2.5], 2, "other things"),
        ([True, 4], 2, "other things"),
        ([2, "layer2"], 2, "other things"),
        ([2, 2, 1], 2, "3 numbers for 2 stages"),
        ([0, 5], 2, "stage 0 0 layers"),
        ([6, -1], 2, "stage 1 -1 layers"),
        ([2, 2], 2, "adds up to 4 layers; the model has 5"),
        (["layr2"], 2, r"'layr2', which is no layer \(near: layer2"),
        (["layer3", "layer1"], 3, "in the model's order"),
        (["layer2", "layer2"], 3, "stand once"),
        (["layer1", "layer2"], 2, "begins 3 stages; there are 2"),
        (["layer0"], 2, "begins 1 stages; there are 2"),
    ],
)
def test_a_split_that_does_not_fit_says_what_would(split, stages, why) -> None:
    with pytest.raises(PlanError, match=why) as caught:
        resolve(split, names_of(5), stages)
    assert ("[2, 3]" if stages == 2 else "[1, 2, 2]") in str(caught.value)
    assert "layer0, layer1" in str(caught.value)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("stages", range(1, 5))
def test_every_layer_lands_once_and_no_stage_is_empty(n: int, stages: int) -> None:  # C66
    even = [n * (s + 1) // stages - n * s // stages for s in range(stages)]
    if n < stages:
        for split in ("auto", even, names_of(n)):
            with pytest.raises(PlanError, match=f"{stages} stages for {n} layer"):
                resolve(split, names_of(n), stages)
        return
    counts = resolve(even, names_of(n), stages)
    assert counts is not None
    assert (sum(counts), min(counts) >= 1, len(counts)) == (n, True, stages)


# --- what layers share ---


def stages_of(layers: list[nn.Module], counts: tuple[int, ...]) -> tuple[list[nn.Module], nn.Module]:
    """A module for each stage of a sequence, and the whole, with the names of the whole."""
    whole = nn.Sequential(*layers)
    parts, names = [], iter(whole._modules.items())
    for count in counts:
        part = nn.Module()
        part._modules.update(islice(names, count))
        parts.append(part)
    return parts, whole


def test_ties_are_the_same_object_and_cross_only_where_the_cut_parts_them() -> None:
    embed, middle, head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    norm = nn.BatchNorm1d(3)
    layers = [embed, norm, middle, norm, head]
    assert find(*stages_of(layers, (5,))) == ()
    (tie,) = find(*stages_of(layers, (4, 1)))
    assert (tie.name, tie.owner, tie.names) == ("0.weight", 0, {0: "0.weight", 1: "4.weight"})
    assert [tie.name for tie in find(*stages_of(layers, (3, 2)))] == ["0.weight", "1.weight", "1.bias"]
    buffers = find(*stages_of(layers, (3, 2)), buffers=True)
    assert [tie.name for tie in buffers] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_weight_of_three_stages_belongs_to_the_first() -> None:
    one = nn.Linear(2, 2)
    weight, bias = find(*stages_of([one, nn.ReLU(), one, one], (1, 2, 1)))
    assert (weight.names, bias.owner) == ({0: "0.weight", 1: "2.weight", 2: "3.weight"}, 0)


def test_the_owner_has_the_unsplit_models_name() -> None:
    """A graph may call a module first by a name that is not the first in the model."""
    shared = nn.Linear(2, 2, bias=False)
    whole = nn.ModuleDict({"a": shared, "b": shared})
    first, second = nn.Module(), nn.Module()
    first.add_module("b", shared)
    second.add_module("a", shared)
    (tie,) = find([first, second], whole)
    assert (tie.name, tie.owner, tie.names) == ("a.weight", 1, {0: "b.weight", 1: "a.weight"})


def test_a_module_without_parameters_ties_nothing() -> None:
    relu = nn.ReLU()
    assert find(*stages_of([relu, nn.Linear(2, 2), relu], (1, 2))) == ()


# --- the module of one stage ---


def test_chain_has_the_unsplit_models_keys_and_values() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(OrderedDict(forward_=nn.Linear(4, 4), keywords=nn.BatchNorm1d(4), a=shared, act=nn.Tanh(), b=shared))
    names, layers = list(model._modules), list(model)
    parts = [Chain(layers[:2], names[:2]), Chain(layers[2:], names[2:], first=False)]
    assert [key for part in parts for key in part.state_dict()] == list(model.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(parts[1](parts[0](x)), model(x))


def test_chain_sends_keywords_where_forward_names_them() -> None:  # C14, C64
    layers, names = [Masked(), nn.Linear(4, 4), Masked(), Open()], list("abcd")
    x, mask = torch.randn(2, 4), torch.tensor([0.0, 1.0, 2.0, 3.0])
    chain = Chain(layers, names)
    expected = layers[2](layers[1](layers[0](x, mask)), mask)
    assert torch.equal(chain(x, mask=mask), expected)
    assert torch.equal(chain(x=x, mask=mask), expected)  # the first layer's inputs may all come by keyword
    assert set(layers[3].seen) == {"mask"}  # everything but the one that its value fills
    assert chain.keywords is None
    assert Chain(layers[:3], names[:3]).keywords == {"x", "mask", "scale"}
    assert Chain(layers[:3], names[:3], first=False).keywords == {"mask", "scale"}


def test_a_missing_argument_is_an_error_and_not_none() -> None:
    with pytest.raises(TypeError, match="mask"):
        Chain([nn.Identity(), Masked()], ["a", "b"])(torch.ones(1, 4))


def test_chain_takes_several_arguments_and_runs_hooks_of_each_use() -> None:
    relu, calls = nn.ReLU(), []
    relu.register_forward_hook(lambda *_: calls.append(1))
    chain = Chain([Two(), relu, nn.Identity(), relu], list("abcd"))
    assert chain(torch.ones(2), torch.ones(2), bias=1.0).tolist() == [3.0, 3.0]
    assert calls == [1, 1]


def test_a_chain_can_be_copied_and_pickled() -> None:
    chain = Chain([Masked(), nn.ReLU()], ["a", "b"])
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert torch.equal(other(torch.ones(1, 4), mask=2.0), chain(torch.ones(1, 4), mask=2.0))


def test_route_lists_what_each_layer_takes() -> None:
    taken = keywords([Masked(), nn.ReLU(), Two()], list("abc"))
    assert route(taken, ["mask", "bias"]) == ""
    text = route(taken, ["maks", "mask"])
    assert "'maks'" in text
    assert "'mask'" not in text
    assert "layer 'a' takes mask, scale, x" in text
    assert "layer 'b' takes none" in text
    assert route(keywords([Open()], ["o"]), ["anything"]) == ""


def test_keywords_see_through_a_compiled_layer() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Masked()

        def forward(self, *args, **kwargs):
            return self._orig_mod(*args, **kwargs)

    taken = keywords([nn.ReLU(), Compiled()], ["a", "b"])
    assert taken["b"].names == {"mask", "scale"}
    assert not taken["b"].everything


# --- specs ---


def test_a_spec_is_built_where_it_is_asked_and_is_frozen() -> None:
    spec = LayerSpec(nn.Linear, 4, 3, bias=False)
    assert repr(spec) == "LayerSpec(Linear, 4, 3, bias=False)"
    assert spec.build().weight.shape == (3, 4)
    assert spec.build() is not spec.build()
    with pytest.raises(AttributeError):
        spec.args = ()
    assert repr(pickle.loads(pickle.dumps(spec))) == repr(spec)


def test_a_spec_takes_any_callable_and_any_keyword() -> None:
    def block(cls: int, self: int = 0) -> nn.Module:
        return nn.Linear(cls, self)

    assert LayerSpec(block, cls=2, self=3).build().weight.shape == (3, 2)
    with pytest.raises(PlanError, match=r"takes what makes an nn.Module"):
        LayerSpec("Linear")
    with pytest.raises(PlanError, match=r"gave a int; a layer is an nn.Module"):
        LayerSpec(lambda: 3).build()


def test_the_skeleton_has_names_and_shapes_but_no_memory_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    built = nn.Linear(2, 2)
    state = torch.get_rng_state()
    made = skeleton([LayerSpec(nn.Linear, 10**6, 10**6), built, LayerSpec(nn.Dropout)])
    assert made[0].weight.is_meta
    assert made[0].weight.shape == (10**6, 10**6)
    assert made[1] is built
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before, state)


def test_a_constructor_that_fails_on_meta_names_the_layer() -> None:
    with pytest.raises(PlanError, match=r"layer 'drop': LayerSpec\(Stubborn\) raised RuntimeError.*meta device"):
        skeleton([LayerSpec(nn.ReLU), LayerSpec(Stubborn)], ["act", "drop"])


def test_stages_built_apart_have_the_weights_of_one_process() -> None:  # C54
    torch.manual_seed(0)
    expected = [nn.Linear(8, 8) for _ in range(4)]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    torch.manual_seed(123)
    untouched = torch.get_rng_state()
    made: list[nn.Module] = []
    for _ in range(4):
        stage, state = build_layers([LayerSpec(nn.Linear, 8, 8)], state)
        made += stage
    assert torch.equal(torch.get_rng_state(), untouched)
    for one, other in zip(expected, made):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias)
    assert not torch.equal(made[0].weight, made[1].weight)


def test_a_built_layer_passes_through_and_draws_nothing() -> None:
    state, layer = torch.get_rng_state(), nn.Linear(2, 2)
    made, after = build_layers([layer], state)
    assert made == [layer]
    assert torch.equal(state, after)
