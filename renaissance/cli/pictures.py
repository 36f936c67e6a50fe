"""What ``inspect`` and ``verify`` do with pictures: packed ImageNet files and folder trees."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from renaissance.core.errors import FormatError, MissingFileError
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import CATALOGUE, SPLITS
from renaissance.data.formats.dts import HEADER_FIELDS, OFFSETS, RECORD_BYTES, DtsHeader, show
from renaissance.data.formats.imagenet import (
    DATASET_TYPE,
    EXTENSION_OFFSET,
    LEVELS,
    imagenet_file_name,
    read_extension,
    read_imagenet_header,
)
from renaissance.data.formats.imagenet_verify import Progress, Verified, verify_packed, verify_tree
from renaissance.data.formats.opening import dataset_files
from renaissance.data.sources import Source
from renaissance.data.sources.spec import printable
from renaissance.data.sources.tree import open_tree

SHOWN_BAD = 20
"""Bad pictures that verify prints of one file; the number of all is always given."""


def is_packed_pictures(path: Path) -> bool:
    """Whether a file is a DTS file of pictures, by its header or, where that is unreadable, by its name."""
    with opened_regular(path) as (file, _):
        record = file.read(RECORD_BYTES)
    at = OFFSETS["dataset_type"]
    return record[at : at + len(DATASET_TYPE)] == DATASET_TYPE or _claim(path) is not None


def tree_splits(folder: Path) -> list[str]:
    """The splits that a folder has as a tree of pictures."""
    return [split for split in SPLITS if (folder / split).is_dir()]


def files_of(folder: Path) -> list[Path]:
    """The data files with a known name in a folder: small images, packed or published, then packed pictures.

    Raises MissingFileError when there are none, and no folder tree either.
    """
    names = [imagenet_file_name(split, level) for split in SPLITS for level in LEVELS]
    files = [file for name in CATALOGUE for file in dataset_files(name, folder)]
    files += [folder / name for name in names if (folder / name).is_file()]
    if not files and not tree_splits(folder):
        raise MissingFileError(f"{folder}: no data file with a known name; give the files themselves")
    return files


def print_packed(path: Path) -> int:
    """Print the header of a packed file and the facts of its extension; returns the number of problems."""
    header, problems = read_imagenet_header(path)
    print(f"{path}: DTS, {path.stat().st_size} bytes")
    print_header(header)
    if not problems:
        try:
            _print_extension(read_extension(path, header))
        except FormatError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
    for problem in problems:
        print(f"  problem: {problem}")
    return len(problems)


def print_header(header: DtsHeader) -> None:
    """One line per field: offset, title, value."""
    width = max(len(field.title) for field in HEADER_FIELDS)
    for field in HEADER_FIELDS:
        value = getattr(header, field.name)
        text = f"{value:08x}" if field.name == "body_crc32" else show(value)
        print(f"  {OFFSETS[field.name]:3d}  {field.title:<{width}}  {text}")


def _print_extension(content: dict[str, object] | None) -> None:
    if content is None:
        return
    print(f"  extension (offset {EXTENSION_OFFSET})")
    for key in sorted(content):
        value = content[key]
        if isinstance(value, list) and key == "classes":
            value = f"{len(value)}: {', '.join(map(str, value[:3]))}{', ...' if len(value) > 3 else ''}"
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {part}" for name, part in sorted(value.items()))
        # It may hold what a terminal obeys: the file is anybody's.
        print("       " + printable(f"{key:<12}  {value}".encode("utf-8", "backslashreplace")))


def print_tree(folder: Path) -> None:
    """Print what the splits of a tree hold."""
    for split in tree_splits(folder):
        with Source(*open_tree(str(folder), split)) as source:
            spec = source.spec
            counts = np.bincount(source.labels, minlength=spec.num_classes)
        print(f"{spec.source}: folder tree, {spec.samples} pictures, {spec.stored_bytes} bytes")
        print(f"       classes            {spec.num_classes}")
        print(f"       pictures a class   {counts.min()} to {counts.max()}")
        print(f"       largest file       {spec.largest} bytes")


def check_packed(path: Path, decode: bool, jobs: int) -> tuple[str, tuple[str, ...]]:
    """One line on a good packed file, and a message per bad picture. A name must hold what it promises."""
    split, level = _claim(path) or (None, None)
    with _bar(path.name) as bar:
        found = verify_packed(path, split, level, decode, _advancing(bar), jobs)
    return f"DTS, {_facts(found)}, CRC-32 {found.body_crc32:08x}{', all decoded' if decode else ''}", found.bad


def check_tree(folder: Path, split: str, decode: bool, jobs: int) -> tuple[str, tuple[str, ...]]:
    """One line on one split of a tree, and a message per bad picture."""
    with _bar(split) as bar:
        found = verify_tree(folder, split, decode, _advancing(bar), jobs)
    return f"folder tree, {_facts(found)}{', all decoded' if decode else ''}", found.bad


def _facts(found: Verified) -> str:
    return f"{found.samples} pictures of {found.classes} classes"


def _claim(path: Path) -> tuple[str, int | str] | None:
    names = {imagenet_file_name(split, level): (split, level) for split in SPLITS for level in LEVELS}
    return names.get(path.name)


def _bar(title: str) -> tqdm[NoReturn]:
    return tqdm(desc=title, unit="img", disable=None, leave=False)


def _advancing(bar: tqdm[NoReturn]) -> Progress:
    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return advance
