"""What a user sees when a stage raises, hangs, dies or cannot be sent; nothing is left of the run, which `launch` checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.conftest import Launch

SCRIPT = """
import os, sys, time, torch, pipe
from torch import nn

HOW = sys.argv[1]

class Custom(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        import threading
        self.lock = threading.Lock()

class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 7:
            match HOW:
                case "raise": raise Custom(3, "boom")
                case "sys.exit": sys.exit(0)
                case "interrupt": raise KeyboardInterrupt
                case "os._exit(0)": os._exit(0)
                case "sleep": time.sleep(90)
        return self.linear(x)

class Tail(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Tail.calls += 1
        if HOW == "tail" and Tail.calls == 8:
            raise ValueError("in the tail")
        return gradient

class Early(nn.Module):
    def forward(self, x):
        return Tail.apply(x)

model = nn.Sequential(nn.Linear(8, 8), Early(), Bad(), nn.Linear(8, 1))
engine = pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), micro_batches=4, split=[2, 2])
x, y = torch.randn(8, 8), torch.randn(8, 1)
engine.train_step(x, target=y)
print("one step", flush=True)
try:
    engine.train_step(x, target=y)
    print("two steps", flush=True)
except pipe.StageError as error:
    if HOW == "raise":
        print(error.stage, error.worker, error.micro_batch, error.remote_type, flush=True)
        before = engine.state_dict()
        engine.train_step(x, target=y)
        after = engine.state_dict()
        moved = [bool((before[k] != after[k]).any()) for k in after]
        print("goes on", all(torch.isfinite(v).all() for v in after.values()), any(moved), flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("how", "out", "err"),
    [
        (
            "raise",
            "one step\n1 1 2 __main__.Custom\ngoes on True True\n",
            ["StageError: F2@1 on worker 1 (host ", "__main__.Custom: (3, 'boom')", 'raise Custom(3, "boom")', "script.py"],
        ),
        ("sys.exit", "one step\n", ["StageError: F2@1 on worker 1 (host ", "SystemExit: 0"]),
        ("interrupt", "one step\n", ["StageError: F2@1 on worker 1 (host ", "KeyboardInterrupt"]),
        ("os._exit(0)", "one step\n", ["PeerLost", "is gone"]),
        ("sleep", "one step\n", ["stage 1 has been in F2@1", "--timeout SECONDS"]),
        ("tail", "one step\ntwo steps\n", ["StageError: B3@0 on worker 0 (host ", "ValueError: in the tail"]),
    ],
)
def test_one_error_with_its_place(launch: Launch, how: str, out: str, err: list[str]) -> None:
    options = ("--timeout", "10") if how == "sleep" else ()
    ended = launch("--stages", "2", *options, script=SCRIPT, arguments=[how])
    assert ended.code == 1, ended
    assert ended.out == out
    for text in err:
        assert text in ended.err
    assert ended.err.count("Traceback (most recent call last)") <= 2  # the user's, and the remote one
    assert ended.err.count("eof") <= 1


def test_attribute_that_cannot_be_sent_is_named_before_anything_is_sent(launch: Launch) -> None:
    script = """
    import threading, torch, pipe
    from torch import nn

    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.lock = threading.Lock()

    model = nn.Sequential(nn.Linear(4, 4), Locked())
    engine = pipe.Engine(model, None, nn.MSELoss())
    engine.predict(torch.zeros(2, 4))
    """
    ended = launch("--stages", "2", script=script)
    assert ended.code == 1
    for text in ("layer '1'", "'lock'", "LayerSpec"):
        assert text in ended.err.splitlines()[-1]


def test_what_the_script_defines_works_on_the_workers(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Mine(nn.Linear):\n    def forward(self, x):\n        return SCALE * super().forward(x)\nSCALE = 2\n"
    )
    script = """
    import functools, enum, torch, pipe
    from dataclasses import dataclass
    from torch import nn
    from mine import Mine

    class Kind(enum.Enum):
        A = 1

    @dataclass
    class Between:
        h: torch.Tensor
        kind: Kind

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), lambda x: x * torch.sigmoid(x)

        def forward(self, x):
            return Between(Double.apply(self.act(self.linear(x))), Kind.A)

    def main():
        class Second(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.act = Mine(4, 1), functools.partial(torch.clamp, min=-1)

            def forward(self, between):
                assert between.kind is Kind.A and isinstance(between, Between)
                return self.act(self.linear(between.h))

        torch.manual_seed(0)
        model = nn.Sequential(First(), Second())
        x, y = torch.randn(6, 4), torch.randn(6, 1)
        want = model(x).detach()
        with pipe.Engine(model, torch.optim.Adam(model.parameters()), lambda o, t: ((o - t) ** 2).mean(), stages=2) as engine:
            assert torch.allclose(engine.predict(x), want)
            first = engine.train_step(x, target=y)
            print(engine.train_step(x, target=y) < first)

    main()
    """
    ended = launch("--stages", "2", script=script)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err


def test_layers_are_built_where_they_work_with_the_weights_of_one_process(launch: Launch) -> None:
    script = """
    import os, torch, pipe
    from torch import nn

    class Here(nn.Linear):
        def __init__(self, *args):
            super().__init__(*args)
            if not self.weight.is_meta:
                print("built in", os.environ["RANK"], flush=True)

    specs = [pipe.LayerSpec(Here, 4, 8), pipe.LayerSpec(nn.Tanh), pipe.LayerSpec(Here, 8, 1)]
    torch.manual_seed(3)
    engine = pipe.Engine(specs, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), nn.MSELoss(), split=[2, 1])
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    engine.forward_backward(x, target=y)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    assert all(torch.equal(engine.state_dict()[k], v) for k, v in plain.state_dict().items())
    engine.close()
    """
    ended = launch("--stages", "2", script=script)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[rank 1] built in 1", "built in 0"]


def test_script_that_idles_longer_than_the_time_out_between_steps(launch: Launch) -> None:
    script = """
    import time, torch, pipe
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    engine.train_step(x, target=y)
    time.sleep(12)
    print(engine.train_step(x, target=y) > 0)
    """
    ended = launch("--stages", "2", "--timeout", "10", script=script)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err
