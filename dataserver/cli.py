"""The ``dataserver`` command: ``serve``, ``stats``, ``top`` and ``close``.

Errors are one line and exit code 1 (2 for bad usage).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from renaissance import __version__
from renaissance.core import log
from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.core.machine import MAX_WORKERS, allowed_cpus, cpu_quota, format_cpus, parse_cpus, usable_cores
from renaissance.data.address import is_tcp

if TYPE_CHECKING:
    from renaissance.data.client import Access

STUCK_SECONDS = 1.0
"""So long threads of pools, which Python joins at exit whatever they do, may take to end."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    _fill_standard_descriptors()
    options = _parser().parse_args(arguments)
    if sys.platform != "linux":
        print("dataserver: error: needs Linux (memfd, eventfd and descriptor passing)", file=sys.stderr)
        return 1
    code = _run(options)
    if options.run is _serve:
        _leave_stuck_threads(code)
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        code = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that has gone or a full disk can still be reported
        return code
    except RenaissanceError as error:
        _say_failed(options, str(error))
        print(f"dataserver: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output closed it
        _drop_output()
        return 1
    except OSError as error:  # what no part expected to go wrong, such as a folder that may not be searched
        _drop_output()
        _say_failed(options, str(error))
        print(f"dataserver: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before or after the time in which serve() takes the signal itself
        return 130


def _leave_stuck_threads(code: int) -> None:
    """End the process when one of the daemon's threads does not end: Python would wait for it, maybe for ever.

    It reads from a disk that does not answer, or compiles. Nothing is lost: all that had to be freed is by now.
    """
    deadline = time.monotonic() + STUCK_SECONDS
    ours = [t for t in threading.enumerate() if t.name.startswith(("dataserver-grpc", "dataserver-load"))]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in ours):
        log.get_logger("dataserver").warning("ends without waiting for a thread that reads or compiles")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):  # gone, or never there
                stream.flush()
        os._exit(code)


def _drop_output() -> None:
    """What could not be written must not be tried again at exit."""
    if sys.stdout is not None:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_standard_descriptors() -> None:
    """Started without stdin, stdout or stderr, a ring would get its number, and what libraries print would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dataserver", description="Preprocessing daemon of Renaissance.")
    parser.add_argument("--version", action="version", version=f"dataserver {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{serve,stats,top,close}")
    serve = commands.add_parser("serve", help="serve data sets until SIGTERM or Ctrl-C")
    serve.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER", help="a data set; can be repeated")
    serve.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="unix:PATH|tcp:HOST:PORT",
        help="control socket (default: in the user's runtime folder); also control over TCP, with --token-file or TLS",
    )
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain for TCP, PEM")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="token for TCP, in a file of mode 0600")
    serve.add_argument("--metrics", metavar="[HOST:]PORT", help="Prometheus metrics there (HOST default 127.0.0.1)")
    serve.add_argument("--digest-folder", type=Path, metavar="FOLDER", help="write the digests of every epoch there")
    serve.add_argument("--format", choices=("auto", "dts", "raw"), default="auto", help="which files to read")
    serve.add_argument("--load", choices=("auto", "fully", "partial"), default="auto", help="hold the data in memory?")
    serve.add_argument("--level", type=_level, metavar="LEVEL", help="packed level: 0 to 3 or RAW (default: any)")
    serve.add_argument(
        "--read-ahead", type=_bytes, default=0, metavar="SIZE", help="per worker and session, with --load partial (32M)"
    )
    serve.add_argument("--workers", type=int, help="preprocessing processes (default: one per usable core)")
    serve.add_argument("--affinity", metavar="CPUS", help="CPUs for the workers, such as 0-3,8 (default: any)")
    serve.add_argument("--nice", type=int, default=0, help="added niceness of the workers, 0 to 19 (default 0)")
    serve.add_argument("--memory-limit", type=_bytes, default=0, metavar="SIZE", help="for rings and data, such as 4G")
    serve.add_argument("--log-level", choices=LOG_LEVELS, default="INFO")
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    stats = commands.add_parser("stats", help="sessions and workers of a running dataserver")
    _add_address(stats)
    stats.add_argument("--json", action="store_true", help="machine-readable output")
    stats.set_defaults(run=_stats)
    top = commands.add_parser("top", help="live view of a running dataserver; Ctrl-C ends it")
    _add_address(top)
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two frames (default 1)")
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.set_defaults(run=_top)
    close = commands.add_parser("close", help="end a session; its consumers get an error that says so")
    close.add_argument("session", type=int, metavar="SESSION", help="its number, as stats shows it")
    _add_address(close)
    close.set_defaults(run=_close)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataserver", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT (default: the runtime folder's socket)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="its token, for TCP")
    parser.add_argument("--tls-ca", metavar="FILE", help="certificate of the authority that signed its own, for TCP")


def _reached(options: argparse.Namespace) -> tuple[str, Access]:
    from renaissance.data.address import default_address
    from renaissance.data.client import Access

    address = options.dataserver or default_address()
    return address, Access.of(address, options.token_file, options.tls_ca)


def _serve(options: argparse.Namespace) -> int:
    from dataserver.server import ServeOptions, serve

    log.configure(options.log_level)
    data: dict[str, Path] = {}
    for item in options.data:
        name, equals, folder = item.partition("=")
        if not (name and equals and folder):
            raise ValueRejected(f"--data {item!r}: expected NAME=FOLDER, such as mnist=data/mnist")
        if name in data:
            raise ValueRejected(f"--data: {name!r} is given twice")
        data[name] = Path(folder)
    if not 0 <= options.nice <= 19:
        raise ValueRejected(f"--nice is {options.nice}; expected 0 to 19")
    workers = options.workers
    if workers is None:
        cpus, quota = allowed_cpus(), cpu_quota()
        workers = min(MAX_WORKERS, usable_cores(cpus, quota))
        limit = "no quota" if quota is None else f"quota {quota:g}"
        log.get_logger("dataserver").info("%d workers: CPUs %s allowed, %s", workers, format_cpus(cpus), limit)
    serve(
        ServeOptions(
            data=data,
            workers=workers,
            listen=_only([a for a in options.listen if not is_tcp(a)], "unix:PATH"),
            tcp=_only([a for a in options.listen if is_tcp(a)], "tcp:HOST:PORT"),
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            token_file=options.token_file,
            metrics=options.metrics,
            digest_folder=options.digest_folder,
            load=options.load,
            level=options.level,
            read_ahead=options.read_ahead,
            data_format=options.format,
            cpus=parse_cpus(options.affinity) if options.affinity else (),
            nice=options.nice,
            memory_limit=options.memory_limit,
            ready_fd=options.ready_fd,
            parent_pid=options.parent_pid,
        )
    )
    return 0


def _only(addresses: list[str], kind: str) -> str | None:
    if len(addresses) > 1:
        raise ValueRejected(f"--listen: {len(addresses)} addresses {kind} are given; at most one is possible")
    return addresses[0] if addresses else None


def _top(options: argparse.Namespace) -> int:
    from dataserver.top import run_top

    if not 0.1 <= options.interval <= 3600:
        raise ValueRejected(f"--interval is {options.interval:g}; expected 0.1 to 3600 seconds")
    address, access = _reached(options)
    run_top(address, options.interval, options.once, access)
    return 0


def _close(options: argparse.Namespace) -> int:
    from renaissance.data.client import close_session

    if not 0 < options.session < 1 << 63:
        raise ValueRejected(f"session is {options.session}; expected the number of an open one")
    address, access = _reached(options)
    close_session(address, options.session, access=access)
    print(f"session {options.session} closed")
    return 0


def _stats(options: argparse.Namespace) -> int:
    from renaissance.data.client import server_stats

    address, access = _reached(options)
    stats = server_stats(address, access=access)
    if options.json:
        print(json.dumps(stats, indent=2))
        return 0
    print(f"dataserver {stats['version']}, pid {stats['pid']}, up {stats['uptime_seconds']:.0f} s")
    print(f"data sets: {', '.join(stats['datasets'])} ({stats['dataset_bytes'] / 2**20:.0f} MiB loaded)")
    for load in stats["loading"]:
        done = f", {100 * load['done_bytes'] // load['total_bytes']} %" if load["total_bytes"] else ""
        print(f"loading {load['dataset']} {load['split']}{done}")
    for worker in stats["workers"]:
        print(f"worker {worker['worker']}: pid {worker['pid']}, {worker['state']}, {worker['restarts']} restarts")
    print(f"{len(stats['sessions'])} sessions open, {stats['sessions_opened']} opened")
    for s in stats["sessions"]:
        rate = s["samples"] / s["seconds"] if s["seconds"] else 0.0
        waits = f", waits for {s['waits_for']}" if s["waits_for"] else ""
        corrupt = f", {s['corrupt']} samples corrupt" if s["corrupt"] else ""
        share = f", share group {s['share']} of {len(s['members'])}" if s["share"] else ""
        print(
            f"session {s['session']}: {s['dataset']} {s['split']}, batch {s['batch_size']} {s['dtype']} x {s['depth']} "
            f"slots, rank {s['rank']}/{s['world_size']}, seed {s['seed']}, consumer pid {s['consumer_pid'] or '-'}, "
            f"next epoch {s['epoch']} batch {s['batch']}, {s['batches']} batches, {rate:.0f} samples/s "
            f"({s['samples_per_second']:.0f} lately), {s['prepared']} prepared, {s['held']} held{waits}{corrupt}{share}"
        )
        for digest in s["epoch_digests"]:
            print(f"  epoch {digest['epoch']}: digest {digest['digest']}")
    return 0


def _bytes(text: str) -> int:
    """Bytes of ``512M``, ``4G`` or a plain number."""
    scale = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:].upper())
    digits = text[:-1] if scale else text
    if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) << (scale or 0) < 1 << 63:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected a number of bytes, or one with K, M, G or T"
        )
    return int(digits) << (scale or 0)


def _level(text: str) -> int | str:
    if text.upper() == "RAW":
        return "RAW"
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"{text!r} is no packed level; expected 0, 1, 2, 3 or RAW")
    return int(text)


def _say_failed(options: argparse.Namespace, text: str) -> None:
    """A private daemon's parent reports the error itself."""
    ready_fd = getattr(options, "ready_fd", None)
    if ready_fd is not None:
        with suppress(OSError):
            os.write(ready_fd, json.dumps({"error": text}).encode() + b"\n")
