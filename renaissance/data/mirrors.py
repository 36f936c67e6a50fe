"""One published file from one of several HTTP mirrors, so that a broken network costs time and nothing else.

The bytes grow in ``NAME.part`` beside the target; whatever ends a transfer (a stall, a broken connection, a full disk,
Ctrl-C) leaves it there, and the next try goes on where it ended, on any mirror. The final name appears only for a file
with the published size and CRC-32. Servers are not believed: what they say about length, ranges and content is checked,
and an answer that cannot be the file never replaces bytes that may be.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import renaissance
from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.core.files import flush_folder
from renaissance.data.catalogue import PublishedFile

STALL_SECONDS = 30.0
MAX_REDIRECTS = 5
_CHUNK = 1 << 16
_READ = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
"""Bounded: Python refuses to make numbers of thousands of digits, with an error of its own."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the file, the bytes it has so far and the bytes of the whole."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How patient a transfer is. A stall is the time without a single byte; there is no limit for the whole."""

    stall_seconds: float = STALL_SECONDS
    attempts: int = 3
    """Tries on one mirror in a row that bring nothing new."""
    pause_seconds: float = 1.0
    """Wait before the next try; it doubles while nothing new comes."""


@dataclass(slots=True)
class MirrorState:
    """What was learnt about mirrors while several files are fetched: one that cannot be reached is asked once."""

    unreachable: dict[str, str] = field(default_factory=dict)  # host: reason


class MirrorsFailed(RenaissanceError):
    """No mirror gave the file; ``reasons`` has one line for each that was tried."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name}: no mirror gave it: {'; '.join(reasons) or 'there is none'}")
        self.reasons = tuple(reasons)


class _Refused(Exception):
    """This mirror does not have the file; asking again changes nothing."""


class _Broken(Exception):
    """The transfer ended too early; another try may get further."""


class _Unreachable(_Refused):
    """No connection to the host."""


def check_mirrors(mirrors: Sequence[str]) -> tuple[str, ...]:
    """The URLs of the mirrors' folders, each ending with ``/``. Raises ValueRejected for other than http and https."""
    for url in mirrors:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueRejected(
                f"mirror {url!r}: expected the http or https address of a folder, such as https://host/mnist"
            )
    return tuple(url if url.endswith("/") else f"{url}/" for url in mirrors)


def fetch_file(
    published: PublishedFile,
    folder: Path,
    mirrors: Sequence[str],
    options: TransferOptions | None = None,
    on_progress: Progress | None = None,
    state: MirrorState | None = None,
) -> str:
    """Fetch a file into ``folder`` under its name, replacing what is there, and return the mirror it came from.

    Mirrors are URLs of folders, tried in order. Raises MirrorsFailed when none gives the published bytes, and
    RenaissanceError when the disk refuses or another process is fetching the same file.
    """
    options, state, target = options or TransferOptions(), state or MirrorState(), folder / published.name
    reasons: list[str] = []
    with _part_file(target) as part:
        _check_room(folder, published, _length(part))
        for mirror in check_mirrors(mirrors):
            host = urllib.parse.urlsplit(mirror).netloc
            if host in state.unreachable:
                reasons.append(f"{host}: {state.unreachable[host]}")
                continue
            transfer = _Transfer(published, f"{mirror}{published.name}", part, options.stall_seconds, on_progress)
            try:
                transfer.run(options)
            except _Refused as refusal:
                if isinstance(refusal, _Unreachable):
                    state.unreachable[host] = str(refusal)
                reasons.append(f"{host}: {refusal}")
                continue
            os.fsync(part.fileno())
            os.replace(_part_name(target), target)
            flush_folder(folder)
            return mirror
    raise MirrorsFailed(published.name, reasons)


class _Transfer:
    """The tries on one mirror. ``part`` holds the bytes so far; its position means nothing between two calls."""

    def __init__(
        self, published: PublishedFile, url: str, part: FileIO, stall_seconds: float, on_progress: Progress | None
    ) -> None:
        self.published, self.url, self.part = published, url, part
        self.stall_seconds, self.on_progress = stall_seconds, on_progress
        self.validator: str | None = None  # ETag or date of what ``part`` holds, when this mirror sent it
        self.may_resume = True
        self.joined = False  # ``part`` is made of more than one answer

    def run(self, options: TransferOptions) -> None:
        """Return when ``part`` is the published file. Raises _Refused."""
        failures, furthest = 0, _length(self.part)
        while True:
            try:
                self._complete()
            except _Broken as problem:
                failures = failures + 1 if _length(self.part) <= furthest else 0
                furthest = max(furthest, _length(self.part))
                if failures >= options.attempts:
                    raise _Refused(f"{problem}, after {failures} tries") from None
                time.sleep(options.pause_seconds * 2**failures)
                continue
            crc = _crc32(self.part)
            if crc == self.published.crc32:
                return
            looks = _looks_like(self.part)
            _truncate(self.part)
            if not self.joined:
                raise _Refused(f"sent {looks}with CRC-32 {crc:08x}; published as {self.published.crc32:08x}")
            self.may_resume = False  # the two halves were not of one file; once more from the start

    def _complete(self) -> None:
        """Bring ``part`` to its full length. Raises _Broken or _Refused."""
        start = _length(self.part)
        if start == self.published.size and self.may_resume:
            self.joined = True
            return
        if start >= self.published.size or not self.may_resume:
            _truncate(self.part)
            start = 0
        with self._request(start) as response:
            start = self._checked_start(response, start)
            self.validator, self.joined = _validator(response), start > 0
            self._receive(response, start)

    @contextmanager
    def _request(self, start: int) -> Iterator[http.client.HTTPResponse]:
        headers = {"User-Agent": f"renaissance/{renaissance.__version__}", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if self.validator:
                headers["If-Range"] = self.validator
        try:
            response = _opener().open(urllib.request.Request(self.url, headers=headers), timeout=self.stall_seconds)
        except urllib.error.HTTPError as error:
            with error:
                text = f"answers {error.code} {error.reason}"
            # 416: what we have is already longer than its file; 429 and 5xx: it may change its mind.
            raise _Broken(text) if error.code == 429 or error.code >= 500 else _Refused(text) from None
        except TimeoutError:  # connected, but nothing came
            raise _Broken(f"sent no answer within {self.stall_seconds:g} s") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Unreachable(f"no answer within {self.stall_seconds:g} s") from None
            raise _Unreachable(f"no connection ({error.reason})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"broke off ({_why(error)})") from None
        except ValueError as error:  # urllib, of an address that is none
            raise _Refused(f"redirects to an impossible address ({error})") from None
        with response:
            yield response

    def _checked_start(self, response: http.client.HTTPResponse, start: int) -> int:
        """Offset of the first byte of the body. Raises unless the answer can be the rest, or the whole, of the file."""
        size, length = self.published.size, response.headers.get("Content-Length")
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise _Refused(f"sends the file with encoding {encoding!r}, which was not asked for")
        if response.status == 206:
            found = re.fullmatch(_CONTENT_RANGE, response.headers.get("Content-Range", "").strip())
            if not found or int(found[1]) != start or found[3] not in (str(size), "*"):
                said = response.headers.get("Content-Range")
                if found and int(found[1]) == start:
                    raise _Refused(f"has a file of {found[3]} bytes; published with {size}")
                self.may_resume = False
                raise _Broken(f"asked for bytes from {start}, it sends {said and said[:80]!r}")
        elif response.status == 200:
            start = 0  # the server knows no ranges, or its file has changed
        else:
            raise _Refused(f"answers {response.status} {response.reason}")
        if length is not None and length.strip() != str(size - start):
            what = "a page" if response.headers.get_content_type() == "text/html" else "a file"
            sent = str(int(length) + start) if re.fullmatch("[0-9]{1,18}", length.strip()) else repr(length[:40])
            raise _Refused(f"sends {what} of {sent} bytes; published with {size}")
        if length is None and response.headers.get_content_type() == "text/html":
            raise _Refused("sends a page, not the file")
        return start

    def _receive(self, response: http.client.HTTPResponse, start: int) -> None:
        size, done = self.published.size, start
        _truncate(self.part, start)
        while True:
            try:
                data = response.read1(_CHUNK)
            except TimeoutError:
                raise _Broken(f"sent nothing for {self.stall_seconds:g} s after {done} of {size} bytes") from None
            except (OSError, http.client.HTTPException) as error:
                raise _Broken(f"broke off after {done} of {size} bytes ({_why(error)})") from None
            if not data:
                break
            done += len(data)
            if done > size:
                _truncate(self.part)
                raise _Refused(f"sends more than the {size} bytes that were published")
            _write(self.part, data)
            if self.on_progress is not None:
                self.on_progress(self.published.name, done, size)
        if done < size:
            raise _Broken(f"broke off after {done} of {size} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MAX_REDIRECTS

    def redirect_request(self, request: Any, file: Any, code: Any, text: Any, headers: Any, url: str) -> Any:
        """Follow a redirection, but never from https to something that anybody on the way could change."""
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme not in ("http", "https") or (request.type == "https" and scheme != "https"):
            raise urllib.error.HTTPError(url, code, f"(redirects to {url}, which is not https)", headers, file)
        return super().redirect_request(request, file, code, text, headers, url)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects())


def _validator(response: http.client.HTTPResponse) -> str | None:
    # A weak ETag says that two files mean the same, not that their bytes are the same.
    tag = response.headers.get("ETag", "").strip()
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# -- the file that grows ------------------------------------------------------------------------------------------


def _part_name(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


@contextmanager
def _part_file(target: Path) -> Iterator[FileIO]:
    """``NAME.part``, open and locked. An empty one is removed in the end."""
    path = _part_name(target)
    file = _opened_part(path)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise RenaissanceError(f"{path}: another process is fetching this file; wait for it") from error
        if _is_at(file, path):
            break
        file.close()  # it was finished and renamed between our opening and our locking
        file = _opened_part(path)
    with file:
        try:
            yield file
        finally:
            if not _length(file) and _is_at(file, path):
                path.unlink()


def _opened_part(path: Path) -> FileIO:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, flags, 0o666))
    except OSError as error:
        raise RenaissanceError(f"{path}: cannot be written: {error.strerror}") from error


def _is_at(file: FileIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _check_room(folder: Path, published: PublishedFile, present: int) -> None:
    free, needed = shutil.disk_usage(folder).free, published.size - present
    if free < needed:
        raise RenaissanceError(
            f"{folder / published.name}: {needed} bytes are missing, and the disk has room for {free}; make room there "
            "or choose another folder"
        )


def _write(part: FileIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[part.write(view) :]
    except OSError as error:
        raise RenaissanceError(
            f"{part.name}: cannot be written: {error.strerror}; what was fetched is kept, the next try goes on there"
        ) from error


def _length(part: FileIO) -> int:
    return os.fstat(part.fileno()).st_size


def _truncate(part: FileIO, length: int = 0) -> None:
    part.truncate(length)
    part.seek(length)


def _crc32(part: FileIO) -> int:
    part.seek(0)
    crc = 0
    while data := part.read(_READ):
        crc = zlib.crc32(data, crc)
    return crc


def _looks_like(part: FileIO) -> str:
    part.seek(0)
    return "a web page " if part.read(64).lstrip()[:1] == b"<" else "a file "
