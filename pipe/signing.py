"""Signs every Python message over RPC with the job's secret, so that a stranger's is refused before it is unpickled.

Unpickling runs whatever the sender likes, and torch's RPC unpickles all that reaches its port. What is signed is the pickled part;
the bytes of tensors travel beside it and cannot run anything. An honest message can be sent again by who overhears it: that, and
reading along, is for the network to prevent.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from torch.distributed.rpc import api, internal

from pipe.errors import PipeError

_DIGEST = hashlib.sha256().digest_size


def sign(secret: bytes, text: bytes) -> bytes:
    """The text led by its HMAC-SHA256."""
    return hmac.digest(secret, text, "sha256") + text


def verified(secret: bytes, signed: bytes) -> bytes:
    """The text that `sign` signed.

    Raises:
        PipeError: it is not signed, or with another secret.
    """
    text = signed[_DIGEST:]
    if not hmac.compare_digest(signed[:_DIGEST], hmac.digest(secret, text, "sha256")):
        raise PipeError("refused a message without this job's signature; start every worker of a job with the same secret")
    return text


class _SignedPickler(internal._InternalRPCPickler):
    """Torch's RPC pickler, with a signature before each pickle."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._secret = secret

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        pickled, tensors = super().serialize(obj)  # type: ignore[no-untyped-call]
        return sign(self._secret, pickled), tensors

    def deserialize(self, signed: bytes, tensors: list[Any]) -> Any:
        return super().deserialize(verified(self._secret, signed), tensors)  # type: ignore[no-untyped-call]


def install(secret: bytes) -> None:
    """From here on this process signs what it sends over RPC and refuses what is not signed; called before `init_rpc`.

    Source: `internal` pickles answers and reads everything, `api` pickles calls; each holds a reference of its own.
    """
    internal._internal_rpc_pickler = api._default_pickler = _SignedPickler(secret)
