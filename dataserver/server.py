"""Life of a daemon: zygote first, then sockets, gRPC and the event loop; and the way down, which leaves nothing.

``serve`` forks before it imports gRPC; keep it so (a fork with gRPC's threads around can hang the child).
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataserver.digests import DigestFolder
from dataserver.metrics import MetricsServer, metrics_endpoint
from dataserver.store import DatasetStore
from dataserver.tcp import TcpAccess
from dataserver.zygote import Zygote, folder_lock
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.core.kernel_cache import kernels_are_cached
from renaissance.core.log import get_logger
from renaissance.core.machine import MAX_WORKERS, available_memory, format_cpus
from renaissance.data.address import DATA_SUFFIX, default_address, unix_path
from renaissance.data.catalogue import dataset_info
from renaissance.data.compile import compile_recipe
from renaissance.data.making.spec import DEFAULT_READ_AHEAD
from renaissance.data.order import epoch_order
from renaissance.data.protocol import ORDERS, fence
from renaissance.data.readahead import MIN_BUDGET
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Encoding
from renaissance.data.transforms import RandomHorizontalFlip, RandomResizedCrop, RandomRotation

STOP_GRACE_SECONDS = 1.0
DESCRIPTORS = 1 << 16
"""Enough for as many sessions and members as may be open; most systems allow 1024 until they are asked."""

_log = get_logger("dataserver")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line said."""

    data: Mapping[str, Path]
    workers: int
    listen: str | None = None  # None: the default path, or a private folder with ready_fd
    tcp: str | None = None  # tcp:HOST:PORT, control only, beside the Unix socket
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    metrics: str | None = None  # PORT or HOST:PORT
    digest_folder: Path | None = None
    data_format: str = "auto"
    load: str = "auto"
    level: int | str | None = None
    read_ahead: int = 0  # bytes per worker and session, 0: the default
    cpus: tuple[int, ...] = ()
    nice: int = 0
    memory_limit: int = 0  # bytes, 0: half of what is available
    ready_fd: int | None = None  # private daemon: where the address is written
    parent_pid: int | None = None  # private daemon: stop when this process ends


def serve(options: ServeOptions) -> None:
    """Run until SIGTERM, SIGINT, SIGHUP or the end of the parent. Raises RenaissanceError for what is wrong."""
    if not 1 <= options.workers <= MAX_WORKERS:
        raise ValueRejected(f"workers is {options.workers}; expected 1 to {MAX_WORKERS}")
    if options.read_ahead and options.read_ahead < MIN_BUDGET:
        raise ValueRejected(f"read-ahead is {options.read_ahead} bytes; expected at least {MIN_BUDGET}")
    store = DatasetStore(options.data, options.data_format, options.load, options.level)
    if options.read_ahead and not _reads_ahead(options, store):
        raise ValueRejected("--read-ahead is given, but all data are held in memory; add --load partial, or drop it")
    if options.listen is not None:
        unix_path(options.listen)
    tcp = TcpAccess.of(options.tcp, options.tls_cert, options.tls_key, options.token_file)
    metrics = None if options.metrics is None else metrics_endpoint(options.metrics)
    digests = None if options.digest_folder is None else DigestFolder(options.digest_folder)
    _raise_descriptor_limit()
    with ExitStack() as stack:
        stack.callback(store.close)
        _load_kernels(store)  # a signal before the next line ends the process at once: there is nothing to clean up yet
        wake = _catch_signals(stack)
        private = () if options.ready_fd is None else (options.ready_fd,)
        zygote = Zygote(options.workers, options.cpus, options.nice, private)
        stack.callback(zygote.close)
        if digests is not None:
            stack.callback(digests.close)
        _run(options, store, zygote, wake, digests, metrics, tcp, stack)


def _raise_descriptor_limit() -> None:
    """As far as it goes without rights: a session takes a handful here, and one for each file it reads in a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _reads_ahead(options: ServeOptions, store: DatasetStore) -> bool:
    """Whether any data set may be read from its files while it is served."""
    if options.load == "auto":
        return any(not dataset_info(name).pixels for name in store.names)
    return options.load == "partial"


def _run(
    options: ServeOptions,
    store: DatasetStore,
    zygote: Zygote,
    wake: int,
    digests: DigestFolder | None,
    metrics: tuple[str, int] | None,
    tcp: TcpAccess | None,
    stack: ExitStack,
) -> None:
    from dataserver.control import start_control  # imports gRPC: after the fork
    from dataserver.hub import Hub
    from dataserver.service import DataServerService

    folder, path = _socket_path(options)
    if folder is not None:
        # Owned before it is made: a kill between the two leaves nothing either.
        zygote.own_folder(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        os.mkdir(folder, 0o700)
    listener = _bind_data_socket(path)
    stack.callback(listener.close)
    stack.callback(_remove, path + DATA_SUFFIX)  # while it still listens: later the file may be another daemon's
    zygote.own_socket(path + DATA_SUFFIX)
    hub = Hub(zygote, options.workers, lambda: _started(options, store, path))
    stack.callback(hub.close)
    hub.watch(wake, hub.stop)
    if options.parent_pid is not None:
        hub.watch(_parent_handle(options.parent_pid, stack), hub.stop)
    hub.listen(listener)
    limit = _memory_limit(options.memory_limit)
    service = DataServerService(
        hub, store, path + DATA_SUFFIX, limit, options.read_ahead or DEFAULT_READ_AHEAD, digests
    )
    control = start_control(service, path, tcp)
    stack.callback(_remove, path)
    zygote.own_socket(path)
    # Handlers may wait for the hub, which has stopped running by then, or for a load: refuse calls and break loads off
    # first, then wait for the handlers.
    stack.callback(control.stop, STOP_GRACE_SECONDS)
    if metrics is not None:
        stack.callback(MetricsServer(*metrics, lambda: hub.call(service.stats)).close)
    stack.callback(store.interrupt)
    stack.callback(hub.refuse_calls)
    hub.run()
    _log.info("stopping")


def _catch_signals(stack: ExitStack) -> int:
    """A descriptor that becomes readable at SIGTERM, SIGINT or SIGHUP (unless nohup), from here on until the end."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    stack.callback(os.close, reader)
    stack.callback(os.close, writer)
    stack.callback(signal.set_wakeup_fd, -1)
    return reader


def _load_kernels(store: DatasetStore) -> None:
    """Compile or load the kernels once, so that forked workers have them: a restart takes milliseconds."""
    if not kernels_are_cached():
        _log.info("compiling kernels (once per installation); this takes up to a minute or two")
    fence()
    for mode in ORDERS:
        epoch_order(0, 0, 2, shuffle=True, mode=mode, block_starts=np.array([0, 1, 2], np.int64))
    images = np.zeros((1, 4, 4, 1), np.uint8)
    for dtype in (DType.FP32, DType.BF16):
        recipe = Recipe.build([RandomRotation(1)], NormMode.NO_NORM, resolution=4, color_channels=1)
        compiled = compile_recipe(recipe, 4, 4, 1, dtype, 1)
        out = np.zeros((1, compiled.row_bytes), np.uint8)
        zero = np.zeros(1, np.int64)
        compiled.process(images, zero, zero, 0, 0, False, out, zero, np.zeros(1, np.uint64))
    if any(not dataset_info(name).pixels for name in store.names):
        _load_picture_kernels()


def _load_picture_kernels() -> None:
    """The most usual recipe for pictures; other transforms are loaded by the workers that need them."""
    from PIL import Image

    from renaissance.data.pictures import compile_pictures

    stream = io.BytesIO()
    Image.new("RGB", (32, 32)).save(stream, "JPEG")
    stored = np.frombuffer(stream.getvalue(), np.uint8)
    recipe = Recipe.build(
        [RandomResizedCrop(16), RandomHorizontalFlip()], NormMode.IMAGENET, resolution=16, color_channels=3
    )
    pictures = compile_pictures(recipe, DType.FP32, 3)
    pictures.make(stored, Encoding.PICTURES, 0, 0, 0, False, np.zeros(pictures.row_bytes, np.uint8))


def _socket_path(options: ServeOptions) -> tuple[str | None, str]:
    """(private folder to make, and to remove at the end; path of the control socket)."""
    if options.listen is not None:
        return None, unix_path(options.listen)
    if options.ready_fd is None:
        return None, unix_path(default_address())
    name = f"renaissance-{secrets.token_hex(8)}"
    folder = f"{tempfile.gettempdir()}/{name}"
    try:
        return folder, unix_path(f"unix:{folder}/dataserver.sock")
    except ValueRejected:  # TMPDIR is too long for a socket
        return f"/tmp/{name}", f"/tmp/{name}/dataserver.sock"


def _bind_data_socket(path: str) -> socket.socket:
    """Bind PATH.data, replacing what a killed daemon left. Raises DataServerError when another daemon serves there."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise DataServerError(f"unix:{path}: no folder {folder}; make it, or listen elsewhere")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with folder_lock(folder):
            for old in (path, path + DATA_SUFFIX):
                _remove_stale(old)
            old_mask = os.umask(0o177)
            try:
                listener.bind(path + DATA_SUFFIX)
            finally:
                os.umask(old_mask)
            listener.listen(64)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError) and not isinstance(error, DataServerError):
            raise DataServerError(f"unix:{path}: cannot listen: {error.strerror}") from None
        raise
    return listener


def _remove_stale(path: str) -> None:
    if not os.path.lexists(path):
        return
    if not Path(path).is_socket():
        raise DataServerError(f"{path} exists and is not a socket; remove it, or listen elsewhere")
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                continue
            except OSError as error:  # EPROTOTYPE: a live socket of the other kind
                if error.errno == errno.EPROTOTYPE:
                    continue
                raise
            raise DataServerError(f"a dataserver is already serving at unix:{path.removesuffix(DATA_SUFFIX)}")
    os.unlink(path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _parent_handle(parent: int, stack: ExitStack) -> int:
    """A descriptor that becomes readable when the parent process ends, at once if it already has."""
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        raise DataServerError(f"the process {parent} that started this dataserver is gone") from None
    stack.callback(os.close, handle)
    if os.getppid() != parent:
        raise DataServerError(f"the process {parent} that started this dataserver is gone")
    return handle


def _memory_limit(given: int) -> int:
    if given:
        return given
    return available_memory() // 2


def _started(options: ServeOptions, store: DatasetStore, path: str) -> None:
    where = f" on CPUs {format_cpus(options.cpus)}" if options.cpus else ""
    over_tcp = f" and {options.tcp}" if options.tcp else ""
    names = ", ".join(store.names)
    _log.info("serving %s at unix:%s%s, %d workers%s", names, path, over_tcp, options.workers, where)
    if options.ready_fd is not None:
        with suppress(BrokenPipeError):
            os.write(options.ready_fd, json.dumps({"address": f"unix:{path}"}).encode() + b"\n")
        os.close(options.ready_fd)
