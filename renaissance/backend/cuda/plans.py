"""Plans of cuDNN on disk, and what the two libraries' plans have in common.

A plan is chosen once per library version, device and numeric option; a later run takes the same one without asking
heuristics or compiling. A file is used only when its digest and its full key are right and the library takes it; any
other is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.errors import DeviceError, RenaissanceError
from renaissance.core.files import written_when_complete
from renaissance.core.gpus import INSTALL

MAGIC = b"renaissance plan 1\n"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan as cuDNN serialises it, with the name and the workspace it had when it was chosen."""

    name: str
    workspace: int
    blob: bytes


class PlanFolder:
    """A folder of plans, one file each, that any number of processes may use at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: Mapping[str, Any]) -> Path:
        """File of a key."""
        return self._folder / f"{hashlib.blake2b(_text(key), digest_size=DIGEST_BYTES).hexdigest()}.plan"

    def load(self, key: Mapping[str, Any]) -> StoredPlan | None:
        """The plan of ``key``; None when there is no file, or one that is damaged or of another key."""
        try:
            data = self.path(key).read_bytes()
        except OSError:
            return None
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if not body.startswith(MAGIC) or _digest(body) != digest:
            return None
        key_line, head_line, blob = body[len(MAGIC) :].split(b"\n", 2)
        if key_line != _text(key):
            return None
        head = json.loads(head_line)
        return StoredPlan(head["name"], head["workspace"], blob)

    def keep(self, key: Mapping[str, Any], plan: StoredPlan) -> None:
        """Write the plan, whole or not at all. A folder that cannot be written costs time in the next run and nothing
        else, so that is no error."""
        head = json.dumps({"name": plan.name, "workspace": plan.workspace}).encode()
        body = MAGIC + _text(key) + b"\n" + head + b"\n" + plan.blob
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_when_complete(self.path(key)) as file:
                file.write(body + _digest(body))
        except (OSError, RenaissanceError):
            return


def refuse_capture(runtime: CudaRuntime, streams: Sequence[int], what: str) -> None:
    """Raise DeviceError when one of the streams is capturing: making a handle or a plan loads code and allocates, which
    a capture forbids or, worse, lets happen once and not in the replay."""
    for stream in streams:
        if runtime.streamIsCapturing(stream):
            raise DeviceError(f"{what} was asked for while a stream is capturing; issue the program once before")


def plans_digest(names: Mapping[Any, str]) -> str:
    """A digest of which plan each spec has, whatever the order in which they were made."""
    lines = sorted(f"{spec}: {name}" for spec, name in names.items())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def library_error(name: str, error: Exception) -> DeviceError:
    """What to say when a library of NVIDIA's cannot be loaded."""
    reason = str(error).partition("\n")[0]
    return DeviceError(f"{name} cannot be loaded: {reason}; {INSTALL}")


def _text(key: Mapping[str, Any]) -> bytes:
    return json.dumps(key, sort_keys=True).encode()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
