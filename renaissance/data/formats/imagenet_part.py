"""The unfinished file of a packer and its journal: what a killed run has done is found, checked and kept.

``NAME.part`` is the file itself, blocks in order, its header still a hole. ``NAME.part.journal`` has one JSON line with
the plan, then one per block: how many pictures of the export order are behind it, a fingerprint of those source files
(name, size, time) and the CRC-32 of the block. A resumed run keeps the blocks for which all of that still holds, from
the first on, and continues there; a line or a block that was cut by the kill fails its check and is made again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from renaissance.core.errors import RenaissanceError
from renaissance.data.formats.imagenet import PictureLayout


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What the journal says of one written block."""

    end: int
    """Pictures of the export order that are in this block or before it, or were left out there."""
    pictures: int
    crc32: int
    largest_area: int
    source_bytes: int
    inputs: str
    """Fingerprint of the source files of the order's first ``end`` pictures."""
    left_out: tuple[tuple[int, str], ...]
    """Position in the export order and reason of each picture left out since the block before."""


class PartFile:
    """An unfinished packed file, locked against a second packer; ``records`` are the blocks that it holds, ``dropped``
    the number of those that an earlier run made and this one cannot use."""

    def __init__(self, target: Path, layout: PictureLayout, file: FileIO, journal_path: Path) -> None:
        self.target, self.layout = target, layout
        self.records: list[BlockRecord] = []
        self.dropped = 0
        self.body_crc32 = 0
        self._file, self._journal_path = file, journal_path
        self._journal: FileIO | None = None

    def restore(self, plan: dict[str, Any], inputs_at: Callable[[int], str]) -> None:
        """Keep the blocks of an earlier run of the same plan. ``inputs_at(end)`` is today's fingerprint; it is asked
        for growing ``end``."""
        size = os.fstat(self._file.fileno()).st_size
        lines = list(_journal_lines(self._journal_path))
        kept_bytes = 0
        for line, value in lines:
            if kept_bytes == 0:
                if value != {"plan": plan}:
                    break
            else:
                record = _record(value)
                end_of_block = self.layout.block_offset(len(self.records) + 1)
                if record is None or size < end_of_block or inputs_at(record.end) != record.inputs:
                    break
                crc, body = self._crc_of_block(len(self.records))
                if crc != record.crc32:
                    break
                self.records.append(record)
                self.body_crc32 = body
            kept_bytes += len(line)
        self.dropped = max(0, len(lines) - 1) - len(self.records)
        self._start_journal(plan, kept_bytes if self.records else 0)

    def start(self, plan: dict[str, Any]) -> None:
        """Forget what an earlier run has done."""
        self._start_journal(plan, 0)

    def _crc_of_block(self, block: int) -> tuple[int, int]:
        self._file.seek(self.layout.block_offset(block))
        data = self._file.read(self.layout.block_bytes)  # a short read fails the comparison of its CRC-32
        return zlib.crc32(data), zlib.crc32(data, self.body_crc32)

    def _start_journal(self, plan: dict[str, Any], kept_bytes: int) -> None:
        self._file.truncate(self.layout.block_offset(len(self.records)))
        self._journal = open(self._journal_path, "r+b" if kept_bytes else "wb", buffering=0)  # noqa: SIM115
        self._journal.truncate(kept_bytes)
        self._journal.seek(kept_bytes)
        if not kept_bytes:
            _write(self._journal, 0, _line({"plan": plan}))

    def append(self, data: bytes | bytearray, record: BlockRecord) -> None:
        """Write the next block, then its line, in which the CRC-32 is filled in here."""
        assert self._journal is not None
        record = replace(record, crc32=zlib.crc32(data))
        _write(self._file, self.layout.block_offset(len(self.records)), data)
        _write(self._journal, self._journal.tell(), _line(asdict(record)))
        self.records.append(record)
        self.body_crc32 = zlib.crc32(data, self.body_crc32)

    def finish(self, head: bytes, extension: bytes, extension_offset: int) -> None:
        """Write the header region and give the file its final name, once all of it is on the disk."""
        _write(self._file, 0, head)
        _write(self._file, extension_offset, extension)
        os.fsync(self._file.fileno())
        os.replace(part_path(self.target), self.target)
        with suppress(OSError):
            self._journal_path.unlink()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def part_path(target: Path) -> Path:
    """Where the unfinished file of ``target`` is."""
    return target.with_name(target.name + ".part")


@contextmanager
def open_part(target: Path, layout: PictureLayout, keep: bool) -> Iterator[PartFile]:
    """The unfinished file of ``target``, made if there is none; call ``restore`` or ``start`` first.

    When the block ends with an error the file stays for the next run if ``keep`` is set and it has a block, and goes
    otherwise. Raises RenaissanceError when another process packs the same target or the system refuses; a full disk
    says what to do.
    """
    path, journal_path = part_path(target), target.with_name(target.name + ".part.journal")
    part: PartFile | None = None
    try:
        with _locked(path, target) as file:
            part = PartFile(target, layout, file, journal_path)
            try:
                yield part
            except BaseException:
                if not keep or not part.records:
                    for unwanted in (path, journal_path):
                        with suppress(OSError):
                            unwanted.unlink()
                raise
            finally:
                with suppress(OSError):
                    part.close()
    except OSError as error:
        if isinstance(error, RenaissanceError):
            raise
        raise RenaissanceError(_refusal(target, error, part, keep)) from error


def _refusal(target: Path, error: OSError, part: PartFile | None, keep: bool) -> str:
    done = len(part.records) if part else 0
    if keep and done:
        advice = f"{done} blocks are kept in {part_path(target).name}; the same command continues from there"
    else:
        advice = "nothing was kept"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"the disk is full: free some space, or choose another folder; {advice}"
    return f"{target}: cannot be written: {error.strerror or error}; {advice}"


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[FileIO]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RenaissanceError(
                    f"{target}: another process is packing it ({path.name} is locked); wait for it, or end it"
                ) from error
            if not _is_still(path, file):
                continue  # the other packer finished between our open and our lock
            yield file
            return


def _is_still(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _write(file: FileIO, offset: int, data: bytes | bytearray) -> None:
    # Unbuffered, so that a full disk is met here and not when the file is closed; the system may write less at a time.
    view = memoryview(data)
    file.seek(offset)
    while view:
        view = view[file.write(view) :]


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode() + b"\n"


def _journal_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n"):
            return
        yield line, value


def _record(value: Any) -> BlockRecord | None:
    if not isinstance(value, dict) or set(value) != set(BlockRecord.__dataclass_fields__):
        return None
    try:
        left_out = tuple((int(position), str(reason)) for position, reason in value["left_out"])
    except (TypeError, ValueError):
        return None
    numbers = [value[name] for name in ("end", "pictures", "crc32", "largest_area", "source_bytes")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        return None
    return BlockRecord(**(value | {"left_out": left_out}))
