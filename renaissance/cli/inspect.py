"""``renaissance inspect``: what the headers of data files and the folders of a tree say, as text to be diffed.

Only headers are read. Values that a good file would not have are listed below the header; ``verify`` reads the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from renaissance.cli import pictures
from renaissance.core.errors import FormatError
from renaissance.core.files import opened_regular
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, CifarLayout, cifar_layout_of, cifar_records
from renaissance.data.formats.dts import MAGIC, read_dts_header
from renaissance.data.formats.idx import IMAGE_MAGIC, read_idx_header


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a .dts, idx (.gz or not) or CIFAR file, a folder of them, or a folder tree",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every file; 1 when a header has problems, an error when a file has no header at all."""
    problems = 0
    for index, path in enumerate(arguments.files):
        if index:
            print()
        problems += _print_path(path)
    return 1 if problems else 0


def _print_path(path: Path) -> int:
    if path.is_dir():
        return _print_folder(path)
    if _is_dts(path):
        return pictures.print_packed(path) if pictures.is_packed_pictures(path) else _print_dts(path)
    known = cifar_layout_of(path.name)
    return _print_idx(path) if known is None else _print_cifar(path, *known)


def _print_folder(folder: Path) -> int:
    files, problems = pictures.files_of(folder), 0
    pictures.print_tree(folder)
    for index, file in enumerate(files):
        if index or pictures.tree_splits(folder):
            print()
        problems += _print_path(file)
    return problems


def _is_dts(path: Path) -> bool:
    with opened_regular(path) as (file, size):
        if not size:
            raise FormatError(f"{path}: is empty; expected a data file")
        return file.read(len(MAGIC)) == MAGIC


def _print_dts(path: Path) -> int:
    header, problems = read_dts_header(path)
    print(f"{path}: DTS, {path.stat().st_size} bytes")
    pictures.print_header(header)
    for problem in problems:
        print(f"  problem: {problem}")
    return len(problems)


def _print_cifar(path: Path, layout: CifarLayout, split: str) -> int:
    count = cifar_records(path, layout)
    print(f"{path}: {layout.info.name} {split}, {count * layout.record_bytes} bytes")
    print(f"       {'records':<14}  {count}")
    print(f"       {'record bytes':<14}  {layout.record_bytes}")
    return 0


def _print_idx(path: Path) -> int:
    if any(path.name == layout.archive for layout in CIFAR_LAYOUTS.values()):
        print(
            f"{path}: archive, {path.stat().st_size} bytes; its members have no header, `renaissance verify` reads them"
        )
        return 0
    header, compressed = read_idx_header(path)
    axes = ("count", "rows", "columns")[: len(header.shape)]
    kind = "images" if header.magic == IMAGE_MAGIC else "labels"
    print(f"{path}: idx {kind}{', gzip' if compressed else ''}, {path.stat().st_size} bytes")
    print(f"    0  {'magic':<14}  {header.magic}")
    for axis, (title, value) in enumerate(zip(axes, header.shape, strict=True)):
        print(f"  {4 + 4 * axis:3d}  {title:<14}  {value}")
    print(f"       {'unpacked bytes':<14}  {header.file_bytes}")
    return 0
