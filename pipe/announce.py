"""What the engine says in a good run: its plan. One logger, heard on stderr also where the script configures none."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("pipe")


class _Stderr(logging.Handler):
    """To what sys.stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"pipe: {record.getMessage()}", file=sys.stderr, flush=True)


def be_heard() -> None:
    """What is announced reaches the user also where the script configures no logging."""
    if not logger.hasHandlers():
        logger.addHandler(_Stderr())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
