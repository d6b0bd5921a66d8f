"""The command line: what is refused, in one line; what an accepted one means; and what `--dry-run` shows. No process is started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from launch.agreement import Hello, disagreement, user_secret
from launch.cli import command
from launch.errors import UsageError
from launch.foreign import in_the_way
from launch.network import Endpoint, choose_link, own_addresses
from launch.report import Ended, first, outcome
from launch.spec import Command, expand, settle, shares
from launch.waiting import Waiting


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


HOSTS = "--nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500"
REFUSED = [
    ("", "no SCRIPT given; it is the training script to run: pipe-launch --stages 2 train.py"),
    ("nowhere.py", "script 'nowhere.py' is not found; SCRIPT is a Python file, looked for from {folder}: check the path"),
    (".", "script '.' is a folder; SCRIPT is a Python file, looked for from {folder}: check the path"),
    ("-m nowhere", "module 'nowhere' is not found; -m takes a module on Python's path or in {folder}: check its name"),
    ("--stages 0 train.py", "--stages is 0; it is at least 1"),
    ("--replicas -1 train.py", "--replicas is -1; it is at least 1"),
    ("--micro-batches 0 train.py", "--micro-batches is 0; it is at least 1"),
    ("--nproc-per-node 0 train.py", "--nproc-per-node is 0; it is at least 1"),
    ("--stages two train.py", "Invalid value for '--stages': 'two' is not a valid integer. See pipe-launch --help."),
    ("--max-restarts -1 train.py", "--max-restarts is -1; it is at least 0"),
    ("--timeout -1 train.py", "--timeout is -1; it is seconds, or 0 for no limit"),
    ("--verify -1 train.py", "--verify is -1; it is a number of steps, or 0 for none"),
    ("--rdzv-timeout 0 train.py", "--rdzv-timeout is 0; it is seconds, above 0"),
    ("--strategy best train.py", "--strategy is 'best'; it is one of auto, single, naive, pipeline, ddp, hybrid: choose one"),
    ("--device gpu train.py", "--device is 'gpu'; it is one of auto, cpu, cuda: choose one"),
    ("--rdzv-endpoint foo train.py", "--rdzv-endpoint is 'foo'; it is HOST:PORT, for example 10.0.0.1:29500"),
    (
        "--rdzv-endpoint host:99999 train.py",
        "--rdzv-endpoint is 'host:99999', whose port is 99999; a port is 1 to 65535: it is HOST:PORT, for example 10.0.0.1:29500",
    ),
    ("--nnodes 0 train.py", "--nnodes is 0; a job has at least one host"),
    ("--nnodes 2 train.py", "--nnodes is 2 without --node-rank; each host has its own, 0 to 1: give it"),
    ("--nnodes 2 --node-rank 2 train.py", "--node-rank is 2; with --nnodes 2 it is 0 to 1, another on each host"),
    ("--nnodes 2 --node-rank 0 train.py", "--nnodes is 2 without --rdzv-endpoint; give HOST:PORT of node 0, the same on every host"),
    (
        f"--stages 3 {HOSTS} train.py",
        "3 stages x 1 replicas make 3 workers, which 2 hosts cannot share equally: give --nproc-per-node on each host",
    ),
    ("--stages 3 --nproc-per-node 2 train.py", "--nproc-per-node makes 2 = 2 workers, but 3 stages x 1 replicas need 3: change one"),
    ("--nproc-per-node 3 --replicas 2 train.py", "3 workers cannot be shared by 2 replicas: change --nproc-per-node or --replicas"),
]


@pytest.mark.parametrize(("line", "text"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused_in_one_line(folder, line, text):
    result = CliRunner().invoke(command, line.split())
    assert result.exit_code == 2
    assert result.stderr == f"pipe-launch: {text.format(folder=folder)}\n"
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_gpu_that_is_not_there_is_said_at_the_door(folder):
    result = CliRunner().invoke(command, ["--device", "cuda", "train.py"])
    assert (result.exit_code, result.stderr) == (
        2,
        "pipe-launch: --device is 'cuda' and this host has no visible GPU; use --device cpu, or auto to take GPUs where there are any\n",
    )


def test_a_wrong_number_of_threads_is_said_at_the_door(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    result = CliRunner().invoke(command, ["train.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("pipe-launch: OMP_NUM_THREADS is 'abc'; it is a number of threads")


@pytest.mark.parametrize(("options", "text"), [("1f2b", "'1f2b' is unknown"), ("zbv", "'zbv' is not available in this version")])
def test_schedule_is_refused_with_those_that_are(folder, options, text):
    result = CliRunner().invoke(command, ["--schedule", options, "train.py"])
    assert result.exit_code == 2
    assert text in result.stderr
    assert "1f1b" in result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--stages", "0", "train.py"], ["--dry-run", "--stages", "2", "train.py"]])
def test_answers_without_loading_torch(folder, arguments):
    code = "import sys\nfrom launch.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines()[-1] == "False"


def test_dry_run_shows_every_worker(folder):
    result = CliRunner().invoke(command, ["--dry-run", "--stages", "2", "--replicas", "2", "--timeout", "0", "train.py", "--lr", "1"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split("/")[0].split() for line in lines[:5]] == [
        ["rank", "node", "local", "place", "command"],
        ["0", "0", "0", "stage", "0", "of", "replica", "0"],
        ["1", "0", "1", "stage", "1", "of", "replica", "0"],
        ["2", "0", "2", "stage", "0", "of", "replica", "1"],
        ["3", "0", "3", "stage", "1", "of", "replica", "1"],
    ]
    job = json.loads(next(line for line in lines if "PIPE_JOB=" in line).split("=", 1)[1])
    assert job == {
        "script": str(folder / "train.py"),
        "argv": ["--lr", "1"],
        "module": False,
        "options": {"stages": 2, "replicas": 2, "timeout": 0.0},
        "max_restarts": 0,
    }


def test_workers_of_hosts():
    assert shares(Command(script="s", options={"stages": 4}), [None, None]) == (2, 2)
    assert shares(Command(script="s", options={"stages": 4}), [1, 3]) == (1, 3)
    free = Command(script="s", options={"replicas": 2})
    assert shares(free, [1, 3]) == (1, 3)
    assert settle(free, (1, 3)).options == {"replicas": 2, "stages": 2}
    with pytest.raises(UsageError, match="missing on node 1"):
        shares(free, [1, None])
    with pytest.raises(UsageError, match=r"makes 1 \+ 2 = 3 workers, but 4 stages x 1 replicas need 4"):
        shares(Command(script="s", options={"stages": 4}), [1, 2])


def test_threads_are_divided_among_the_workers_of_a_host_unless_set():
    job = Command(script="s", options={"stages": 3})
    env = {"interface": "lo", "cores": 8, "secret": ""}
    assert [run.env["OMP_NUM_THREADS"] for run in expand(job, (1, 2), {}, **env)] == ["8", "4", "4"]
    assert expand(job, (3,), {"OMP_NUM_THREADS": "5"}, **env)[0].env["OMP_NUM_THREADS"] == "5"
    assert expand(job, (3,), {"MALLOC_ARENA_MAX": "4"}, **env)[0].env["MALLOC_ARENA_MAX"] == "4"


def test_command_travels_as_json():
    job = Command(script="/a/s.py", argv=("--x", "1"), options={"stages": 2, "logdir": "d"}, max_restarts=1)
    assert Command.from_json(job.to_json()) == job


def hello(**changed):
    return Hello(**{"node": 0, "nodes": 2, "host": "a", "python": "3.11", "torch": "2.9.0", "pipe": "0.1.0", **changed})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, None),
        (
            {"python": "3.12"},
            "node 0 (a) has Python 3.11, node 1 (b) has Python 3.12; every host needs the same: install one of them on both",
        ),
        (
            {"torch": "2.10.0", "pipe": "0.2.0"},
            "node 0 (a) has torch 2.9.0, pipe-launch 0.1.0, node 1 (b) has torch 2.10.0, pipe-launch 0.2.0; "
            "every host needs the same: install one of them on both",
        ),
        ({"nodes": 3}, "node 0 (a) has --nnodes 2, node 1 (b) has --nnodes 3; give the same on every host"),
        ({"secret": "x"}, "PIPE_SECRET of node 0 (a) and of node 1 (b) differ; set the same on every host, or on none"),
    ],
)
def test_disagreement_names_both_sides(changed, line):
    assert disagreement([hello(), hello(node=1, host="b", **changed)]) == line


def test_hello_travels_as_json():
    mine = Hello(node=1, nodes=2)
    assert Hello.from_json(mine.to_json()) == mine


@pytest.mark.parametrize("text", ["word", "ab" * 31, "ab" * 31 + "x"])
def test_secret_that_is_none(text):
    with pytest.raises(UsageError, match=f"PIPE_SECRET has {len(text)} characters; it is at least 64 hexadecimal digits"):
        user_secret({"PIPE_SECRET": text})


def test_interface_of_a_job():
    assert own_addresses()["127.0.0.1"] == "lo"
    near, far = Endpoint("localhost", 29500), Endpoint("node0", 29500)
    link = choose_link(near, "127.0.0.1", None, listens=True, nodes=2)
    assert (link.interface, link.address) == ("lo", "127.0.0.1")
    with pytest.raises(UsageError, match=r"lo \(127.0.1.1\), the loopback, which no other host reaches \('node0' is 127.0.1.1 here"):
        choose_link(far, "127.0.1.1", None, listens=True, nodes=2)  # CASES C92: Debian's /etc/hosts
    with pytest.raises(UsageError, match=r"--interface is 'no0', which has no IPv4 address on this host: choose among .*lo 127.0.0.1"):
        choose_link(far, "10.0.0.1", "no0", listens=False, nodes=2)
    with pytest.raises(UsageError, match=r"192.0.2.1 of --rdzv-endpoint is no address of this host, and node 0 listens there"):
        choose_link(far, "192.0.2.1", None, listens=True, nodes=2)


@pytest.mark.parametrize("name", ["pipe.py", "launch.py", "pipe/__init__.py"])
def test_package_of_the_same_name_in_the_scripts_folder(folder, name):
    """PyPI has another `pipe`; and a user's launch.py is likely."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    result = CliRunner().invoke(command, ["--stages", "2", str(folder / "train.py")])
    package = name.split(".")[0].split("/")[0]
    assert result.exit_code == 2
    assert result.stderr == (
        f"pipe-launch: {folder / name} hides pipe-launch's own package '{package}': rename or move that file, or uninstall its package\n"
    )


def test_folder_without_code_hides_nothing(folder):
    (folder / "pipe").mkdir()
    assert in_the_way([str(folder)]) is None


def test_package_of_the_same_name_before_ours_on_the_path(folder):
    (folder / "pipe.py").write_text("raise SystemExit('not ours')")
    run = subprocess.run([sys.executable, "-m", "launch", "--version"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"pipe-launch: {folder / 'pipe.py'} hides pipe-launch's own package 'pipe'")


def test_first_failure_is_the_one_the_others_follow_from():
    """Of those found at one look: not the workers that elastic ended, and not rank 0 whose peer was gone."""
    assert first({0: Ended(0, 10, -15), 1: Ended(1, 11, -9)}).rank == 1
    assert first({0: Ended(0, 10, 1), 1: Ended(1, 11, -9)}).rank == 1
    assert first({0: Ended(0, 10, 3), 1: Ended(1, 11, 1)}).rank == 0
    assert first({0: Ended(0, 10, 1), 1: Ended(1, 11, -15)}).rank == 0


@pytest.mark.parametrize(
    ("ended", "code", "line"),
    [
        (Ended(1, 123, -11), 139, "stage 1 (rank 1, pid 123) on host X was killed by SIGSEGV - a crash in native code"),
        (Ended(1, 123, -34), 162, "stage 1 (rank 1, pid 123) on host X was killed by "),
        (Ended(1, 123, 7), 7, "stage 1 (rank 1, pid 123) on host X ended by itself with exit code 7"),
        (Ended(0, 123, 4), 4, ""),
    ],
)
def test_line_for_a_failure(ended, code, line):
    found = outcome(ended, "stage 1", "X")
    assert found.code == code
    assert found.line.startswith(line)
    assert bool(found.line) == bool(line)


class Terminal:
    def __init__(self, terminal):
        self.text, self.isatty = "", lambda: terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("terminal", "text"),
    [
        (False, "waiting for nodes 1, 2 of 4 (0:00)\nwaiting for nodes 1, 2 of 4 (0:05)\nwaiting for nodes 1, 2 of 4 (1:05)\n"),
        (True, "".join(f"\r\033[Kwaiting for nodes 1, 2 of 4 ({shown})" for shown in ("0:00", "0:01", "0:05", "1:05")) + "\n"),
    ],
)
def test_waiting_line_counts(terminal, text):
    stream, now = Terminal(terminal), [100.0]
    waiting = Waiting(stream, 4, now=lambda: now[0])
    for seconds in (0.0, 0.5, 1.0, 5.0, 65.0):
        now[0] = 100.0 + seconds
        waiting.show([1, 2])
    waiting.done()
    assert stream.text == text
