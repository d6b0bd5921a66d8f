"""What crosses between stages, as a message: any Python structure, its tensors beside it.

    value --take_out--> frame (bytes), tensors --pack--> Message ~~transport~~> Message --unpack, enter--> value

What keeps a tensor's strides on the way is in strides.py; how it enters a stage, in boundary.py.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipe import pickler
from pipe.aliases import Region
from pipe.boundary import Boundary, Inbox, check_device_copy, enter_boundary
from pipe.errors import PlanError
from pipe.side_stream import arriving, leaving
from pipe.strides import Geometry, copy, is_sendable, nbytes, restore, ship

__all__ = [
    "Boundary",
    "Inbox",
    "Message",
    "check_device_copy",
    "enter_boundary",
    "pack",
    "pack_list",
    "pack_roots",
    "roots",
    "take_out",
    "unpack",
    "unpack_list",
]

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, eq=False)
class Message:
    """Plain data for a transport: `tensors` lie in host memory, all else can be pickled by any pickler.

    `frame` is the structure with numbers in the tensors' places; None: one tensor alone, or a list of gradients.
    A geometry of None: the tensor is as it should be, and starts at a multiple of 16 bytes. `ready`: None, or what to wait for
    before the tensors hold their values, since a copy from a GPU may be under way; see transport/deferred.py.
    """

    frame: bytes | None
    tensors: tuple[Tensor | None, ...]
    needs_grad: tuple[bool, ...]
    geometry: tuple[Geometry | None, ...]
    ready: Ready | None = None
    aliases: tuple[tuple[int, Region], ...] = ()  # by position, where tensors lie in one process that others have, too

    @property
    def nbytes(self) -> int:
        """Bytes that a transport moves for it, without its own overhead."""
        return len(self.frame or b"") + sum(nbytes(t) for t in self.tensors if t is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        """An independent message with the same values, strides and alignment."""
        copies = tuple(None if t is None else copy(t) for t in self.tensors)
        return Message(self.frame, copies, self.needs_grad, self.geometry, None, self.aliases)

    def __reduce__(self) -> tuple[type[Message], tuple[Any, ...]]:
        return Message, (self.frame, self.tensors, self.needs_grad, self.geometry, None, self.aliases)


class Ready:
    """Copies to the host that are under way: whatever has `synchronize()`."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def synchronize(self) -> None:
        """Waits until all are done."""
        for event in self._events:
            event.synchronize()


def pack(value: Any) -> Message:
    """The value as a message. Its tensors are detached; a later write at the sender cannot reach it.

    Raises:
        PlanError: it holds what cannot be pickled, or a tensor of a kind that cannot be sent.
    """
    return pack_roots(*take_out(value))


def roots(value: Any) -> list[Tensor]:
    """The tensors of the value, live and in the order of `pack`: the gradients that come back belong to them."""
    return take_out(value)[1]


def unpack(message: Message, device: torch.device | str, enter: Callable[[Tensor, bool], Tensor]) -> Any:
    """The value again, on `device`; each tensor is what `enter(tensor, needs_grad)` gives, called once a tensor, in order.

    The message is used up: the value may share its memory.
    """
    restored = [t for t in unpack_list(message, device) if t is not None]
    entered = [enter(t, needs_grad) for t, needs_grad in zip(restored, message.needs_grad)]
    return entered[0] if message.frame is None else _Unframe(message.frame, entered).load()


def pack_list(tensors: Sequence[Tensor | None]) -> Message:
    """Gradients as a message, in order; None stays None.

    They are copied always: autograd may have put the same memory into the `.grad` of a weight, which the next micro-batch adds to.
    """
    with leaving(t for t in tensors if t is not None) as events:
        sent = [(None, None) if t is None else ship(t.detach()) for t in tensors]
    ready = Ready(events) if events else None
    return Message(None, tuple(t for t, _ in sent), (False,) * len(sent), tuple(geometry for _, geometry in sent), ready)


def unpack_list(message: Message, device: torch.device | str) -> list[Tensor | None]:
    """What `pack_list` was given, on `device`."""
    device = torch.device(device)
    come: list[Tensor] = []
    with arriving(device, come):
        restored = [None if t is None else restore(t, geometry, device) for t, geometry in zip(message.tensors, message.geometry)]
        come += [t for t in restored if t is not None]
    return restored


def take_out(value: Any) -> tuple[bytes | None, list[Tensor]]:
    """The frame of the value and its tensors; one tensor that occurs twice is there once, so it is one again on arrival.

    Raises:
        PlanError: the value holds what cannot be pickled.
    """
    if type(value) in _PLAIN and not vars(value):
        check_kind(value)
        return None, [value]
    file = io.BytesIO()
    framer = _Frame(file)
    try:
        framer.dump(value)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"a {type(value).__name__} cannot be sent to another worker ({error}); what is sent must be picklable: "
            f"use tensors and plain data, or keep that object inside one stage with split="
        ) from error
    return file.getvalue(), framer.tensors


def check_kind(t: Tensor) -> None:
    """Refuses a tensor that has no data of its own in a layout that can be copied.

    Raises:
        PlanError: it is one.
    """
    kind = type(t)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        what = f"a {kind.__name__}"
    elif t.is_nested or t.is_quantized or t.layout not in _LAYOUTS:
        what = "a nested tensor" if t.is_nested else "a quantized tensor" if t.is_quantized else f"a tensor of layout {t.layout}"
    else:
        return
    raise PlanError(
        f"{what} cannot cross to the next stage; tensors that cross hold their own data: "
        f"return the plain tensors it is made of, or keep it inside one stage with split="
    )


def pack_all(taken_out: Sequence[tuple[bytes | None, list[Tensor]]]) -> list[Message]:
    """A message for each of several values, as `take_out` gave them."""
    return [pack_roots(frame, tensors) for frame, tensors in taken_out]


def pack_roots(frame: bytes | None, tensors: Sequence[Tensor]) -> Message:
    """The message of what `take_out` gave; for a caller that wants the tensors, too, without a second walk."""
    grad = torch.is_grad_enabled()
    if frame is None and is_sendable(tensors[0]):  # the fast path
        return Message(None, (tensors[0].detach(),), (grad,), (None,))
    with leaving(tensors) as events:
        sent = [(t.detach(), None) if is_sendable(t) else ship(t.detach()) for t in tensors]
    needs_grad = tuple(grad and t.requires_grad for t in tensors)
    ready = Ready(events) if events else None
    return Message(frame, tuple(t for t, _ in sent), needs_grad, tuple(geometry for _, geometry in sent), ready)


class _Frame(pickler.Pickler):
    """Pickles a structure by value where need be (classes of `__main__`), and puts numbers in the tensors' places.

    Where a tensor stands first, what was set on it goes along: (number, class, attributes).
    """

    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int] | None = None) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers = dict(numbers or {})

    def persistent_id(self, value: Any) -> int | tuple[int, type, dict[str, Any]] | None:
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        check_kind(value)
        number = self._numbers[id(value)] = len(self.tensors)
        self.tensors.append(value)
        kind, attributes = type(value), vars(value)
        if kind in _PLAIN and not attributes:
            return number
        return number, kind, {name: part for name, part in attributes.items() if self._crosses(part)}

    def _crosses(self, part: Any) -> bool:
        """Whether it can be pickled; what cannot, as a weak reference that some library left, stays behind."""
        try:
            _Frame(io.BytesIO(), self._numbers).dump(part)
        except Exception:
            return False
        return True


class _Unframe(pickle.Unpickler):
    def __init__(self, frame: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(frame))
        self._tensors = list(tensors)

    def persistent_load(self, pid: Any) -> Tensor:
        if isinstance(pid, int):
            return self._tensors[pid]
        number, kind, attributes = pid
        tensor: Tensor = self._tensors[number]
        if kind not in _PLAIN:
            tensor = self._tensors[number] = tensor.as_subclass(kind)
        vars(tensor).update(attributes)
        return tensor
