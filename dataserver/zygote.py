"""The zygote: the single-threaded process that forks workers, reaps them, and cleans up when the daemon is killed.

It is forked from the daemon before any thread or gRPC object exists, with the kernels already loaded, so a worker
that was killed is replaced by a fork of a few milliseconds. When its socket to the daemon closes, for whatever reason,
it kills the workers, removes the socket files the daemon named, and exits: nothing outlives the daemon.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import multiprocess

from dataserver.worker import worker_main
from renaissance.core.errors import DataServerError
from renaissance.data.protocol import receive

MESSAGE_BYTES = 65536
LOCK_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_context = multiprocess.get_context("fork")
Mark = list[int]


class Zygote:
    """The daemon's handle: start workers, hear of their end. ``fileno()`` can be polled for ``receive()``."""

    def __init__(self, workers: int, cpus: tuple[int, ...], nice: int, not_inherited: tuple[int, ...] = ()) -> None:
        """Fork it. Must be called before any thread exists; ``not_inherited`` are closed in the child."""
        self._socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _context.Process(
            target=_zygote_main,
            args=(child, (self._socket.fileno(), *not_inherited), workers, cpus, nice),
            name="dataserver-zygote",
        )
        self._process.start()
        child.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, worker: int, control: socket.socket, wake: int, pool_page: int) -> None:
        """Start worker number ``worker``; it owns the other end of ``control``'s pair and shares the descriptors."""
        message = json.dumps({"spawn": worker}).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; whoever polls ``fileno()`` learns that
            socket.send_fds(self._socket, [message], [control.fileno(), wake, pool_page])

    def own_socket(self, path: str) -> None:
        """Remove this socket file (if it is still the same) when the daemon is gone."""
        self._tell({"path": path, "mark": _mark(path)})

    def own_folder(self, folder: str) -> None:
        """Remove this folder and what is in it when the daemon is gone; it need not exist yet."""
        self._tell({"folder": folder})

    def _tell(self, request: dict[str, object]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; whoever polls ``fileno()`` learns that
            self._socket.send(json.dumps(request).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next report: ``{"started": w, "pid": n}``, ``{"exited": w, "pid": n, "code": c}``, None when it died."""
        message = receive(self._socket)
        report: dict[str, Any] | None = json.loads(message) if message else None
        return report

    def close(self, timeout: float = 10.0) -> None:
        """End zygote and workers and wait for them. Raises DataServerError when that takes longer than ``timeout``."""
        self._socket.close()
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise DataServerError(f"the worker supervisor (pid {self.pid}) did not end within {timeout:g} s; killed")


def _zygote_main(
    control: socket.socket, not_inherited: tuple[int, ...], workers: int, cpus: tuple[int, ...], nice: int
) -> None:
    for fd in not_inherited:  # an end that stays open here would hide the daemon's death from others
        os.close(fd)
    # What a terminal or a group-wide kill sends is for the daemon; it ends this process by closing the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if nice:
        os.nice(nice)
    children: dict[int, tuple[int, Any]] = {}  # sentinel -> (worker, process)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    paths: list[tuple[str, Mark]] = []
    folder: str | None = None
    running = True
    while running:
        for fd, _ in poller.poll():
            if fd in children:
                worker, process = children.pop(fd)
                poller.unregister(fd)
                process.join()
                _report(control, {"exited": worker, "pid": process.pid, "code": process.exitcode})
                process.close()
                continue
            try:
                message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
            except ConnectionResetError:  # the daemon died with reports unread
                message = b""
            if not message:
                running = False
                break
            request = json.loads(message)
            if "spawn" in request:
                worker = int(request["spawn"])
                process = _context.Process(
                    target=_worker_entry,
                    args=(worker, workers, control, fds, os.getpid()),
                    name=f"dataserver-worker-{worker}",
                )
                process.start()
                children[process.sentinel] = worker, process
                poller.register(process.sentinel, select.POLLIN)
                for received in fds:
                    os.close(received)
                _report(control, {"started": worker, "pid": process.pid})
            elif "path" in request:
                paths.append((request["path"], request["mark"]))
            else:
                folder = request["folder"]
    for _, process in children.values():
        process.kill()
    for _, process in children.values():
        process.join()
    remove_sockets(paths, folder)


def _report(control: socket.socket, report: dict[str, Any]) -> None:
    with suppress(OSError):  # the daemon is gone; the next poll says so
        control.send(json.dumps(report).encode())


def _worker_entry(worker: int, workers: int, zygote_end: socket.socket, fds: list[int], zygote_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote_pid:  # it died before the line above
        os._exit(1)
    zygote_end.close()
    control, wake, pool_page = fds
    worker_main(worker, workers, socket.socket(fileno=control), wake, pool_page)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Exclusive among daemons that bind or remove sockets in one folder; leaves no lock file.

    Raises DataServerError when somebody keeps the lock; in a folder like /tmp that may be anybody.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataServerError(
                        f"{folder}: locked by another process for {LOCK_SECONDS:g} s; listen in a folder of your own"
                    ) from None
                time.sleep(0.01)  # nothing wakes a waiter after a given time; other daemons hold it for microseconds
        yield
    finally:
        os.close(fd)


def _mark(path: str) -> Mark:
    """Tells a file from its successor; the time because some file systems give an inode number again at once."""
    status = os.stat(path)
    return [status.st_ino, status.st_mtime_ns]


def remove_sockets(paths: list[tuple[str, Mark]], folder: str | None) -> None:
    """Remove socket files that still are the ones we made, then the private folder."""
    for path, mark in paths:
        with suppress(OSError), folder_lock(Path(path).parent):
            if _mark(path) == mark:
                os.unlink(path)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
