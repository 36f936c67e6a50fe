"""``renaissance inspect``: what the headers of DTS and idx files and the folders of a tree say, as text to be diffed.

Only headers are read. Values that a good file would not have are listed below the header; ``verify`` reads the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from renaissance.cli import pictures
from renaissance.core.errors import FormatError
from renaissance.core.files import opened_regular
from renaissance.data.formats.dts import MAGIC, read_dts_header
from renaissance.data.formats.idx import IMAGE_MAGIC, read_idx_header


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a .dts or idx file (.gz or not), or a folder tree"
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
    if path.is_dir() and pictures.tree_splits(path):
        pictures.print_tree(path)
        return 0
    if not _is_dts(path):
        return _print_idx(path)
    return pictures.print_packed(path) if pictures.is_packed_pictures(path) else _print_dts(path)


def _is_dts(path: Path) -> bool:
    with opened_regular(path) as (file, size):
        if not size:
            raise FormatError(f"{path}: is empty; expected a DTS or idx file")
        return file.read(len(MAGIC)) == MAGIC


def _print_dts(path: Path) -> int:
    header, problems = read_dts_header(path)
    print(f"{path}: DTS, {path.stat().st_size} bytes")
    pictures.print_header(header)
    for problem in problems:
        print(f"  problem: {problem}")
    return len(problems)


def _print_idx(path: Path) -> int:
    header, compressed = read_idx_header(path)
    axes = ("count", "rows", "columns")[: len(header.shape)]
    kind = "images" if header.magic == IMAGE_MAGIC else "labels"
    print(f"{path}: idx {kind}{', gzip' if compressed else ''}, {path.stat().st_size} bytes")
    print(f"    0  {'magic':<14}  {header.magic}")
    for axis, (title, value) in enumerate(zip(axes, header.shape, strict=True)):
        print(f"  {4 + 4 * axis:3d}  {title:<14}  {value}")
    print(f"       {'unpacked bytes':<14}  {header.file_bytes}")
    return 0
