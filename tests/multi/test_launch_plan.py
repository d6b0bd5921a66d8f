"""--plan and --memory, and what links and devices are measured to be like between processes."""

from __future__ import annotations

import json

from tests.multi.conftest import Launch

SCRIPT = """
import torch
from torch import nn
import pipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return x

model = Net()
engine = pipe.Engine(model, torch.optim.Adam(model.parameters()), nn.MSELoss())
for _ in range(3):
    print("loss", engine.train_step(torch.randn(8, 64), target=torch.randn(8, 64)))
"""


def test_plan_prints_the_table_and_trains_nothing(launch: Launch) -> None:
    ended = launch("--stages", "3", "--plan", script=SCRIPT)
    assert ended.code == 0, ended.err
    first, head, *stages = ended.out.splitlines()
    assert first.startswith("pipeline: 3 stages")
    assert head.split("  ")[0] == "stage"
    assert [line.split()[0] for line in stages] == ["0", "1", "2"]
    assert sum(int(line.split()[-3].replace(",", "")) for line in stages) == 6 * 64 * 65
    assert "not measured" not in ended.out
    assert "loss" not in ended.out


def test_memory_that_is_too_little_is_said_before_anything_runs(launch: Launch) -> None:
    ended = launch("--stages", "2", "--memory", "10KiB", script=SCRIPT)
    assert ended.code == 1
    assert "raise the limit (--memory)" in ended.err
    assert "loss" not in ended.out
    ended = launch("--memory", "10 parsecs", script=SCRIPT)
    assert ended.code == 2
    assert "--memory is '10 parsecs'; it is the bytes that a worker may use" in ended.err


def test_links_and_devices_between_processes(launch: Launch) -> None:
    script = """
    import functools, json
    import pipe.session
    from pipe import links
    session = pipe.session.current()
    session.used = True
    cpu = functools.partial(str, "cpu")
    pairs = [(0, 1), (1, 2)]
    rates = links.per_byte(session, pairs)
    print(json.dumps([[rates[pair] for pair in pairs], links.slowness(session, [cpu] * 3)]))
    """
    ended = launch("--stages", "3", script=script, env={"OMP_NUM_THREADS": "1"})
    assert ended.code == 0, ended.err
    rates, slowness = json.loads(ended.out)
    assert all(0 < rate < 1e-6 for rate in rates)  # of memory and sockets: above 1 MB/s, and no less than nothing
    assert len(slowness) == 3
    assert min(slowness) == 1.0
