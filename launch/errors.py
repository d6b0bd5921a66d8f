"""What the launcher refuses. Apart from `pipe.errors`, so that a usage error needs no other package of ours."""

from __future__ import annotations


class UsageError(Exception):
    """What was typed cannot be done; one line with the value, the rule and the remedy. Exit code 2."""
