"""Reading and writing files so that nothing is ever seen half.

A file appears under its final name only when it is complete and on the disk; whatever goes wrong before that
(no space, a signal, an error of the writer) leaves the old file, or none, and no temporary one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError


@contextmanager
def written_when_complete(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces ``path`` when the block ends without an error, and vanishes otherwise.

    The bytes go to a file without a name (a hidden sibling where the file system has no such thing), are flushed to the
    disk and renamed: a writer that is killed leaves nothing behind. Raises RenaissanceError naming ``path`` when the
    system refuses (no space, no permission, no such folder).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = _nameless(path.parent)
        named = descriptor is None
        if descriptor is None:
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
                if not named:
                    _give_name(file, temporary)
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


def _nameless(folder: Path) -> int | None:
    """A new file in ``folder`` that has no name yet, to be linked by way of /proc; None where that is impossible."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:  # also what the other way of opening will say better
        return None
    if os.path.exists(f"/proc/self/fd/{descriptor}"):
        return descriptor
    os.close(descriptor)
    return None


def _give_name(file: BinaryIO, path: Path) -> None:
    # Not the final one: a link cannot replace a file, a rename can.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a dir_fd does Python call linkat(AT_SYMLINK_FOLLOW), which links the file that /proc's link means.
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError:  # a file system or a sandbox that makes such files and does not link them
        file.seek(0)
        with path.open("xb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
    finally:
        os.close(folder)


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


def text_if_there(path: Path, what: str) -> str | None:
    """The text of a regular file, None when there is no file. ``what`` it holds is for errors.

    Raises FormatError for text that is not UTF-8, and as ``opened_regular`` does: a device would be read for ever.
    """
    try:
        with opened_regular(path) as (file, size):
            return file.read(size).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: {what} cannot be read: {error}") from error
