"""`pipe-launch`, also `python -m launch`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Ends at once: until workers run there is nothing to clean up, and an exception could be swallowed inside an import."""
    os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    from launch.foreign import in_the_way

    if line := in_the_way():
        print(f"pipe-launch: {line}", file=sys.stderr)
        sys.exit(2)
    from launch.cli import command

    command.main(prog_name="pipe-launch")


if __name__ == "__main__":
    main()
