"""Two hosts: network namespaces joined by a cable, each with its own processes, so that nothing goes past the link."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.netns

TRAIN = """
import copy, os, sys
import torch
import pipe
import pipe.session
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
x, y = torch.randn(8, 8), torch.randn(8, 4)
loss_fn = torch.nn.functional.mse_loss
plain = copy.deepcopy(model)
parts = list(zip(x.chunk(4), y.chunk(4)))
loss = sum((loss_fn(plain(a), b) / 4).item() for a, b in parts)
with pipe.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batches=4) as engine:
    print(engine.train_step(x, target=y) == loss, *(m.host for m in pipe.session.current().members))
    if sys.argv[1:]:
        pipe.session.current().start(1, os._exit, 9)
        while True:
            engine.train_step(x, target=y)
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two prefixes that run a command on one of two hosts, 10.78.9.1 and 10.78.9.2."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and unshare")
    names = [f"pipe{os.getpid()}h{number}" for number in (1, 2)]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.78.9.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        inside = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        yield [["ip", "netns", "exec", name, *inside, f'hostname host{n}; "$@"; exit $?', "sh"] for n, name in enumerate(names, 1)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def job(start, hosts):
    """The two ends of a job over both hosts."""

    def both(*arguments):
        options = ["--nnodes", "2", "--rdzv-endpoint", "10.78.9.1:29500", "--stages", "2"]
        runs = [
            start(*options, "--node-rank", str(node), script=TRAIN, arguments=arguments, prefix=prefix) for node, prefix in enumerate(hosts)
        ]
        return [run.wait() for run in runs]

    return both


def test_training_over_two_hosts(job):
    """Also with a host name that does not resolve (CASES C92)."""
    first, second = job()
    assert (first.code, first.out) == (0, "True host1 host2\n")
    assert (second.code, second.out) == (0, "")
    for number, end in enumerate((first, second), 1):
        assert f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are eth0 (10.78.9.{number})" in end.err


def test_worker_that_ends_on_the_other_host_is_named_on_both(job):
    ends = job("fail")
    assert ends[1].code == 9
    assert "pipe-launch: stage 1 (rank 1, pid " in ends[1].err
    assert "on host host2 ended by itself with exit code 9" in ends[1].err
    assert ends[0].code != 0
