"""Keyed streams: the same numbers for every cut, thread and recompute; the process-wide generator is left alone."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from pipe.partition.sequence import Chain
from pipe.rng import Streams, draws, watch

torch.set_num_threads(1)


class Block(nn.Module):
    """Functional dropout between children, attention with dropout, drop path."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.drop = nn.Linear(d, d), nn.Linear(d, d), nn.LayerNorm(d), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(self.norm(x)), 0.3, self.training)
        q = h.view(*h.shape[:2], 2, -1).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).reshape(x.shape)
        return x + self.drop(self.b(F.dropout(h, 0.1, self.training))) * torch.empty(len(x), 1, 1).bernoulli_(0.8)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), Block(), encoder, nn.Dropout(0.2), Block(), nn.Linear(16, 4))
    watch(model)
    return model


def run(cuts: tuple[int, ...], threads: bool) -> list[Tensor]:
    """Outputs of three micro-batches, the layers cut at `cuts`, each piece perhaps in a thread."""
    model, bounds = make(), [0, *cuts, 6]
    values: dict[tuple[int, int], Tensor] = {(0, m): torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(m)) for m in range(3)}
    ready = {(s, m): threading.Event() for s in range(len(bounds)) for m in range(3)}

    def stage(s: int) -> None:
        torch.set_num_threads(1)
        for m in range(3):
            assert s == 0 or ready[s, m].wait(60)
            with Streams(7, 0, m):
                values[s + 1, m] = model[bounds[s] : bounds[s + 1]](values[s, m])
            torch.rand(3)  # somebody else's draws
            ready[s + 1, m].set()

    workers = [threading.Thread(target=stage, args=(s,)) for s in range(len(bounds) - 1)]
    for s, worker in enumerate(workers):
        worker.start() if threads else stage(s)
    for worker in workers if threads else ():
        worker.join()
    return [values[len(bounds) - 1, m].detach() for m in range(3)]


def test_every_cut_draws_the_same_in_threads_or_not() -> None:
    want = run((), False)
    assert not torch.equal(want[0], want[1])
    cuts = [c for n in (1, 2, 3) for c in itertools.combinations(range(1, 6), n)]
    for cut, threads in itertools.product(cuts[::2], (False, True)):
        assert all(map(torch.equal, run(cut, threads), want)), (cut, threads)
    assert not is_in_torch_dispatch_mode()


def mask(*key: int, module: nn.Module | None = None) -> Tensor:
    drop = module or nn.Dropout(0.5)
    with Streams(*key):
        return drop(torch.ones(4, 100))


def test_each_part_of_the_key_counts_and_nothing_else() -> None:
    a, b = nn.Dropout(0.5), nn.Dropout(0.5)
    watch(a, "a")
    watch(b, "b")
    masks = [mask(*key, module=m) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)) for m in (a, b)]
    for x, y in itertools.combinations(masks, 2):
        assert not torch.equal(x, y)
    torch.manual_seed(5)
    assert torch.equal(mask(0, 0, 0, module=a), masks[0])
    with Streams(0, 0, 0):
        first, second = a(torch.ones(4, 100)), a(torch.ones(4, 100))
    assert torch.equal(first, masks[0])
    assert not torch.equal(first, second)


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(10**6, (5,)),
    "randint low": lambda: torch.randint(5, 10**6, (5,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randn_like": lambda: torch.randn_like(torch.ones(5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 10**6),
    "rand out": lambda: torch.rand(5, out=torch.empty(5)),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "normal_": lambda: torch.empty(5).normal_(),
    "multinomial": lambda: torch.multinomial(torch.ones(1000), 5),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "native_dropout": lambda: torch.native_dropout(torch.ones(64), 0.5, True)[0],
    "native_dropout None": lambda: torch.native_dropout(torch.ones(64), 0.5, None)[0],
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(64), 0.5, True),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 64, 1, 1), 0.5),
    "rrelu": lambda: F.rrelu(-torch.ones(5), training=True),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(5)),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4)] * 3, dropout_p=0.5),
    "distribution": lambda: torch.distributions.Gamma(torch.ones(5), 1.0).sample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_keyed_and_the_process_wide_generator_keeps_its_state(name: str) -> None:
    before = torch.get_rng_state()
    results = []
    for key in (0, 0, 1):
        torch.manual_seed(len(results))  # of no account
        state = torch.get_rng_state()
        with Streams(key, 0, 0):
            results.append(DRAWS[name]())
            again = DRAWS[name]()
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(results[-1], again)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    torch.set_rng_state(before)


def test_no_dropout_takes_no_draw_and_an_own_generator_is_the_users() -> None:
    own = torch.Generator().manual_seed(3)
    with Streams(0, 0, 0) as streams:
        F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4)] * 3)
        assert torch.equal(torch.native_dropout(torch.ones(4), 0.5, False)[0], torch.ones(4))
        x = torch.rand(3, generator=own)
        assert streams._drawn == {}
    assert torch.equal(x, torch.rand(3, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_dropout_is_keyed(kind: type) -> None:
    rnn = kind(4, 4, 2, dropout=0.5)
    x = torch.randn(3, 2, 4)

    def go(seed: int) -> Tensor:
        torch.manual_seed(seed + 100)
        with Streams(seed, 0, 0):
            return rnn(x)[0]

    assert not torch.equal(go(0), go(1))
    with Streams(0, 0, 0):
        want = rnn(x)[0]
    assert torch.equal(go(0), want)


# The user's own checkpoint: the same numbers again, whatever the region and however often a module is called.


class Checkpointed(nn.Module):
    """Regions with a module, with bare functions, with one dropout called in several of them, one within another."""

    def __init__(self, way: Callable[..., Any], inner_way: Callable[..., Any]) -> None:
        super().__init__()
        self.way, self.inner_way = way, inner_way
        self.block, self.drop, self.out = Block(), nn.Dropout(0.4), nn.Linear(16, 4)

    def shared(self, x: Tensor) -> Tensor:
        return self.drop(x).sin() * self.drop(x)

    def outer(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner_way(self.shared, self.drop(x)), 0.2).cos() * self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.way(self.block, F.dropout(x, 0.1))
        x = self.way(self.shared, x)
        x = self.drop(x) + self.way(self.outer, x)
        x = self.way(lambda v: F.dropout(v, 0.3).tanh() * torch.rand_like(v), x)
        return self.out(self.way(self.shared, x))


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def again_reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def gradients(way: Callable[..., Any], inner_way: Callable[..., Any]) -> list[Tensor | None]:
    torch.manual_seed(0)
    module = Checkpointed(way, inner_way)
    watch(module, "3")
    x = torch.randn(2, 5, 16).requires_grad_()
    streams = [Streams(1, 0, m) for m in range(2)]
    outputs = []
    for each in streams:
        with each:
            outputs.append(module(x))
    for each, output in zip(streams, outputs):
        torch.rand(3)
        with each:
            output.sum().backward()
    return [x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize(("way", "inner_way"), [(again, again), (again_reentrant, plainly), (again_reentrant, again)])
def test_checkpoint_inside_a_module_equals_none(way: Callable[..., Any], inner_way: Callable[..., Any]) -> None:
    state = torch.get_rng_state
    want, got = gradients(plainly, plainly), gradients(way, inner_way)
    assert all(g is not None for g in want)
    assert all(map(torch.equal, want, got))
    assert torch.get_rng_state is state


def test_a_checkpoint_recomputed_without_its_streams_raises() -> None:
    drop = nn.Dropout(0.5)
    with Streams(0, 0, 0):
        out = checkpoint(drop, torch.ones(4, requires_grad=True).sin(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="RNG state"):
        out.sum().backward()


def test_fork_rng_inside_goes_back() -> None:
    with Streams(0, 0, 0):
        with torch.random.fork_rng(devices=[]):
            a = torch.rand(3)
        assert torch.equal(torch.rand(3), a)


# Paths.


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise ZeroDivisionError


def test_an_exception_in_forward_leaves_no_path() -> None:
    module = Raises()
    watch(module, "raises")
    with Streams(0, 0, 0) as streams:
        with pytest.raises(ZeroDivisionError):
            module(torch.ones(2))
        torch.rand(1)
    assert streams._drawn == {"raises.inner": 0, "": 0}


def test_watching_leaves_no_mark_on_the_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    before = pickle.dumps(module)
    watch(module, "m")
    assert pickle.dumps(module) == before
    assert copy.deepcopy(module) is not module


def test_one_module_in_several_places_draws_by_its_place() -> None:
    drop = nn.Dropout(0.5)

    def holder() -> nn.Module:
        return nn.Sequential(drop, nn.Identity(), drop)

    blocks = nn.ModuleList([holder(), holder()])
    watch(blocks, "b")
    watch(drop, "d")
    x = torch.ones(2, 3)
    with Streams(0, 0, 0) as streams:
        for block in blocks:
            block(x)
        with streams.at("d"):
            drop(x)
        with streams.at("b.1.2"):  # as a stage runs the layers of a sequence
            drop(x)
    assert streams._drawn == {"b.0.0": 1, "b.1.0": 1, "d": 0, "b.1.2": 0}


def test_draws_at_a_place_without_a_module_count_there() -> None:
    with Streams(0, 0, 0) as streams:
        with streams.at("loss"):
            torch.rand(1)
        torch.rand(1)
    assert streams._drawn == {"loss": 0, "": 0}


# Threads that enter and leave out of order.


def test_the_last_to_leave_puts_everything_back() -> None:
    get, flag = torch.get_rng_state, is_in_torch_dispatch_mode()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with Streams(0, 0, 1):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with Streams(0, 0, 0):
        thread.start()
        assert entered.wait(60)
    assert is_in_torch_dispatch_mode()  # the other is still in
    assert torch.get_rng_state().numel() > 16  # but this thread's state is the process's
    leave.set()
    thread.join()
    assert is_in_torch_dispatch_mode() is flag
    assert torch.get_rng_state is get


# draws()


class UserLinear(nn.Linear):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda m, a, o: F.dropout(o))
    return module


def patched() -> nn.Module:
    module = nn.ReLU()
    module.forward = lambda x: F.dropout(x)  # type: ignore[method-assign]
    return module


SILENT = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(1, 1)),
    "p = 0": lambda: nn.Sequential(nn.Dropout(0.0), nn.LSTM(2, 2, 2), nn.LSTM(2, 2, 1)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 4, dropout=0.0, batch_first=True),
    "resnet": lambda: __import__("torchvision").models.resnet18(),
}
DRAWING = {
    "dropout": lambda: nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(0.1))),
    "lstm": lambda: nn.LSTM(2, 2, 2, dropout=0.1),
    "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.1),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1),
    "activation": lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, activation=lambda x: F.dropout(x)),
    "rrelu": nn.RReLU,
    "subclass": lambda: UserLinear(1, 1),
    "user's": Block,
    "hook": hooked,
    "forward of its own": patched,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)),
}


@pytest.mark.parametrize("name", SILENT)
def test_cannot_draw(name: str) -> None:
    assert not draws(SILENT[name]())


@pytest.mark.parametrize("name", DRAWING)
def test_may_draw(name: str) -> None:
    assert draws(DRAWING[name]())


def test_a_stages_own_container_is_known() -> None:
    assert not draws(Chain([nn.Linear(1, 1)], ["0"]))
    assert draws(Chain([nn.Dropout(0.5)], ["0"]))


def test_one_layer_twice_in_the_root_draws_by_its_place() -> None:
    drop = nn.Dropout(0.5)
    chain = Chain([drop, nn.Identity(), drop], ["1", "2", "3"])
    watch(chain)

    class Root(nn.Module):
        def forward(self, streams: Streams) -> None:
            for name, layer in chain._modules.items():
                with streams.at(name):
                    layer(torch.ones(2))

    root = Root()
    watch(root)
    with Streams(0, 0, 0) as streams:
        root(streams)
    assert streams._drawn == {"1": 0, "3": 0}
