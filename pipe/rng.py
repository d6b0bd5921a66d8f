"""Random streams keyed by what is computed, so that dropout depends neither on the cut nor on threads.

Every draw gets a generator of its own, seeded with

    (seed, number of the forward_backward call, micro-batch over all replicas, innermost module path, number of the draw there)

by a TorchDispatchMode; the process-wide generator keeps its state. Nothing is installed on a module: `watch` only notes its
path, and at a draw the innermost module is read off the Python stack, so an exception leaves nothing behind and a pickle
holds nothing of it.

torch.utils.checkpoint saves `torch.get_rng_state()` before a region and sets it again to recompute. While streams are active these
two mean the position of the thread's streams [1], so a region draws the same numbers again if the backward runs in the same Streams.

Not covered: numpy, the random module, and LSTM and the like with dropout on CUDA, whose numbers are cuDNN's.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pipe.silent import draws

__all__ = ["Streams", "draws", "watch"]

_numbers = itertools.count(1)
_CALL = nn.Module.__call__.__code__
_paths: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def watch(module: nn.Module, prefix: str = "") -> None:
    """Notes the paths of the module and of those in it, under the unsplit model's name of it (no dot at the end).

    One module may be watched under several names; a draw then counts where the path around it leads (`Streams.at`).
    """
    for name, each in module.named_modules(remove_duplicate=False):
        path = getattr(each, "draws_as", ".".join(part for part in (prefix, name) if part))
        known = _paths.get(each, ())
        if path and path not in known:  # the root itself is what `Streams.at` says
            _paths[each] = (*known, path)


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The random streams of one micro-batch in one stage; a context for its forward, and the same object for its backward.

    Args:
        seed: the base of all streams.
        call: the number of the forward_backward call.
        micro_batch: its number over all replicas.
        drawn: of modules that stages before this one call, too: how often they have drawn for this micro-batch.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, call: int, micro_batch: int, drawn: Mapping[str, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = f"{seed}|{call}|{micro_batch}"
        self._base = ""  # the path where no watched module is on the stack
        self._drawn: dict[str, int] = {path: count - 1 for path, count in (drawn or {}).items()}
        self._number = next(_numbers)
        self._saved: list[tuple[str, dict[str, int]]] = []
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Draws outside of every watched module count as those of `path`, and a module with several paths is the one there."""
        before, self._base = self._base, path
        try:
            yield
        finally:
            self._base = before

    def __enter__(self) -> Streams:
        _process.enter(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _process.leave(self, error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _drawing:
            _drawing[func] = _how(func)
        how = _drawing[func]
        return func(*args, **kwargs) if how is None else how(self, func, args, kwargs)

    def drawn(self, modules: Collection[str]) -> dict[str, int]:
        """How often these modules, and those in them, have drawn."""
        inside = tuple(f"{path}." for path in modules)
        return {path: last + 1 for path, last in self._drawn.items() if path in modules or path.startswith(inside)} if modules else {}

    def next_generator(self, device: torch.device) -> torch.Generator:
        """The generator of the next draw; valid until the one after it."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(self.next_seed())

    def next_seed(self) -> int:
        """The seed of the next draw at the innermost module, 63 bits."""
        path = _innermost(sys._getframe(1), self._base)
        number = self._drawn[path] = self._drawn.get(path, -1) + 1
        digest = hashlib.blake2b(f"{self._key}|{path}|{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def save(self) -> Tensor:
        """The position as what stands for a generator's state; holds for this object only."""
        self._saved.append((_innermost(sys._getframe(1), self._base), dict(self._drawn)))
        return torch.tensor([self._number, len(self._saved) - 1]).view(torch.uint8)

    def restore(self, state: Tensor) -> bool:
        """Goes back to a position that `save` gave; False: it did not."""
        if state.numel() != 16:
            return False
        owner, number = state.view(torch.int64).tolist()
        if owner != self._number:
            return False
        self._base, drawn = self._saved[number]
        self._drawn = dict(drawn)
        return True


def _innermost(frame: FrameType | None, base: str) -> str:
    """The path of the innermost watched module whose call is on the stack above `frame`, else `base`."""
    while frame is not None:
        if frame.f_code is _CALL:
            paths = _paths.get(frame.f_locals["self"])
            if paths and len(paths) == 1:
                return paths[0]
            if paths:  # one module in several places: the one inside of what is around it
                around = _innermost(frame.f_back, base)
                return next((path for path in paths if path == around or path.startswith(around + ".")), paths[0])
        frame = frame.f_back
    return base


_How = Callable[[Streams, Any, tuple[Any, ...], dict[str, Any]], Any]
_drawing: dict[Any, _How | None] = {}  # by operator; None: it draws nothing


def _how(func: Any) -> _How | None:
    """How an operator gets its numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or "backward" in func._schema.name:
        return None
    names = {argument.name for argument in func._schema.arguments}
    if "generator" in names:
        return _with_generator
    packet = func.overloadpacket
    for overload in packet.overloads():
        if {argument.name for argument in getattr(packet, overload)._schema.arguments} == names | {"generator"}:
            twin = getattr(packet, overload)
            return lambda streams, _, args, kwargs: _with_generator(streams, twin, args, kwargs)
    return _with_borrowed


def _with_generator(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("generator") is None:  # else it is the user's own
        device = _device_of(args, kwargs)
        if device.type != "meta":
            kwargs = {**kwargs, "generator": streams.next_generator(device)}
    return func(*args, **kwargs)


def _with_borrowed(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For kernels that know no generator but the device's own (fused attention and dropout on CUDA): seeds it, and puts it back."""
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments} | {each.name: value for each, value in zip(arguments, args)} | kwargs
    device = _device_of(args, kwargs)
    if any(given.get(name, 1) == 0 for name in ("dropout_p", "dropout", "train")) or device.type == "meta":
        return func(*args, **kwargs)
    generator = _default_generator(device)
    with _process.lock:
        before = generator.get_state()
        generator.manual_seed(streams.next_seed())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(before)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


class _Process:
    """What all threads share while any has streams: the meaning of `torch.get_rng_state`, and torch's notes of active modes.

    torch keeps whether a mode is active in process-wide flags, and a mode puts back on leaving what it found on entering. Two threads
    that do not nest would leave them set for ever (and torch.compile off), so the last one puts back what the first one found.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._active = 0
        self._flags: dict[str, Any] = {}
        self._originals: tuple[Callable[[], Tensor], Callable[[Tensor], None]] = (torch.get_rng_state, torch.set_rng_state)

    def enter(self, streams: Streams) -> None:
        with self.lock:
            TorchDispatchMode.__enter__(streams)  # type: ignore[no-untyped-call]
            if not self._active:
                self._flags = {name: notes[-1] for name, notes in _notes(streams).items()}
                self._originals = (torch.get_rng_state, torch.set_rng_state)
                torch.get_rng_state, torch.set_rng_state = self._get_state, self._set_state  # type: ignore[assignment]  # [1]
            self._active += 1

    def leave(self, streams: Streams, error: tuple[Any, ...]) -> None:
        with self.lock:
            self._active -= 1
            for name, notes in _notes(streams).items():
                notes[-1] = self._flags.get(name) if not self._active else True
            if not self._active:
                torch.get_rng_state, torch.set_rng_state = self._originals  # type: ignore[assignment]
            TorchDispatchMode.__exit__(streams, *error)  # type: ignore[no-untyped-call]

    def _get_state(self) -> Tensor:
        streams = _of_this_thread()
        return streams.save() if streams else self._originals[0]()

    def _set_state(self, new_state: Tensor) -> None:
        streams = _of_this_thread()
        if not (streams and streams.restore(new_state)):
            self._originals[1](new_state)


def _notes(streams: Streams) -> dict[str, deque[Any]]:
    return {name: notes for name, notes in vars(streams).items() if name.startswith("old_") and isinstance(notes, deque) and notes}


def _of_this_thread() -> Streams | None:
    """The active streams; also in a thread of the autograd engine, which takes over the modes of the one that called it."""
    stack = _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in reversed(stack) if isinstance(mode, Streams)), None)


_process = _Process()
