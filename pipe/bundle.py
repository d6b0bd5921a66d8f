"""What the forward of one stage gives another: a message for each value that crosses between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipe.wire import Message, Ready


@dataclass(frozen=True)
class Bundle:
    """Messages in the order of the plan's routes; a value that several stages take is packed once, and in the bundle of each."""

    messages: tuple[Message, ...] = ()
    drawn: Mapping[str, int] = field(default_factory=dict)  # of modules that several stages call: how often they have drawn; see rng.py

    @property
    def nbytes(self) -> int:
        """Bytes that a transport moves for it, without its own overhead."""
        return sum(message.nbytes for message in self.messages)

    @property
    def ready(self) -> Ready | None:
        """What to wait for before the tensors hold their values."""
        waiting = [message.ready for message in self.messages if message.ready is not None]
        return Ready(waiting) if waiting else None
