"""Whether `pipe` and `launch` are this project's packages; PyPI has another `pipe`, and any folder may hold a launch.py.

Imports nothing of the project, since that is what may be hidden.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of both packages
NAMES = ("pipe", "launch")


def in_the_way(folders: Iterable[str] = ()) -> str | None:
    """The line that says which file hides a package of ours, or None.

    Args:
        folders: that a worker will have before everything else on `sys.path`: the script's.
    """
    for name in NAMES:
        found = [importlib.util.find_spec(name), *(PathFinder.find_spec(name, [folder]) for folder in folders)]
        for spec in found:
            # A folder without __init__.py has no origin, and a package of ours anywhere on the path wins over it.
            if spec is not None and spec.origin and Path(spec.origin).resolve().parent != ROOT / name:
                return f"{spec.origin} hides pipe-launch's own package '{name}': rename or move that file, or uninstall its package"
    return None
