"""A checkpoint: a folder that any number of stages writes, and any other reads.

    model-00001-of-00002.safetensors ...            weights and buffers under the unsplit model's names, a tied tensor once
    model.safetensors.index.json                    which file has which, as other packages read it
    optimizer/state-00001-of-00002.safetensors ...  the optimizer's tensors, parameter/key, with their index
    engine.json                                     steps done, the base of the random streams, parameter groups, numbers of the state

Each stage writes its own part, on its own host, if that sees the folder; else its part comes to rank 0, which writes it. All is written
beside and then renamed: a crash at any moment leaves the checkpoint before whole, under its own name or with PREVIOUS behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from pipe.errors import PlanError
from pipe.weights import Weights

FORMAT = 1
PREVIOUS = ".previous"
_MODEL, _STATE, _ENGINE, _TOKEN = "model", "optimizer/state", "engine.json", "being-written"


@dataclass(frozen=True)
class Part:
    """What one worker has of a checkpoint, on the CPU."""

    weights: dict[str, Tensor]
    state: dict[str, Tensor]  # parameter/key
    numbers: dict[str, dict[str, Any]]  # of the optimizer's state, by parameter: what is no tensor

    def write(self, folder: Path, number: int, of: int) -> None:
        """Its files."""
        for stem, tensors in ((_MODEL, self.weights), (_STATE, self.state)):
            file = folder / _file(stem, number, of)
            file.parent.mkdir(exist_ok=True)
            save_file(tensors, file, metadata={"format": "pt"})
            _sync(file)


@dataclass(frozen=True)
class Saving:
    """Tells a worker where to write."""

    folder: str
    token: str  # in a file there: whether this host sees the same folder
    parts: int

    @property
    def is_here(self) -> bool:
        """Whether this host sees the folder."""
        return _text(Path(self.folder) / _TOKEN) == self.token


@dataclass(frozen=True)
class Saved:
    """What a worker has written, or had no way to write."""

    weights: dict[str, int] = field(default_factory=dict)  # bytes by name
    state: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    part: Part | None = None


def part_of(
    modules: Iterable[nn.Module], copies: Iterable[int], parameters: Mapping[str, nn.Parameter], state: Mapping[Any, Mapping[str, Any]]
) -> Part:
    """What is saved of some stages, each tensor under one name.

    Args:
        copies: ids of tensors that other workers save.
        state: of the optimizer, by parameter.

    Raises:
        PlanError: a state_dict holds something that is no tensor, or the optimizer's state what is no number or text.
    """
    weights: dict[str, Tensor] = {}
    seen = set(copies)
    for module in modules:
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise PlanError(
                    f"{name!r} of the model's state_dict is a {type(value).__name__}; a checkpoint holds tensors: make it a buffer"
                )
            if id(value) not in seen:
                seen.add(id(value))
                weights[name] = _kept(value)
    tensors, numbers = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for name, parameter in parameters.items():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = _kept(value)
            elif isinstance(value, (int, float, str, type(None))):
                numbers.setdefault(name, {})[key] = value
            else:
                raise PlanError(
                    f"the optimizer keeps {key!r} of {name!r} as a {type(value).__name__}; a checkpoint holds tensors and numbers"
                )
    return Part(weights, tensors, numbers)


def save_part(saving: Saving, number: int, part: Part) -> Saved:
    """Writes a worker's part if its host sees the folder; else it is in what is given back."""
    if saving.is_here:
        part.write(Path(saving.folder), number, saving.parts)
    weights, state = ({name: _nbytes(tensor) for name, tensor in tensors.items()} for tensors in (part.weights, part.state))
    return Saved(weights, state, part.numbers, None if saving.is_here else part)


class Writer:
    """A checkpoint that is being written beside its place."""

    def __init__(self, directory: Path, parts: int) -> None:
        """Makes the folder.

        Raises:
            PlanError: it cannot be made there.
        """
        self.target = directory.absolute()
        self._folder = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex[:8]}")
        self.saving = Saving(str(self._folder), uuid.uuid4().hex, parts)
        try:
            if self.target.exists() and not (self.target / _ENGINE).is_file() and any(self.target.iterdir()):
                raise PlanError(
                    f"{str(self.target)!r} is there and is no checkpoint; saving replaces what is there: give a folder of its own"
                )
            self._folder.mkdir(parents=True)
            (self._folder / _TOKEN).write_text(self.saving.token)
        except OSError as error:
            raise PlanError(f"no checkpoint can be written to {str(self.target)!r} ({error.strerror}); give a folder of your own") from None

    def finish(self, saved: Mapping[int, Saved], engine: Mapping[str, Any]) -> None:
        """Writes what the workers could not, and the indexes, and puts all in its place."""
        for worker, each in saved.items():
            if each.part is not None:
                each.part.write(self._folder, worker, self.saving.parts)
        for stem, sizes in (
            (_MODEL, {w: each.weights for w, each in saved.items()}),
            (_STATE, {w: each.state for w, each in saved.items()}),
        ):
            files = {name: Path(_file(stem, w, self.saving.parts)).name for w, names in sizes.items() for name in names}
            index = {"metadata": {"total_size": sum(sum(names.values()) for names in sizes.values())}, "weight_map": files}
            self._write(f"{stem}.safetensors.index.json", index)
        numbers = {name: kept for each in saved.values() for name, kept in each.numbers.items()}
        self._write(_ENGINE, {"format": FORMAT, **engine, "numbers": numbers})
        (self._folder / _TOKEN).unlink()
        _sync(self._folder)
        self._replace()

    def drop(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _replace(self) -> None:
        previous = self.target.with_name(self.target.name + PREVIOUS)
        if self.target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            self.target.rename(previous)
        self._folder.rename(self.target)
        _sync(self.target.parent)
        shutil.rmtree(previous, ignore_errors=True)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        file = self._folder / name
        file.write_text(json.dumps(content, indent=1))
        _sync(file)


@dataclass(frozen=True)
class Loading:
    """Tells a worker where to read."""

    folder: str
    identity: str  # the text of its engine.json: whether this host sees the same folder
    names: Mapping[str, str]  # of the model -> of the files
    numbers: Mapping[str, Mapping[str, Any]]

    @property
    def is_here(self) -> bool:
        """Whether this host sees the folder."""
        return _text(Path(self.folder) / _ENGINE) == self.identity

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names of the model."""
        files = Weights(self.folder)
        return {name: files.tensor(self.names[name]) for name in names if name in self.names}

    def state(self, parameters: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The optimizer's state of these parameters."""
        files = Weights(str(Path(self.folder) / Path(_STATE).parent))
        keys: dict[str, list[str]] = {}
        for name in files.names:
            parameter, _, key = name.rpartition("/")
            keys.setdefault(parameter, []).append(key)
        return {
            name: {**self.numbers.get(name, {}), **{key: files.tensor(f"{name}/{key}") for key in keys.get(name, ())}}
            for name in parameters
        }


def find(directory: Path) -> Path:
    """The folder of the checkpoint: the one named, or the one before, where a crash came between.

    Raises:
        PlanError: there is none.
    """
    for folder in (directory.absolute(), directory.absolute().with_name(directory.absolute().name + PREVIOUS)):
        if (folder / _ENGINE).is_file():
            return folder
    raise PlanError(f"{str(directory)!r} holds no checkpoint (it has no {_ENGINE}); give the folder that engine.save wrote")


def opened(folder: Path) -> tuple[dict[str, Any], str]:
    """What engine.json says, and its text.

    Raises:
        PlanError: it is of another format.
    """
    text = (folder / _ENGINE).read_text()
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{_ENGINE} in {str(folder)!r} is not whole ({error}); use another checkpoint") from None
    if found.get("format") != FORMAT:
        raise PlanError(
            f"the checkpoint {str(folder)!r} has the format {found.get('format')!r} and this version reads {FORMAT}: use its version"
        )
    return found, text


def _file(stem: str, number: int, of: int) -> str:
    return f"{stem}-{number + 1:05d}-of-{of:05d}.safetensors"


def _kept(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _sync(path: Path) -> None:
    """What is written there survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
