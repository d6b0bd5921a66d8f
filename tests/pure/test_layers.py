"""The rows of the map: a module imports only its own row and those above, the pure ones no torch, and nothing goes in a circle.

Reads the imports with `ast` and imports nothing. A new module needs a place in ROWS.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

ROWS = (
    "errors action",
    "announce chart schedules trace simulator clock report placement partition partition.balance",
    "follower partition.spec partition.sequence partition.ties partition.attributes partition.capture partition.exported"
    " partition.graph partition.measure partition.deferred",
    "aliases ambient batch_norm boundary bundle captured copying culprit loss memory merging micro_batch model opaque optimizer"
    " origin pickler rng side_stream silent strides weights wire",
    "signing members session transport links",
    "arguments assembly blueprint checkpoint clock_cuda crew cutting desk failing front loop options passes plan replicas scaling"
    " settings stage tied update worker",
    "controller engine fit logs saving verify",
)
PURE = ROWS[0].split() + ROWS[1].split()
TORCH_IN_TRANSPORT = ("pipe.transport.rpc", "pipe.transport.process_group")
PIPE_IN_LAUNCH = "launch.worker"


class Import(NamedTuple):
    by: str
    line: int
    module: str  # dotted, absolute
    names: tuple[str, ...]
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.by}, line {self.line}, imports {self.module}"


def modules(root: Path, package: str) -> Mapping[str, Path]:
    """Every module of a package by its dotted name, the package itself included."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, text: str) -> Iterator[Import]:
    tree = ast.parse(text)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, node.lineno, alias.name, (), id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(module, node.lineno, "." * node.level + (node.module or ""), names, id(node) in typing_only)


def targets(found: Import, known: Mapping[str, object]) -> set[str]:
    """The modules that an import reaches: `from pipe import wire` reaches pipe.wire."""
    inner = {f"{found.module}.{name}" for name in found.names} & set(known)
    return inner or {found.module}


def row(module: str) -> int | None:
    """The row of a module of pipe; that of its folder if only this stands there; the public face is below all. None: it has no place."""
    name = module.removeprefix("pipe").removeprefix(".")
    while name:
        for number, names in enumerate(ROWS):
            if name in names.split():
                return number
        name = name.rpartition(".")[0] if not name.startswith("partition.") else ""
    return len(ROWS) if module == "pipe" else None


def breaks(root: Path) -> list[str]:
    """Every import of pipe/ and launch/ that breaks a rule, with the rule."""
    pipe, launch = modules(root, "pipe"), modules(root, "launch")
    known = pipe | launch
    broken = [f"{m} has no place in ROWS of test_layers" for m in pipe if row(m) is None]
    for module, path in known.items():
        for found in imports(module, path.read_text(encoding="utf-8")):
            if found.module.startswith("."):
                broken.append(f"{found}: imports are absolute")
            broken += [f"{found}: {rule}" for target in targets(found, known) for rule in rules(module, target)]
    return broken


def rules(module: str, target: str) -> Iterator[str]:
    """The rules that one import breaks."""
    package, top = module.split(".")[0], target.split(".")[0]
    if package == "launch":
        if top == "pipe" and module != PIPE_IN_LAUNCH and (row(target) or 0) > 1:
            yield f"only {PIPE_IN_LAUNCH} knows more of pipe than its pure rows"
        return
    if top == "launch":
        yield "pipe does not know of launch"
    mine, its = row(module), row(target) if top == "pipe" and target != "pipe" else None
    if mine is not None and its is not None and its > mine:
        yield "a row imports only those above"
    if module.removeprefix("pipe.") in PURE or module.startswith("pipe.schedules."):
        if top not in sys.stdlib_module_names and top != "pipe":
            yield "a pure module needs Python and pipe only"
    elif module.startswith("pipe.transport") and top == "torch" and module not in TORCH_IN_TRANSPORT:
        yield f"of the transports only {TORCH_IN_TRANSPORT[0]} knows torch"


def test_every_import_keeps_to_the_rows() -> None:
    assert "\n".join(breaks(ROOT)) == ""


def test_nothing_goes_in_a_circle() -> None:
    known = modules(ROOT, "pipe") | modules(ROOT, "launch")
    graph = {
        module: {t for i in imports(module, path.read_text(encoding="utf-8")) if not i.typing_only for t in targets(i, known)}
        - {"pipe", "launch", module}
        for module, path in known.items()
    }
    assert set(TopologicalSorter(graph).static_order()) >= set(known) - {"pipe", "launch"}  # CycleError lists the circle


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"pipe/action.py": "import torch.nn"}, "a pure module needs Python and pipe only"),
        ({"pipe/schedules/new.py": "def f():\n    import numpy"}, "a pure module needs Python and pipe only"),
        ({"pipe/partition/balance.py": "from torch import nn"}, "a pure module needs Python and pipe only"),
        ({"pipe/partition/spec.py": "from torch import nn"}, None),
        ({"pipe/trace.py": "from pipe.engine import Engine", "pipe/engine.py": ""}, "a row imports only those above"),
        ({"pipe/trace.py": "from pipe import engine", "pipe/engine.py": ""}, "a row imports only those above"),
        ({"pipe/engine.py": "from pipe import trace", "pipe/trace.py": "import json"}, None),
        ({"pipe/engine.py": "from . import trace"}, "imports are absolute"),
        ({"pipe/engine.py": "import launch.cli"}, "pipe does not know of launch"),
        ({"pipe/helpers.py": ""}, "pipe.helpers has no place in ROWS"),
        ({"pipe/transport/mailbox.py": "import torch"}, "of the transports only pipe.transport.rpc knows torch"),
        ({"pipe/transport/rpc.py": "import torch"}, None),
        ({"launch/cli.py": "import pipe"}, "only launch.worker knows more of pipe than its pure rows"),
        ({"launch/cli.py": "from pipe.schedules import NAMES", "pipe/schedules/__init__.py": ""}, None),
        ({"launch/rendezvous.py": "import pipe.session"}, "only launch.worker knows more of pipe"),
        ({"launch/worker.py": "import pipe.session", "launch/rendezvous.py": "import torch"}, None),
        ({"pipe/__init__.py": "from pipe.engine import Engine", "pipe/engine.py": ""}, None),
    ],
)
def test_the_rules_bite(tmp_path: Path, files: Mapping[str, str], says: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = breaks(tmp_path)
    assert len(found) == (says is not None)
    assert all(str(says) in line for line in found)
