"""Reading and writing files so that nothing is ever seen half.

A file appears under its final name only when it is complete and on the disk; whatever goes wrong before that
(no space, a signal, an error of the writer) leaves the old file, or none, and no temporary one.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError


@contextmanager
def written_when_complete(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces ``path`` when the block ends without an error, and vanishes otherwise.

    The bytes go to a hidden sibling, are flushed to the disk and renamed. Raises RenaissanceError naming ``path``
    when the system refuses (no space, no permission, no such folder).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # O_EXCL: the name is ours alone; 0o666 leaves the permissions to the user's umask.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise RenaissanceError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            flush_folder(path.parent)
        except OSError as error:
            if isinstance(error, RenaissanceError):
                raise
            raise RenaissanceError(f"{path}: cannot be written: {error.strerror or error}; nothing was kept") from error
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def flush_folder(folder: Path) -> None:
    """Put the names of a folder on the disk: a rename is kept only then. File systems that refuse cost only that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def opened_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """An existing regular file, open for reading, with its size in bytes.

    Raises MissingFileError when there is none, FormatError when it is a folder, a pipe or a device, and
    RenaissanceError when the system refuses to open or read it; all name ``path``.
    """
    try:
        # A pipe would block in open() until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            file = open(descriptor, "rb")  # noqa: SIM115
        except BaseException:  # a folder: open() leaves the descriptor to us
            os.close(descriptor)
            raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise FormatError(f"{path}: is a folder; expected a file") from error
    except OSError as error:
        raise RenaissanceError(f"{path}: cannot be opened: {error.strerror}") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: is not a regular file")
        try:
            yield file, status.st_size
        except OSError as error:
            if isinstance(error, RenaissanceError):
                raise
            raise RenaissanceError(f"{path}: cannot be read: {error.strerror or error}") from error
