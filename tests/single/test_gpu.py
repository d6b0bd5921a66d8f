"""What needs a GPU: run with `pytest -m gpu` where one is.

The mapping of workers to GPUs is tested everywhere (tests/pure/test_placement.py).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipe
from pipe import wire
from pipe.boundary import check_device_copy
from pipe.clock_cuda import CudaClock
from tests.suites.numbers import batches, mlp, plain, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_on_gpus_give_the_numbers_of_one(stages: int, schedule: str) -> None:
    model = mlp(torch.float64)
    reference = copy.deepcopy(model).cuda()
    optimizer, own = sgd(model.parameters()), sgd(reference.parameters())
    share = torch.cuda.device_count() < stages
    device = "cuda:0" if share else "cuda"
    engine = pipe.Engine(
        model, optimizer, nn.MSELoss(), stages=stages, micro_batches=3, schedule=schedule, strategy="pipeline", device=device
    )
    with engine:
        for x, y in batches(7, torch.float64):
            want = plain(reference, own, x.cuda(), y.cuda(), 3, nn.MSELoss())
            assert engine.train_step(x, target=y) == pytest.approx(want, rel=1e-12)
        for name, value in reference.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value.cpu(), rtol=1e-12)
        assert engine.trace.clock == "cuda"
        assert engine.predict(torch.zeros(2, 16, dtype=torch.float64)).device.type == "cpu"


def test_a_message_keeps_strides_on_its_way_through_host_memory() -> None:
    for t in (torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last), torch.randn(9, 9)[1:, ::2], torch.randn(5, 1).expand(5, 7)):
        message = wire.pack(t.cuda())
        assert message.ready is not None
        message.ready.synchronize()
        back = wire.unpack(message, "cuda", lambda tensor, needs_grad: tensor)
        assert back.stride() == t.stride()
        assert torch.equal(back.cpu(), t)


def test_device_copies_are_checked() -> None:
    check_device_copy("cuda:0")


def test_the_clock_tells_when_the_device_did_the_work() -> None:
    clock = CudaClock(0.0, torch.device("cuda:0"))
    first = clock.mark()
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = a @ a / a.norm()
    second = clock.mark()
    assert clock.seconds(second) > clock.seconds(first)
