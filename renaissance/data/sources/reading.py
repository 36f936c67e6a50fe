"""Reading stored bytes by offset: short reads, files that change, and errors of the disk, each with a name.

Damage of one sample is ``CorruptSample``, so that a session's policy can act on it. A file that is no longer the one
that was opened is ``FormatError``: every sample of it is in doubt. A system that has run out of descriptors or memory
is neither: to call that damage would change the bytes of a run by chance.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from renaissance.core.errors import (
    CorruptSample,
    DigestMismatch,
    FormatError,
    MissingFileError,
    RenaissanceError,
    ValueRejected,
)
from renaissance.data.sources.spec import FileStamp, printable

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is refused, and a pipe does not block in open()."""
OPEN_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC

_CHUNK = 1 << 20


def raise_unreadable(error: OSError, place: str) -> NoReturn:
    """Turn the system's refusal to read one sample into CorruptSample, or into RenaissanceError for a shortage."""
    if error.errno in SHORTAGES:
        raise RenaissanceError(
            f"{place}: cannot be read now: {error.strerror}; raise the limit of open files (ulimit -n) or free memory"
        ) from error
    # What the system says of O_NOFOLLOW is about levels, and misleads.
    why = "it is a link; links are not followed" if error.errno == errno.ELOOP else error.strerror or error
    raise CorruptSample(f"{place}: cannot be read: {why}") from error


def check_room(out: memoryview, size: int, place: str) -> None:
    """Raise ValueRejected when ``out`` has fewer bytes than the sample."""
    if out.nbytes < size:
        raise ValueRejected(f"{place}: is {size} bytes; the buffer has room for {out.nbytes}")


def read_fully(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` from ``offset`` of a file; returns the bytes read, fewer only at the end of the file."""
    wanted, done = out.nbytes, os.preadv(descriptor, [out], offset)
    while 0 < done < wanted:
        more = os.preadv(descriptor, [out[done:]], offset + done)
        if not more:
            break
        done += more
    return done


def check_body(path: str, descriptor: int, offset: int, expected: int, field_offset: int) -> None:
    """Compare the bytes of a packed file from ``offset`` to its end with their CRC-32, a megabyte at a time.

    ``field_offset`` is where the header keeps it, for the message. Raises DigestMismatch.
    """
    crc, at, buffer = 0, offset, memoryview(bytearray(_CHUNK))
    while done := read_fully(descriptor, buffer, at):
        crc, at = zlib.crc32(buffer[:done], crc), at + done
    if crc != expected:
        raise DigestMismatch(
            f"{path}: CRC-32 of the body (offset {offset} to the end) is {crc:08x}; expected {expected:08x} (offset "
            f"{field_offset}). The file is damaged; pack or fetch it again"
        )


def stamp_of(descriptor: int) -> FileStamp:
    """Size and time of change of an open file."""
    status = os.fstat(descriptor)
    return FileStamp(status.st_size, status.st_mtime_ns)


def check_header(path: str, descriptor: int, record: bytes) -> None:
    """Raise FormatError unless an open file begins with ``record``, which was read when it was opened by name."""
    if os.pread(descriptor, len(record), 0) != record:
        raise FormatError(f"{path}: was replaced while being opened; open it again")


class Container:
    """A file that holds many samples; opened on first use and checked to be the one that was indexed."""

    def __init__(self, path: str, stamp: FileStamp) -> None:
        self._path, self._stamp, self._descriptor = path, stamp, -1
        self._shown = printable(os.fsencode(path))

    @property
    def descriptor(self) -> int:
        """The open file. Raises MissingFileError, FormatError when it has been replaced or changed."""
        if self._descriptor < 0:
            self._descriptor = self._opened()
        return self._descriptor

    def _opened(self) -> int:
        try:
            descriptor = os.open(self._path, OPEN_FILE)
        except FileNotFoundError as error:
            raise MissingFileError(f"{self._shown}: no such file; it was there when the set was opened") from error
        except OSError as error:
            raise RenaissanceError(f"{self._shown}: cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FormatError(f"{self._shown}: is not a regular file")
            self._check_unchanged(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_unchanged(self, descriptor: int) -> None:
        found, expected = os.fstat(descriptor), self._stamp
        if found.st_size != expected.size or found.st_mtime_ns != expected.changed:
            raise FormatError(
                f"{self._shown}: changed since the set was opened (size {found.st_size} bytes, expected "
                f"{expected.size}; changed at {found.st_mtime_ns} ns, expected {expected.changed}); open it again"
            )

    def read(self, out: memoryview, offset: int, describe: Callable[[int], str], sample: int) -> None:
        """Fill ``out`` from ``offset``.

        Raises CorruptSample that begins with ``describe(sample)`` when that fails, and FormatError when the file was
        written to since it was indexed: looked at after every read (a microsecond), for a file that is rewritten in
        place would otherwise deliver bytes of no one version.
        """
        descriptor = self.descriptor
        try:
            done = read_fully(descriptor, out, offset)
        except OSError as error:
            raise_unreadable(error, describe(sample))
        self._check_unchanged(descriptor)
        if done < out.nbytes:
            raise CorruptSample(f"{describe(sample)}: only {done} of {out.nbytes} bytes could be read")

    def close(self) -> None:
        """Close the file; reading opens it again."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def inside(folder: str, path: str) -> str:
    """The real path of ``path``, which must lie in the real ``folder``.

    Raises FormatError when a link leads out of it: what is served is what the folder holds.
    """
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, root]) != root:
        raise FormatError(
            f"{path}: is a link out of its folder, to {real}; links are followed only inside {root}. Serve the folder "
            f"that holds the file, or move it here"
        )
    return real
