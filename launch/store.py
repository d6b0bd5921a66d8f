"""The store through which launchers and workers meet: TCPStore, listening where we say, and interruptible."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from launch.errors import UsageError

_LOOK = 0.1  # seconds between two chances for a signal
_TIMEOUT = timedelta(seconds=30)

T = TypeVar("T")


def serve(address: str, port: int) -> tuple[Store, int]:
    """A store on a socket that we bind, since TCPStore by itself listens on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that has just ended is free
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} on {address} cannot be listened on ({error.strerror}); node 0 needs a free one: give another in --rdzv-endpoint"
        ) from None
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, port


def reach(address: str, port: int) -> Store:
    """The store that another host serves."""
    return interruptible(lambda: TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT))


def interruptible(function: Callable[[], T]) -> T:
    """The function's result, computed in a thread: a signal is handled while it blocks in C."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="interruptible", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
    if errors:
        raise errors[0]
    return results[0]
