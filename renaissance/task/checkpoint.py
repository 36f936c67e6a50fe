"""Checkpoints: everything a run needs to go on at exactly the next batch, in one TSR file.

Tensor 0 holds the metadata (UTF-8 JSON as INT8), tensors 1..n what persists between steps (``task.state``), compact
and in the order of ``metadata["tensors"]``. The file is written under a temporary name and renamed, then the file
``latest`` is replaced to name it, then older ones go: at every instant ``latest`` names a complete file, or does not
exist. Restoring compares every part of the identity and the error prints both values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.errors import CheckpointError, RenaissanceError
from renaissance.task.output import make_folder
from renaissance.task.result import Progress, write_atomic
from renaissance.tensor import Tensor, load_tsr, save_tsr

FORMAT_VERSION = 2
FOLDER = "checkpoints"
LATEST = "latest"
PATTERN = "epoch-*-batch-*.tsr"
KEEP = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``identity`` is what must be equal in the run that resumes; ``arrays`` maps state names to compact arrays."""

    identity: Mapping[str, Any]
    progress: Progress
    arrays: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    dtypes: Mapping[str, DType] = field(repr=False)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint file, atomically (TSR writes beside and renames)."""
    metadata = {
        "format": FORMAT_VERSION,
        "identity": checkpoint.identity,
        "progress": checkpoint.progress.to_json(),
        "tensors": list(checkpoint.arrays),
    }
    text = np.frombuffer(json.dumps(metadata).encode(), dtype=np.int8)
    tensors = [Tensor.from_numpy(text, DType.INT8)]
    tensors += [Tensor.from_numpy(array, checkpoint.dtypes[name]) for name, array in checkpoint.arrays.items()]
    make_folder(path.parent)
    save_tsr(path, tensors)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint file; TSR verifies both CRCs. Raises CheckpointError when it is none of ours."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file; give a file from the folder {FOLDER}/ of a run")
    try:
        tensors = load_tsr(path)
        metadata = json.loads(tensors[0].numpy().tobytes().decode())
        names, version = metadata["tensors"], metadata["format"]
    except (RenaissanceError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint: {error}") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: checkpoint format {version}, this version reads format {FORMAT_VERSION}; resume with the version"
            " that wrote it"
        )
    if len(names) != len(tensors) - 1:
        raise CheckpointError(f"{path}: metadata names {len(names)} tensors, the file holds {len(tensors) - 1}")
    try:
        identity, progress = metadata["identity"], Progress.from_json(metadata["progress"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint: metadata: {type(error).__name__}: {error}") from None
    if not all(type(n) is int and n >= 0 for n in (progress.epoch, progress.next_batch)):
        raise CheckpointError(
            f"{path}: the run is at epoch {progress.epoch!r}, batch {progress.next_batch!r}; expected numbers from 0"
        )
    return Checkpoint(
        identity=identity,
        progress=progress,
        arrays={name: tensor.numpy() for name, tensor in zip(names, tensors[1:], strict=True)},
        dtypes={name: tensor.dtype for name, tensor in zip(names, tensors[1:], strict=True)},
    )


def verify_identity(path: Path, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise CheckpointError with both values of every part that differs."""
    # The stored side went through JSON; so does the current one, so that tuples and lists compare equal.
    differences = list(_differences("", stored, json.loads(json.dumps(current))))
    if differences:
        raise CheckpointError(
            f"{path}: the checkpoint belongs to another run: {'; '.join(differences)}. Configure the run as it was,"
            " or start it without resume"
        )


def _differences(name: str, stored: Any, current: Any) -> Iterator[str]:
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        for key in sorted(stored.keys() | current.keys()):
            yield from _differences(f"{name}.{key}" if name else key, stored.get(key), current.get(key))
    elif stored != current:
        yield f"{name} is {stored!r} in the checkpoint and {current!r} in this run"


class CheckpointFolder:
    """The checkpoints of one output folder: writes, names the latest, keeps the last ``KEEP``."""

    def __init__(self, output: Path) -> None:
        self.path = output / FOLDER
        self._mine: list[Path] = []

    def latest(self) -> Path:
        """The newest complete checkpoint. Raises CheckpointError when there is none, or the pointer is damaged."""
        pointer = self.path / LATEST
        try:
            name = pointer.read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path}: no checkpoint to resume from; run without resume, or give the checkpoint file's path"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{pointer}: cannot be read: {error.strerror}") from None
        if not fnmatch(name, PATTERN) or not (self.path / name).is_file():
            raise CheckpointError(
                f"{pointer}: names {name[:80]!r}; expected a file {PATTERN} beside it. Give resume the path of a"
                " checkpoint file"
            )
        return self.path / name

    def adopt(self, path: Path) -> None:
        """Count a checkpoint that the run was resumed from among the kept ones (if it lies in this folder)."""
        if path.resolve().parent == self.path.resolve():
            self._mine.append(path.resolve())

    def write(self, checkpoint: Checkpoint) -> Path:
        """Save the checkpoint of this position, point ``latest`` at it, drop all but the last ``KEEP`` of this run."""
        at = checkpoint.progress
        path = self.path.resolve() / f"epoch-{at.epoch:05d}-batch-{at.next_batch:06d}.tsr"
        save_checkpoint(path, checkpoint)
        write_atomic(self.path / LATEST, (path.name + "\n").encode())
        self._mine = [*[p for p in self._mine if p != path][-(KEEP - 1) :], path]
        # Files of an earlier run in the same folder, and what a killed writer left, go here too.
        for pattern in (PATTERN, ".*.tmp"):
            for other in self.path.glob(pattern):
                if other.resolve() not in self._mine:
                    other.unlink(missing_ok=True)
        return path
