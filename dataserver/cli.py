"""The ``dataserver`` command: ``serve`` and ``stats``. Errors are one line and exit code 1 (2 for bad usage)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from renaissance import __version__
from renaissance.core import log
from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.core.machine import MAX_WORKERS, allowed_cpus, cpu_quota, format_cpus, parse_cpus, usable_cores

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    _fill_standard_descriptors()
    options = _parser().parse_args(arguments)
    if sys.platform != "linux":
        print("dataserver: error: needs Linux (memfd, eventfd and descriptor passing)", file=sys.stderr)
        return 1
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
    commands = parser.add_subparsers(required=True, metavar="{serve,stats}")
    serve = commands.add_parser("serve", help="serve data sets until SIGTERM or Ctrl-C")
    serve.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER", help="a data set; can be repeated")
    serve.add_argument("--listen", metavar="unix:PATH", help="control socket (default: in the user's runtime folder)")
    serve.add_argument("--format", choices=("auto", "dts", "raw"), default="auto", help="which files to read")
    serve.add_argument("--workers", type=int, help="preprocessing processes (default: one per usable core)")
    serve.add_argument("--affinity", metavar="CPUS", help="CPUs for the workers, such as 0-3,8 (default: any)")
    serve.add_argument("--nice", type=int, default=0, help="added niceness of the workers, 0 to 19 (default 0)")
    serve.add_argument("--memory-limit", type=_bytes, default=0, metavar="SIZE", help="for rings and data, such as 4G")
    serve.add_argument("--log-level", choices=LOG_LEVELS, default="INFO")
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    stats = commands.add_parser("stats", help="sessions and workers of a running dataserver")
    stats.add_argument("--dataserver", metavar="unix:PATH", help="its address (default: the runtime folder's socket)")
    stats.add_argument("--json", action="store_true", help="machine-readable output")
    stats.set_defaults(run=_stats)
    return parser


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
            listen=options.listen,
            data_format=options.format,
            cpus=parse_cpus(options.affinity) if options.affinity else (),
            nice=options.nice,
            memory_limit=options.memory_limit,
            ready_fd=options.ready_fd,
            parent_pid=options.parent_pid,
        )
    )
    return 0


def _stats(options: argparse.Namespace) -> int:
    from renaissance.data.client import server_stats
    from renaissance.data.protocol import default_address

    stats = server_stats(options.dataserver or default_address())
    if options.json:
        print(json.dumps(stats, indent=2))
        return 0
    print(f"dataserver {stats['version']}, pid {stats['pid']}, up {stats['uptime_seconds']:.0f} s")
    print(f"data sets: {', '.join(stats['datasets'])} ({stats['dataset_bytes'] / 2**20:.0f} MiB loaded)")
    for worker in stats["workers"]:
        print(f"worker {worker['worker']}: pid {worker['pid']}, {worker['restarts']} restarts")
    print(f"{len(stats['sessions'])} sessions open, {stats['sessions_opened']} opened")
    for s in stats["sessions"]:
        rate = s["samples"] / s["seconds"] if s["seconds"] else 0.0
        print(
            f"session {s['session']}: {s['dataset']} {s['split']}, batch {s['batch_size']} {s['dtype']} x {s['depth']} "
            f"slots, rank {s['rank']}/{s['world_size']}, seed {s['seed']}, consumer pid {s['consumer_pid'] or '-'}, "
            f"next epoch {s['epoch']} batch {s['batch']}, {s['batches']} batches, {rate:.0f} samples/s"
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


def _say_failed(options: argparse.Namespace, text: str) -> None:
    """A private daemon's parent reports the error itself."""
    ready_fd = getattr(options, "ready_fd", None)
    if ready_fd is not None:
        with suppress(OSError):
            os.write(ready_fd, json.dumps({"error": text}).encode() + b"\n")
