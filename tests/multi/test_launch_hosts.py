"""Several hosts: two 'nodes' on the loopback, and how one that does not come, or does not fit, is told."""

from __future__ import annotations

import json
import signal
import socket

import pytest

SESSION = "import json, os, signal, sys, time\nimport pipe.session\nsession = pipe.session.current()\nsession.used = True\n"


@pytest.fixture
def endpoint():
    """A port that was free a moment ago; two jobs of one test agree on it beforehand, so it cannot be chosen by the listener."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def node(endpoint, rank, *options, nodes=2):
    return ["--nnodes", str(nodes), "--node-rank", str(rank), "--rdzv-endpoint", endpoint, *options]


def test_two_nodes_take_the_options_of_node_0(start, endpoint):
    script = SESSION + "print(json.dumps([sys.argv[1:], dict(session.options), [m.local_rank for m in session.members]]))\n"
    second = start(*node(endpoint, 1, "--stages", "5", "--micro-batches", "9"), script=script, arguments=["theirs"])
    second.until("waiting for node 0 of 2 (0:00)")
    first = start(*node(endpoint, 0, "--stages", "2"), script=script, arguments=["ours"]).wait()
    other = second.wait()
    assert (first.code, json.loads(first.out)) == (0, [["ours"], {"stages": 2}, [0, 0]])
    assert (other.code, other.out) == (0, "")
    assert first.err.splitlines()[-1].endswith(
        "ranks 0-0 of 2; TP_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are lo (127.0.0.1)"
    )


def test_unequal_nodes_and_a_worker_killed_on_the_other(start, endpoint):
    script = SESSION + "session.start(2, os.kill, session.members[2].pid, signal.SIGKILL)\nwhile True: time.sleep(60)\n"
    runs = [start(*node(endpoint, rank, "--nproc-per-node", str(count)), script=script) for rank, count in ((0, 1), (1, 2))]
    ends = [run.wait() for run in runs]
    assert [end.code for end in ends] == [137, 137]
    for end in ends:
        assert "pipe-launch: stage 2 (rank 2, pid " in end.err
        assert end.err.count("SIGKILL") == 1


def test_restart_on_two_nodes(start, endpoint, tmp_path):
    script = SESSION + (
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '0':\n"
        "    session.start(1, os._exit, 7)\n"
        "    while True: time.sleep(60)\n"
        "print(attempt, session.world_size)\n"
    )
    runs = [start(*node(endpoint, rank, "--stages", "2", "--max-restarts", "1"), script=script) for rank in (0, 1)]
    assert [(end.code, end.out) for end in (run.wait() for run in runs)] == [(0, "1 2\n"), (0, "")]


def test_interrupt_on_one_node_ends_both(start, endpoint):
    script = SESSION + "print('running', flush=True)\nwhile True: time.sleep(60)\n"
    runs = [start(*node(endpoint, rank, "--stages", "2"), script=script) for rank in (0, 1)]
    runs[0].until("running")
    runs[1].signal(signal.SIGINT)
    first, second = (run.wait() for run in runs)
    assert (first.code, second.code) == (130, 130)
    assert "node 1 (" in first.err
    assert "was stopped by SIGINT" in first.err


def test_waiting_is_shown_and_ended_by_ctrl_c(start, endpoint):
    """CASES C95."""
    run = start(*node(endpoint, 0, "--stages", "2"))
    run.until("waiting for node 1 of 2 (0:00)")
    run.signal(signal.SIGINT)
    end = run.wait()
    assert (end.code, end.err) == (130, "waiting for node 1 of 2 (0:00)\n")


def test_node_that_does_not_come(launch, endpoint):
    run = launch(*node(endpoint, 1, "--rdzv-timeout", "0.5"))
    assert run.code == 2
    assert run.err.splitlines()[1:] == [
        f"pipe-launch: node 0 of 2 did not come within 0.5 s ({endpoint}: Connection refused); all meet at {endpoint}: "
        "start pipe-launch there with its --node-rank, check the address and the firewall, or raise --rdzv-timeout"
    ]


def test_hosts_that_do_not_fit_are_told_on_both(start, endpoint):
    runs = [start(*node(endpoint, 0, "--stages", "2")), start(*node(endpoint, 1), env={"PIPE_SECRET": "ab" * 32})]
    ends = [run.wait() for run in runs]
    assert [end.code for end in ends] == [2, 2]
    lines = [end.err.splitlines()[-1] for end in ends]
    assert lines[0] == lines[1]
    assert lines[0].endswith("differ; set the same on every host, or on none")


def test_own_secret_on_both_nodes(start, endpoint):
    runs = [start(*node(endpoint, rank, "--stages", "2"), script=SESSION, env={"PIPE_SECRET": "ab" * 32}) for rank in (0, 1)]
    assert [run.wait().code for run in runs] == [0, 0]


def test_busy_port(launch):
    """CASES C91."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = launch("--stages", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert run.code == 2
    assert run.err == (
        f"pipe-launch: port {port} on 127.0.0.1 cannot be listened on (Address already in use); "
        "node 0 needs a free one: give another in --rdzv-endpoint\n"
    )


def test_host_that_has_no_address(launch):
    run = launch(*node("no-such-host.invalid:29500", 1))
    assert run.code == 2
    assert run.err.startswith("pipe-launch: --rdzv-endpoint names host 'no-such-host.invalid', which has no IPv4 address here (")
    assert run.err.count("\n") == 1
