"""Over RPC: two stages save, three go on, with the losses of a run that was not broken."""

from __future__ import annotations

from pathlib import Path

from tests.multi.conftest import Launch
from tests.multi.test_rpc_numbers import ENV

SCRIPT = """
import sys
import torch
from torch import nn
import pipe

folder, what = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
data = [(torch.randn(8, 6).double(), torch.randn(8, 3).double()) for _ in range(4)]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with pipe.Engine(model, optimizer, nn.MSELoss(), micro_batches=2, seed=len(what)) as engine:
    if what == "first":
        for x, y in data[:2]:
            engine.train_step(x, target=y)
        engine.save(folder)
    else:
        engine.load(folder)
    for x, y in data[2:]:
        print(engine.train_step(x, target=y).hex())
    print(*(value.sum().item().hex() for value in engine.state_dict().values()))
"""


def test_another_number_of_stages_goes_on(launch: Launch, tmp_path: Path) -> None:
    whole = launch("--stages", "2", script=SCRIPT, arguments=[str(tmp_path / "kept"), "first"], env=ENV)
    assert whole.code == 0, whole.err
    for options in (("--stages", "3"), ("--stages", "1")):
        again = launch(*options, script=SCRIPT, arguments=[str(tmp_path / "kept"), "then"], env=ENV)
        assert (again.code, again.out) == (0, whole.out), again.err
