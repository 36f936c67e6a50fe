"""A dataserver of one's own: started for one trainer, ended with it, whatever way the trainer ends.

It listens in a private temporary folder that the daemon makes and removes itself, watches its parent by pidfd, and
says over a pipe that it is ready, or why it cannot be.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from renaissance.core.errors import DataServerError
from renaissance.core.log import get_logger
from renaissance.core.machine import format_cpus

START_SECONDS = 300.0
"""Kernels may have to be compiled first, on a busy machine."""

STOP_SECONDS = 10.0
_log = get_logger("data.private_daemon")


class PrivateDaemon:
    """A running dataserver process; ``close()`` stops it. Made by ``start_private_daemon``."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the daemon and wait for it. Raises DataServerError when it had died or does not stop in time."""
        ended = self._process.poll()
        if ended is None:
            self._process.terminate()
            try:
                ended = self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise DataServerError(
                    f"the private dataserver (pid {self.pid}) did not stop within {STOP_SECONDS:g} s; killed"
                ) from None
        if ended != 0:
            how = f"was killed by signal {-ended}" if ended < 0 else f"ended with exit code {ended}"
            raise DataServerError(f"the private dataserver (pid {self.pid}) {how}; see its log above")

    def __enter__(self) -> PrivateDaemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except DataServerError as problem:
            if error is None:
                raise
            _log.warning("%s", problem)  # what went wrong first matters more


def start_private_daemon(
    data: Mapping[str, str | Path],
    *,
    workers: int,
    data_format: str = "auto",
    load: str = "auto",
    level: int | str | None = None,
    read_ahead: int = 0,
    digest_folder: str | Path | None = None,
    cpus: Sequence[int] = (),
    nice: int = 0,
    memory_limit: int = 0,
    log_level: str = "WARNING",
    timeout: float = START_SECONDS,
) -> PrivateDaemon:
    """Start ``dataserver serve`` for the data sets ``{name: folder}`` and wait until it serves.

    Its log goes to this process's stderr. ``load`` "fully", "partial" or "auto" and ``level`` (0 to 3 or "RAW", None:
    the one that is there) as ``dataserver serve`` takes them; ``read_ahead`` in bytes, 0: the daemon's default; digests
    of every epoch are written to ``digest_folder``. ``cpus`` empty: any CPU; ``memory_limit`` in bytes, 0: the daemon's
    default.
    Raises DataServerError with the daemon's own words when it cannot start, or after ``timeout`` seconds.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "dataserver", "serve", "--workers", str(workers), "--format", data_format]
    for name, folder in data.items():
        command += ["--data", f"{name}={folder}"]
    command += ["--load", load]
    if level is not None:
        command += ["--level", str(level)]
    if read_ahead:
        command += ["--read-ahead", str(read_ahead)]
    if digest_folder is not None:
        command += ["--digest-folder", os.fspath(digest_folder)]
    if cpus:
        command += ["--affinity", format_cpus(cpus)]
    if memory_limit:
        command += ["--memory-limit", str(memory_limit)]
    command += ["--nice", str(nice), "--log-level", log_level]
    command += ["--ready-fd", str(writer), "--parent-pid", str(os.getpid())]
    try:
        # A session of its own: Ctrl-C and a closing terminal are for the trainer, which ends the daemon itself.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(writer,), start_new_session=True)
    except OSError as error:
        os.close(reader)
        raise DataServerError(f"cannot start the private dataserver ({sys.executable}): {error.strerror}") from None
    finally:
        os.close(writer)
    try:
        answer = _first_line(reader, timeout)
        if answer and "address" in answer:
            return PrivateDaemon(process, answer["address"])
        if answer is None:
            raise DataServerError(f"the private dataserver did not start within {timeout:g} s; killed")
        code = process.wait(STOP_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(reader)
    if "error" in answer:
        raise DataServerError(f"the private dataserver cannot start: {answer['error']}")
    raise DataServerError(f"the private dataserver ended with exit code {code} before it served; see its log above")


def _first_line(reader: int, timeout: float) -> dict[str, str] | None:
    """The daemon's first and only line, {} when it ended without one, None when it took too long."""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    if not poller.poll(timeout * 1000):
        return None
    with open(reader, "rb", closefd=False) as pipe:
        line = pipe.readline()
    answer: dict[str, str] = json.loads(line) if line else {}
    return answer
