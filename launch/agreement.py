"""Whether the hosts of a job fit together, decided by node 0 from what each says of itself."""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from launch.errors import UsageError

SECRET_BYTES = 32


def package_version() -> str:
    try:
        return version("pipe-launch")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a host says of itself."""

    node: int
    nodes: int
    workers: int | None = None  # --nproc-per-node
    secret: str | None = None  # a hash of the user's PIPE_SECRET
    host: str = field(default_factory=socket.gethostname)
    python: str = field(default_factory=lambda: ".".join(platform.python_version_tuple()[:2]))  # minor
    torch: str = field(default_factory=lambda: version("torch").split("+")[0])  # without the build: 2.9.0+cpu and 2.9.0+cu128 fit
    pipe: str = field(default_factory=package_version)
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # tells two launchers with one --node-rank apart

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Hello:
        return cls(**json.loads(text))


def disagreement(hellos: Sequence[Hello]) -> str | None:
    """The line that says why these hosts cannot work together, or None. The first is node 0."""
    first = hellos[0]
    for other in hellos[1:]:
        ours = (("Python", first.python), ("torch", first.torch), ("pipe-launch", first.pipe))
        theirs = (other.python, other.torch, other.pipe)
        differing = [(name, a, b) for (name, a), b in zip(ours, theirs, strict=True) if a != b]
        if differing:
            mine = ", ".join(f"{name} {a}" for name, a, _ in differing)
            its = ", ".join(f"{name} {b}" for name, _, b in differing)
            return f"{first} has {mine}, {other} has {its}; every host needs the same: install one of them on both"
        if other.nodes != first.nodes:
            return f"{first} has --nnodes {first.nodes}, {other} has --nnodes {other.nodes}; give the same on every host"
        if other.secret != first.secret:
            return f"PIPE_SECRET of {first} and of {other} differ; set the same on every host, or on none"
    return None


def user_secret(env: Mapping[str, str]) -> str | None:
    """The user's own secret, hexadecimal; None: not set.

    Raises:
        UsageError: it is no secret.
    """
    text = env.get("PIPE_SECRET", "").strip()
    if not text:
        return None
    try:
        long_enough = len(bytes.fromhex(text)) >= SECRET_BYTES
    except ValueError:
        long_enough = False
    if not long_enough:
        raise UsageError(
            f"PIPE_SECRET has {len(text)} characters; it is at least {2 * SECRET_BYTES} hexadecimal digits: openssl rand -hex 32"
        )
    return text


def fingerprint(secret: str | None) -> str | None:
    """What may be shown of a secret, to see whether two are one."""
    return None if secret is None else hashlib.sha256(b"pipe-launch" + bytes.fromhex(secret)).hexdigest()
