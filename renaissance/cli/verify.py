"""``renaissance verify``: reads data files in full and checks all that can be checked without a second copy.

DTS: every header field, the size, the CRC-32 of the body, every label. idx: magic, sizes, gzip checksum, labels.
CIFAR: whole records, labels; in its archive also the gzip checksum. Pictures, packed or in a folder tree: every block
table and the header of every picture; with --decode each is decoded.
A file that carries the name of a published one must also have the CRC-32 under which it was published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from renaissance.cli import pictures
from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.core.files import opened_regular
from renaissance.core.machine import usable_cores
from renaissance.data.catalogue import SPLITS, dataset_info, published_file
from renaissance.data.formats.cifar import check_cifar_file
from renaissance.data.formats.dts import LAYOUTS, MAGIC, read_dts
from renaissance.data.formats.idx import (
    LABEL_MAGIC,
    MNIST_FILES,
    check_published,
    find_raw,
    read_idx_header,
    read_idx_images,
    read_idx_labels,
    read_raw_mnist,
)
from renaissance.data.formats.processes import check_jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a data file, or the folder of a data set")
    parser.add_argument("--decode", action="store_true", help="decode every picture, a few milliseconds of a core each")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that decode (default: cores at hand)")


def run(arguments: argparse.Namespace) -> int:
    """Check every file and print one line each; 1 when any fails."""
    failures = files = 0
    if arguments.jobs is not None and not arguments.decode:
        raise ValueRejected("verify: --jobs acts together with --decode")
    jobs = 1 if not arguments.decode else usable_cores() if arguments.jobs is None else check_jobs(arguments.jobs)
    for path in arguments.paths:
        failed_here = 0
        splits = pictures.tree_splits(path)
        for split in splits:
            files += 1
            failed_here += _report(path / split, partial(pictures.check_tree, path, split, arguments.decode, jobs))
        for file in pictures.files_of(path) if path.is_dir() else [path]:
            files += 1
            failed_here += _report(file, partial(_check, file, arguments.decode, jobs))
        failures += failed_here
        if path.is_dir() and not failed_here:
            failures += _check_pairs(path)
    if failures:
        sys.stdout.flush()
        print(f"error: {failures} of {files} files failed", file=sys.stderr)
    return 1 if failures else 0


def _report(path: Path, check: Callable[[], tuple[str, tuple[str, ...]]]) -> int:
    try:
        text, bad = check()
    except RenaissanceError as error:
        print(f"FAIL  {' '.join(str(error).split())}")
        return 1
    if not bad:
        print(f"ok    {path}: {text}")
        return 0
    print(f"FAIL  {path}: {text}; {len(bad)} pictures cannot be used")
    for message in bad[: pictures.SHOWN_BAD]:
        print(f"      {' '.join(message.split())}")
    if len(bad) > pictures.SHOWN_BAD:
        print(f"      and {len(bad) - pictures.SHOWN_BAD} more")
    return 1


def _check_pairs(folder: Path) -> int:
    # Two good files can still not belong together; only complete pairs are compared.
    failures = 0
    for split, names in MNIST_FILES.items():
        if find_raw(folder, names.images) and find_raw(folder, names.labels):
            try:
                read_raw_mnist(folder, split)
            except RenaissanceError as error:
                failures += 1
                print(f"FAIL  {' '.join(str(error).split())}")
    return failures


def _check(path: Path, decode: bool, jobs: int) -> tuple[str, tuple[str, ...]]:
    with opened_regular(path) as (file, _):
        is_dts = file.read(len(MAGIC)) == MAGIC
    if (is_dts or path.suffix == ".dts") and pictures.is_packed_pictures(path):
        return pictures.check_packed(path, decode, jobs)
    return _check_small(path, is_dts), ()


def _check_small(path: Path, is_dts: bool) -> str:
    if is_dts or path.suffix == ".dts":
        name, split = _claimed_by_name(path)
        header, labels, _ = read_dts(path, name, split)
        return f"DTS, {labels.size} samples, CRC-32 {header.body_crc32:08x}"
    published = published_file(path.name)
    if published is not None:
        check_published(path, published)
    return f"{_content(path)}, as published (CRC-32 {published.crc32:08x})" if published else _content(path)


def _content(path: Path) -> str:
    cifar = check_cifar_file(path)
    if cifar is not None:
        return cifar
    info = dataset_info("mnist")  # the one data set that is published as idx files
    header_only, _ = read_idx_header(path)
    is_labels = header_only.magic == LABEL_MAGIC
    count = len(read_idx_labels(path, info) if is_labels else read_idx_images(path, info))
    return f"idx, {count} {'labels' if is_labels else 'images'}"


def _claimed_by_name(path: Path) -> tuple[str | None, str | None]:
    # A file under a well-known name must hold what that name promises.
    for name, layout in LAYOUTS.items():
        for split in SPLITS:
            if path.name == layout.file_name(split):
                return name, split
    return None, None
