"""docs/limits.md quotes messages; each quotation is found in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def literals(path: Path) -> Iterator[str]:
    """Every string of a module; of an f-string the parts between its fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quotations() -> list[str]:
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "| says |" not in line and "---" not in line]
    later = TEXT.split("## Not in this version")[1].split("## Not noticed")[0].split("checkpoints in `fit`: ")[1]
    return [re.findall("`([^`]+)`", row[1])[0] for row in rows] + re.findall("`([^`]+)`", later)


@pytest.mark.parametrize("quoted", quotations())
def test_every_message_is_in_the_code(quoted: str) -> None:
    assert any(quoted in text for path in (ROOT / "pipe").rglob("*.py") for text in literals(path))


def test_there_are_quotations() -> None:
    assert len(quotations()) > 25
