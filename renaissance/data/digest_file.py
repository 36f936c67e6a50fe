"""A file with the digests of one epoch: what was delivered, provable later batch by batch.

Text, UTF-8, one line each: a JSON object with everything that decides the bytes (``DigestHeader``), then for every
batch ``INDEX DIGEST``, then ``epoch DIGEST``. Digests are 32 hex digits as docs/shared-memory.md defines them. That is
all that is needed to make any of its batches again; docs/digests.md describes it. A reader checks that the file is
complete and that the last line follows from the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from renaissance.core.digest import DIGEST_BYTES, chain_digest
from renaissance.core.errors import DigestMismatch, FormatError
from renaissance.core.files import opened_regular, written_when_complete

FORMAT = "renaissance-digests"
VERSION = 1
MAX_BYTES = 1 << 30
SUFFIX = ".digests"
_LINE = re.compile(r"(\d{1,12}) ([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class DigestHeader:
    """Everything that decides the bytes of an epoch, its number included."""

    dataset: str
    split: str  # "train" or "val"
    num_samples: int
    stored_format: str  # "dts" or "raw"; "" for pixels that were in memory, whose files decide no byte
    encoding: str  # "pixels", "pictures" or "raw"
    level: str  # packed level, "" for sets without levels
    recipe: str  # Recipe.to_json()
    recipe_fingerprint: str
    decoder: str  # names and versions, "" when nothing is decoded
    seed: int
    shuffle: bool
    order: str  # "global" or "blocks"
    batch_size: int
    dtype: str
    height: int
    width: int
    channels: int
    padded_channels: int
    rank: int
    world_size: int
    batches_per_epoch: int
    on_corrupt: str  # "fail", "substitute" or "blank"
    epoch: int

    def identity(self) -> str:
        """32 hex digits that name everything but the epoch."""
        values = {name: value for name, value in asdict(self).items() if name != "epoch"}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def file_name(self) -> str:
        """``DATASET-SPLIT-IDENTITY-eEPOCH.digests``, with the first 16 digits of the identity."""
        return f"{self.dataset}-{self.split}-{self.identity()[:16]}-e{self.epoch:06d}{SUFFIX}"


_TYPES: dict[str, type] = {"int": int, "str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class EpochDigests:
    """One epoch: header, the digest of each batch in order, and the epoch's digest."""

    header: DigestHeader
    batches: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        return chain_digest(self.batches)


def write_digests(path: Path, header: DigestHeader, batches: Sequence[bytes]) -> None:
    """Write one epoch; the file appears when it is complete. Raises RenaissanceError naming ``path``."""
    first = json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)})
    lines = [first, *(f"{index} {digest.hex()}" for index, digest in enumerate(batches))]
    lines.append(f"epoch {chain_digest(batches).hex()}")
    with written_when_complete(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def read_digests(path: Path) -> EpochDigests:
    """Read and check one file.

    Raises MissingFileError, FormatError naming the line, or DigestMismatch when the epoch's digest is not that of the
    batches.
    """
    with opened_regular(path) as (file, size):
        if size > MAX_BYTES:
            raise FormatError(f"{path}: {size} bytes; a digest file has at most {MAX_BYTES}")
        content = file.read(size)
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: offset {error.start}: is not text") from None
    if len(lines) < 3 or lines.pop() != "":
        raise FormatError(f"{path}: is cut off; expected a header, batches, and `epoch DIGEST` with a line end")
    header = _parse_header(path, lines[0])
    if len(lines) != header.batches_per_epoch + 2:
        raise FormatError(
            f"{path}: {len(lines) - 2} batches, the header says {header.batches_per_epoch}; expected one line each"
        )
    batches = []
    for index, line in enumerate(lines[1:-1]):
        match = _LINE.fullmatch(line)
        if match is None or int(match[1]) != index:
            raise FormatError(f"{path}: line {index + 2}: expected `{index} DIGEST`, found {line[:60]!r}")
        batches.append(bytes.fromhex(match[2]))
    found = EpochDigests(header, tuple(batches))
    expected = f"epoch {found.digest.hex()}"
    if lines[-1] != expected:
        raise DigestMismatch(f"{path}: the batches give `{expected}`, the last line says {lines[-1][:60]!r}")
    return found


def _parse_header(path: Path, line: str) -> DigestHeader:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: line 1: is not JSON; expected the header of a digest file") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FormatError(f"{path}: line 1: expected the key format with {FORMAT!r}")
    if values.get("version") != VERSION:
        raise FormatError(f"{path}: line 1: version is {values.get('version')!r}; this program reads {VERSION}")
    values = {name: value for name, value in values.items() if name not in ("format", "version")}
    known: dict[str, Any] = {field.name: _TYPES[str(field.type)] for field in fields(DigestHeader)}
    if missing := sorted(set(known) - set(values)):
        raise FormatError(f"{path}: line 1: misses {', '.join(missing)}")
    if unknown := sorted(set(values) - set(known)):
        raise FormatError(f"{path}: line 1: unknown keys {', '.join(map(repr, unknown))[:200]}")
    for name, expected in known.items():
        if type(values[name]) is not expected:
            raise FormatError(f"{path}: line 1: {name} is {values[name]!r}; expected {expected.__name__}")
    for name, low in (("epoch", 0), ("batches_per_epoch", 1), ("batch_size", 1), ("num_samples", 1)):
        if values[name] < low:
            raise FormatError(f"{path}: line 1: {name} is {values[name]}; expected at least {low}")
    return DigestHeader(**values)


__all__ = ["DIGEST_BYTES", "SUFFIX", "DigestHeader", "EpochDigests", "read_digests", "write_digests"]
