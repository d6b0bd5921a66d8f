"""Where the launchers of a job meet: a store that node 0 serves.

One host: on a free port of the loopback, chosen by the socket that listens. Several hosts, static ranks:

    node 0                                   node n
    serve on the endpoint's address only     connect, again and again            "waiting for node 0 of 2 (0:05)"
    wait for every hello/n    <------------  hello/n: versions, workers          "waiting for node 1 of 2 (0:05)"
    verdict: command, shares, secret  ---->  take it, or end with its error
    wait for every seen/n     <------------  seen/n

The secret goes to the other hosts through this store, unprotected: whoever can read the network while a job starts can join
it. Who does not trust the network sets PIPE_SECRET on every host; then it never travels.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from launch.agreement import SECRET_BYTES, Hello, disagreement, fingerprint, user_secret
from launch.errors import UsageError
from launch.network import LOOPBACK, LOOPBACK_INTERFACE, Link, choose_link, resolve
from launch.spec import Command, JobSpec, shares
from launch.store import interruptible, reach, serve
from launch.waiting import Waiting

_POLL = 0.1  # seconds
_SEEN_WITHIN = 10.0  # seconds for the other hosts to take the verdict


@dataclass(frozen=True)
class Meeting:
    """What the hosts of a job have agreed on."""

    store: Store
    address: str  # of node 0's store
    port: int
    link: Link  # of this host
    command: Command
    workers: tuple[int, ...]  # of each host
    secret: str  # hexadecimal


class Static(RendezvousHandler):
    """Torch elastic's view of a meeting: the hosts and their ranks are known, and stay.

    The workers' env:// uses the launchers' store. After a restart it would hold what the workers before have left, so each later attempt
    has a store of its own, whose port node 0 tells.
    """

    use_agent_store = True  # type: ignore[assignment]

    def __init__(self, meeting: Meeting, node: int) -> None:
        self._meeting = meeting
        self._node = node
        self._attempts = 0
        self._store, self._port = meeting.store, meeting.port

    def get_backend(self) -> str:
        return "pipe"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._attempts > 0:
            self._renew(f"port/{self._attempts}")
        self._attempts += 1
        info = RendezvousStoreInfo(self._meeting.address, self._port)
        return RendezvousInfo(PrefixStore("launchers", self._store), self._node, len(self._meeting.workers), info)

    def _renew(self, key: str) -> None:
        if self._node == 0:
            self._store, self._port = serve(self._meeting.address, 0)
            self._meeting.store.set(key, str(self._port))
        else:
            self._port = int(self._meeting.store.get(key))
            self._store = reach(self._meeting.address, self._port)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # nobody joins late

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "pipe"

    def shutdown(self) -> bool:
        return True


def meet(job: JobSpec, env: Mapping[str, str]) -> Meeting:
    """Brings the launchers of a job together; returns on each when all have come and fit.

    Raises:
        UsageError: the address or interface is wrong or in use, a host did not come in time, or two hosts do not fit.
    """
    own = user_secret(env)
    if job.endpoint is None:
        store, port = serve(LOOPBACK, 0)
        link = Link(LOOPBACK_INTERFACE, LOOPBACK)
        return Meeting(store, LOOPBACK, port, link, job.command, shares(job.command, [job.here]), own or _new_secret())
    address = interruptible(lambda: resolve(job.endpoint.host))  # type: ignore[union-attr]
    link = choose_link(job.endpoint, address, job.interface, listens=job.node == 0, nodes=job.nodes)
    hello = Hello(node=job.node, nodes=job.nodes, workers=job.here, secret=fingerprint(own))
    waiting = Waiting(sys.stderr, job.nodes)
    try:
        if job.node == 0:
            store, port = serve(link.address, job.endpoint.port)
            workers, secret = _decide(store, job, hello, own, waiting)
            return Meeting(store, link.address, port, link, job.command, workers, secret)
        store = _connect(address, job, waiting)
        return _follow(store, job, hello, Meeting(store, address, job.endpoint.port, link, job.command, (), own or ""), waiting)
    except RuntimeError as error:  # of the store; the first line says what
        raise UsageError(
            f"{job.endpoint} ended the rendezvous ({str(error).splitlines()[0]}): is it node 0's launcher, and running?"
        ) from None
    finally:
        waiting.done()


def _connect(address: str, job: JobSpec, waiting: Waiting) -> Store:
    """Node 0's store, once it answers."""
    endpoint = job.endpoint
    assert endpoint is not None
    while True:
        waiting.show([0])
        try:
            socket.create_connection((address, endpoint.port), timeout=1.0).close()
            break
        except OSError as error:
            if waiting.seconds > job.patience:
                raise UsageError(_late([0], job, f" ({endpoint}: {error.strerror or error})")) from None
        time.sleep(_POLL)
    return reach(address, endpoint.port)


def _decide(store: Store, job: JobSpec, hello: Hello, own: str | None, waiting: Waiting) -> tuple[tuple[int, ...], str]:
    """Node 0: waits for all, and tells them what holds, or why it cannot be."""
    others = range(1, job.nodes)
    while missing := _missing(store, "hello", others):
        waiting.show(missing)
        if waiting.seconds > job.patience:
            raise UsageError(_late(missing, job))
        time.sleep(_POLL)
    hellos = [hello, *(Hello.from_json(store.get(f"hello/{n}")) for n in others)]
    secret = own or _new_secret()
    verdict: dict[str, Any] = {"tokens": [h.token for h in hellos], "error": disagreement(hellos)}
    try:
        workers = shares(job.command, [h.workers for h in hellos])
        verdict |= {"command": job.command.to_json(), "workers": workers, "secret": None if own else secret}
    except UsageError as error:
        workers = ()
        verdict["error"] = verdict["error"] or str(error)
    store.set("verdict", json.dumps(verdict))
    absent = _await_seen(store, others)
    if verdict["error"]:
        raise UsageError(verdict["error"])
    if absent:
        raise UsageError(f"node {absent[0]} came and left again; a job needs all {job.nodes} hosts: start it on each again")
    return workers, secret


def _follow(store: Store, job: JobSpec, hello: Hello, meeting: Meeting, waiting: Waiting) -> Meeting:
    """The other nodes: say who they are and take what node 0 tells."""
    store.set(f"hello/{job.node}", hello.to_json())
    while not store.check(["verdict"]):
        waiting.show(_missing(store, "hello", range(1, job.nodes)) or [0])
        if waiting.seconds > job.patience:
            raise UsageError(_late(_missing(store, "hello", range(1, job.nodes)), job))
        time.sleep(_POLL)
    verdict = json.loads(store.get("verdict"))
    if verdict["tokens"][job.node : job.node + 1] != [hello.token]:
        raise UsageError(f"--node-rank {job.node} is taken by another launcher; it is another on each host: give one of its own")
    store.set(f"seen/{job.node}", "")
    if verdict["error"]:
        raise UsageError(verdict["error"])
    secret = verdict["secret"] or meeting.secret
    return replace(meeting, command=Command.from_json(verdict["command"]), workers=tuple(verdict["workers"]), secret=secret)


def _missing(store: Store, what: str, nodes: range) -> list[int]:
    return [n for n in nodes if not store.check([f"{what}/{n}"])]


def _await_seen(store: Store, nodes: range) -> list[int]:
    end = time.monotonic() + _SEEN_WITHIN
    while (absent := _missing(store, "seen", nodes)) and time.monotonic() < end:
        time.sleep(_POLL / 2)
    return absent


def _late(missing: list[int], job: JobSpec, detail: str = "") -> str:
    names = ", ".join(map(str, missing))
    return (
        f"node {names} of {job.nodes} did not come within {job.patience:g} s{detail}; all meet at {job.endpoint}: "
        f"start pipe-launch there with its --node-rank, check the address and the firewall, or raise --rdzv-timeout"
    )


def _new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def announce(meeting: Meeting, node: int) -> str:
    """The line that says what this host uses."""
    link = meeting.link
    first = sum(meeting.workers[:node])
    return (
        f"node {node} of {len(meeting.workers)}: host {socket.gethostname()}, ranks {first}-{first + meeting.workers[node] - 1} "
        f"of {sum(meeting.workers)}; TP_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are {link.interface} ({link.address})"
    )
