"""Weights in safetensors files: whose names they are, and their values straight into the tensors of one stage."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipe.errors import PlanError

_PORTION = 16 << 20  # bytes of a file that are mapped into memory at a time
_INDEX = "*.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """A safetensors file, or a folder of such files with an index: the name of each tensor, and its value when asked.

    Looks at this host's files, and at none before it is asked.
    """

    path: str

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors in it.

        Raises:
            PlanError: it is not there, or is no such file or folder.
        """
        return frozenset(self._files)

    def read(self, wanted: Mapping[str, Tensor]) -> None:
        """Writes the values into these tensors, by name, in their own dtype; of the files only a small portion is in memory at a time.

        Raises:
            PlanError: a file is not there, or a name in it; or a shape differs.
        """
        by_file: dict[Path, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in wanted.items():
            if name not in self._files:
                raise PlanError(f"weights {self._place} lacks {name!r}; every host needs the same files: copy them anew")
            by_file[self._files[name]][name] = tensor
        for file, tensors in by_file.items():
            for portion in _portions(tensors):
                with self._opened(file) as stored:  # anew each time, since what is mapped stays in memory
                    for name, rows in portion:
                        self._copy(stored, name, rows, tensors[name])

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is in the file.

        Raises:
            PlanError: it is not there.
        """
        if name not in self._files:
            raise PlanError(f"weights {self._place} lacks {name!r}; every host needs the same files: copy them anew")
        with self._opened(self._files[name]) as stored:
            found: Tensor = stored.get_tensor(name)
            return found

    @torch.no_grad()
    def _copy(self, stored: Any, name: str, rows: slice | None, tensor: Tensor) -> None:
        found = tuple(stored.get_slice(name).get_shape())
        if found != tuple(tensor.shape):
            raise PlanError(
                f"{name!r} has shape {found} in weights {self._place} and {tuple(tensor.shape)} in the model; shapes are equal: "
                "build the model with the sizes that it was saved with"
            )
        if rows is None:
            tensor.copy_(stored.get_tensor(name))
        else:
            tensor[rows].copy_(stored.get_slice(name)[rows])

    @cached_property
    def _files(self) -> Mapping[str, Path]:
        """The file of each name."""
        path = Path(self.path)
        if not path.is_dir():
            with self._opened(path) as stored:
                return dict.fromkeys(stored.keys(), path)
        found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise PlanError(
                f"weights {self._place} is a folder with {len(found)} files {_INDEX} or *.safetensors; it has one index, or one file: "
                "name the file itself"
            )
        return self._indexed(found[0]) if found[0].suffix == ".json" else Weights(str(found[0]))._files

    def _indexed(self, index: Path) -> Mapping[str, Path]:
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: index.parent / file for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise PlanError(f"weights {self._place}: {index.name} is no index with a weight_map ({why}); save the model anew") from None

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt", device="cpu") as stored:
                yield stored
        except (OSError, SafetensorError) as error:
            raise PlanError(
                f"weights file {str(file)!r} cannot be read on host {socket.gethostname()} ({error}); each worker reads its own part "
                "under this path on its own host: copy the files there, or use a shared folder"
            ) from None

    @property
    def _place(self) -> str:
        return f"{self.path!r} on host {socket.gethostname()}"


def _portions(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, slice | None]]]:
    """All tensors in pieces of rows, a few at a time; None: the whole tensor."""
    portion: list[tuple[str, slice | None]] = []
    nbytes = 0
    for name, tensor in tensors.items():
        for rows, size in _pieces(tensor):
            if portion and nbytes + size > _PORTION:
                yield portion
                portion, nbytes = [], 0
            portion.append((name, rows))
            nbytes += size
    if portion:
        yield portion


def _pieces(tensor: Tensor) -> Iterator[tuple[slice | None, int]]:
    """Rows, and their bytes: as many as fit into a portion, and one at least."""
    total = tensor.numel() * tensor.element_size()
    if not tensor.dim() or total <= _PORTION:
        yield None, total
        return
    row = total // len(tensor)
    step = max(1, _PORTION // row)
    for begin in range(0, len(tensor), step):
        yield slice(begin, min(begin + step, len(tensor))), row * step
