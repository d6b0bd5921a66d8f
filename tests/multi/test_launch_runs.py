"""What a script and its workers see when they run."""

from __future__ import annotations

import json
import subprocess

import pytest

SESSION = "import json, os, sys, time\nimport pipe.session\nsession = pipe.session.current()\nsession.used = True\n"


def test_script_is_main_with_its_own_arguments_and_folder(launch, tmp_path):
    script = SESSION + "print(json.dumps([__name__, __file__, sys.path[0], sys.argv[1:], dict(session.options), session.world_size]))\n"
    run = launch("--replicas", "2", "--micro-batches", "4", "--share-gpus", script=script, arguments=["--stages", "9", "--", "x y"])
    assert run.code == 0
    options = {"replicas": 2, "micro_batches": 4, "share_gpus": True}
    assert json.loads(run.out) == ["__main__", str(tmp_path / "script.py"), str(tmp_path), ["--stages", "9", "--", "x y"], options, 2]


def test_main_is_still_the_script_when_python_ends(launch):
    script = SESSION + "import atexit\nvalue = 7\natexit.register(lambda: print(sys.modules['__main__'].value, value))\n"
    run = launch(script=script)
    assert (run.code, run.out, run.err) == (0, "7 7\n", "")


def test_module(launch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text("name = 'other'\n")
    (tmp_path / "package" / "__main__.py").write_text("import sys\nfrom .other import name\nprint(name, __name__, sys.argv[1:])\n")
    run = launch("-m", target="package", arguments=["--flag"])
    assert (run.code, run.out, run.err) == (0, "other __main__ ['--flag']\n", "")


def test_other_ranks_lines_have_their_rank_and_stream(launch):
    script = SESSION + (
        "session.start(1, print, 'one\\ntwo').wait()\n"
        "session.start(1, os.write, 2, b'problem\\nunfinished').wait()\n"
        "print('mine')\n"
        "time.sleep(0.5)\n"  # a thread of the other process prints
    )
    run = launch("--stages", "2", script=script)
    assert run.code == 0
    assert sorted(run.out.splitlines()) == ["[rank 1] one", "[rank 1] two", "mine"]
    assert run.err == "[rank 1] problem\n[rank 1] unfinished\n"


def test_environment_of_the_workers(launch):
    script = SESSION + (
        "names = ['TP_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME', 'OMP_NUM_THREADS', 'MINE', 'PIPE_SECRET']\n"
        "print(json.dumps({name: os.environ.get(name) for name in names}))\n"
    )
    run = launch("--stages", "2", script=script, env={"MINE": "1", "OMP_NUM_THREADS": "3"})
    expected = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "3", "MINE": "1", "PIPE_SECRET": None}
    assert json.loads(run.out) == expected


LISTENERS = """
def inodes(pid):
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return {link[8:-1] for link in links if link.startswith("socket:[")}

mine = set().union(*(inodes(pid) for pid in [os.getppid(), *(m.pid for m in session.members)]))
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
print(json.dumps([row[1] for row in rows if row[3] == "0A" and row[9] in mine]))
"""


def test_one_host_listens_only_on_the_loopback(launch):
    """CASES C92: and so asks no name server."""
    run = launch("--stages", "2", script=SESSION + LISTENERS)
    listeners = json.loads(run.out)
    assert listeners  # the store's, at least
    assert {address.split(":")[0] for address in listeners} == {"0100007F"}


def test_two_launchers_at_once_never_meet(start):
    script = (
        SESSION
        + "print(session.world_size, sys.argv[1], flush=True)\nopen(sys.argv[1], 'w')\nother = sys.argv[2]\n"
        + (
            "while not os.path.exists(other): time.sleep(0.05)\n"  # both run at the same time
        )
    )
    runs = [start("--stages", "2", script=script, arguments=names) for names in (["a", "b"], ["b", "a"])]
    ends = [run.wait() for run in runs]
    assert [(end.code, end.out, end.err) for end in ends] == [(0, "2 a\n", ""), (0, "2 b\n", "")]


@pytest.mark.netns
def test_host_name_that_does_not_resolve(launch, tmp_path):
    """CASES C92, in an own UTS namespace; skipped where none can be made."""
    prefix = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no UTS namespace can be made here: it needs root and unshare")
    run = launch("--stages", "2", script=SESSION + "print(session.members[1].host)\n", prefix=prefix)
    assert (run.code, run.out) == (0, "no-such-host.invalid\n")
