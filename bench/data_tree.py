"""Seconds and bytes it takes to open a folder tree of 1.3 million pictures; no peer, one line of JSON.

Makes CLASSES folders of tiny files (one byte each, with names of ImageNet's length), opens the tree in a fresh process
each time, and removes what it made, also when it is interrupted. "first" is the opening after the tree was made, which
the system may still know whole; "forgotten" is one after names and inodes were dropped from its memory (their blocks on
the disk may still be cached), which needs root and ``--forget``, because every other process on the machine feels it.
``BENCH_TREE`` names a folder to work in (default: bench/.cache); it needs an inode and, on most file systems, 4 KiB for
each file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from renaissance.data.sources import Source

CLASSES, FILES = 1000, 1_300_000
READS = 20_000
DROP_SLAB = "2\n"
"""Written to /proc/sys/vm/drop_caches: forget names and inodes."""


def grow(root: Path, classes: int, files: int) -> None:
    """Make root/train/<class>/<class>_<n>.JPEG, ``files`` of them in ``classes`` folders."""
    for number in range(classes):
        name = f"n{number:08}"
        folder = root / "train" / name
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for picture in range(number, files, classes):
                file = os.open(f"{name}_{picture}.JPEG", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=descriptor)
                os.write(file, b"\xff")
                os.close(file)
        finally:
            os.close(descriptor)


def measure(root: Path, sizes: bool) -> dict[str, float]:
    """Open the tree in this process and read some of it: seconds, bytes, microseconds a sample."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    with Source.open("imagenet", root, "train", measure=sizes) as source:
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        room = memoryview(bytearray(64))
        samples = random.Random(0).choices(range(source.spec.samples), k=min(READS, source.spec.samples))
        begin = time.perf_counter()
        for sample in samples:
            source.read_into(sample, room)
        read = (time.perf_counter() - begin) / len(samples)
        return {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu, 2),
            "samples": source.spec.samples,
            "index_bytes": source.spec.index_bytes,
            "peak_rss_growth_mib": round((peak - before) / 1024, 1),
            "read_us": round(read * 1e6, 1),
        }


def opened(root: Path, *options: str) -> dict[str, float]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "bench.data_tree", "--measure", str(root), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def forget() -> None:
    """Make the system forget names and inodes. Raises PermissionError without root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text(DROP_SLAB)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Make the tree, open it several times, remove it."""
    base = Path(os.environ.get("BENCH_TREE") or Path(__file__).resolve().parent / ".cache")
    base.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="tree-", dir=base))
    try:
        begin = time.perf_counter()
        grow(root, arguments.classes, arguments.files)
        made = time.perf_counter() - begin
        first, forgotten = opened(root), None
        if arguments.forget:
            forget()
            forgotten = opened(root)["seconds"]
        warm = [opened(root) for _ in range(arguments.rounds)]
        unmeasured = opened(root, "--no-sizes")
        samples, index = first["samples"], first["index_bytes"]
        return {
            "bench": "data_tree",
            "unit": "s",
            "files": samples,
            "classes": arguments.classes,
            "ours": statistics.median(round_["seconds"] for round_ in warm),
            "rounds": [round_["seconds"] for round_ in warm],
            "cpu_seconds": statistics.median(round_["cpu_seconds"] for round_ in warm),
            "first": first["seconds"],
            "forgotten": forgotten,
            "without_sizes": unmeasured["seconds"],
            "index_bytes": index,
            "index_bytes_a_file": round(index / samples, 2),
            "peak_rss_growth_mib": max(round_["peak_rss_growth_mib"] for round_ in warm),
            "read_us": statistics.median(round_["read_us"] for round_ in warm),
            "made_seconds": round(made, 1),
            "python": platform.python_version(),
            "load_average": round(os.getloadavg()[0], 1),
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forget", action="store_true", help="also open after the system forgot the names (root)")
    parser.add_argument("--measure", type=Path, metavar="ROOT", help=argparse.SUPPRESS)
    parser.add_argument("--no-sizes", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, not arguments.no_sizes)))
    else:
        print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
