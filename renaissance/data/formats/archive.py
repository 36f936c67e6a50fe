"""Reading a ``.tar.gz`` from outside: nothing is unpacked beyond a bound, and every error names the archive.

The archive is read once, front to back, to its end, so that its gzip checksum is always compared. Members that could
reach outside the folder they are unpacked into (absolute names, ``..``, links, devices) make the whole archive refused.
"""

from __future__ import annotations

import gzip
import os
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from renaissance.core.errors import FormatError, RenaissanceError
from renaissance.core.files import flush_folder, opened_regular

MAX_UNPACKED_BYTES = 1 << 29
"""What an archive may hold; the largest one that is published (CIFAR) holds 184 MB."""
DEFLATE_LIMIT = 1032
"""Deflate cannot shrink data by more than this factor."""

_CHUNK = 1 << 20


class _Bounded:
    """A reader that ends with an error at a limit, so that a small archive cannot fill memory or disk."""

    def __init__(self, path: Path, stream: IO[bytes], limit: int) -> None:
        self._path, self._stream, self._left, self._limit = path, stream, limit, limit

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise FormatError(
                f"{self._path}: unpacks to more than {self._limit} bytes; it is not a published archive, fetch it again"
            )
        return data


class Archive:
    """An archive open for one pass; made by ``opened_archive``."""

    def __init__(self, path: Path, tar: tarfile.TarFile, limit: int) -> None:
        self._path, self._tar, self._limit = path, tar, limit

    def files(self) -> Iterator[tuple[tarfile.TarInfo, str]]:
        """Every regular file with its path below the place of unpacking, ``/`` between the parts.

        Raises FormatError for any member that is not a plain file or a folder inside that place, or that is longer
        than the archive can hold.
        """
        for member in self._tar:
            place, parts = f"{self._path}: member {member.name!r}", PurePosixPath(member.name).parts
            if member.name.startswith(("/", "\\")) or ".." in parts or "\0" in member.name or not parts:
                raise FormatError(f"{place} lies outside the archive's folder; nothing is unpacked")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise FormatError(f"{place} is not a plain file; nothing is unpacked")
            if not 0 <= member.size <= self._limit:
                raise FormatError(
                    f"{place} says it is {member.size} bytes long; the archive holds less. Fetch it again"
                )
            yield member, "/".join(part for part in parts if part != ".")

    def read(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """The content of the member that ``files`` gave last, in pieces, together as long as its header says.

        Raises FormatError when the archive ends before that.
        """
        stream = self._tar.extractfile(member)
        assert stream is not None  # files() yields regular files only
        left = member.size
        while left:
            data = stream.read(min(_CHUNK, left))
            if not data:
                raise FormatError(
                    f"{self._path}: ends {left} bytes before the end of its member {member.name!r}; fetch it again"
                )
            left -= len(data)
            yield data


@contextmanager
def opened_archive(path: Path) -> Iterator[Archive]:
    """A tar archive, gzip-compressed or not, open for one pass over its members.

    Raises MissingFileError, or FormatError naming ``path`` for damage of any kind and for more than
    ``MAX_UNPACKED_BYTES`` unpacked bytes.
    """
    with opened_regular(path) as (file, size):
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=file, mode="rb") if compressed else file  # type: ignore[assignment]
        limit = min(MAX_UNPACKED_BYTES, size * DEFLATE_LIMIT if compressed else size)
        bounded = _Bounded(path, stream, limit)
        try:
            with tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]  # needs read() only
                yield Archive(path, tar, limit)
            while bounded.read(_CHUNK):
                pass
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FormatError(
                f"{path}: the archive is damaged ({str(error).rstrip('.') or type(error).__name__}); fetch it again"
            ) from error


def extract_archive(path: Path, folder: Path, inner: str) -> list[Path]:
    """Unpack the files of ``inner``, the one folder of an archive, into ``folder / inner`` and return their paths.

    They appear there only when the whole archive is unpacked and its checksum compared; existing ones are replaced.
    Raises FormatError for what ``Archive.files`` refuses and for members elsewhere, RenaissanceError when the disk
    does.
    """
    temporary = folder / f".{inner}.{secrets.token_hex(6)}.tmp"
    names: list[str] = []
    try:
        temporary.mkdir()
        with opened_archive(path) as archive:
            for member, name in archive.files():
                place, _, last = name.rpartition("/")
                if place != inner or last in names:
                    raise FormatError(f"{path}: member {member.name!r} was not expected; files of {inner} were")
                names.append(last)
                _write(temporary / last, archive.read(member))
        target = folder / inner
        target.mkdir(exist_ok=True)
        for name in names:
            os.replace(temporary / name, target / name)
        flush_folder(target)
    except OSError as error:
        if isinstance(error, RenaissanceError):
            raise
        raise RenaissanceError(f"{folder / inner}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [folder / inner / name for name in names]


def _write(path: Path, pieces: Iterator[bytes]) -> None:
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                with _named(path):
                    view = view[file.write(view) :]
        with _named(path):
            os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of writing name the file that is written: around it lies the reading of the archive, which names that."""
    try:
        yield
    except OSError as error:
        raise RenaissanceError(f"{path}: cannot be written: {error.strerror or error}") from error
