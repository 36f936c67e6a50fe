"""``renaissance pack``: the published files of a data set, or a tree of pictures, become DTS files.

A target that already holds the same samples is left alone, so the command can run before every training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from renaissance.cli import pack_imagenet
from renaissance.core.errors import MissingFileError, RenaissanceError
from renaissance.data.catalogue import SPLITS, dataset_info
from renaissance.data.formats.dts import body_crc32, layout_of, read_dts, write_dts
from renaissance.data.formats.opening import RAW_READERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("dataset", help="name of the data set, for example mnist")
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="folder of the published files")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to; made if missing")
    parser.add_argument("--split", choices=(*SPLITS, "both"), default="both", help="which split (default: both)")
    parser.add_argument("--force", action="store_true", help="replace a target that holds something else")
    pack_imagenet.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Pack the splits asked for, each printed with its path, samples and CRC-32."""
    info = dataset_info(arguments.dataset)
    pictures = info.name == "imagenet"
    if not pictures:
        pack_imagenet.refuse_options(arguments, info.name)
    output: Path = arguments.output
    if not arguments.input.is_dir():
        raise MissingFileError(
            f"{arguments.input}: no such folder; --input is the one that holds the files of {info.name}"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RenaissanceError(f"{output}: cannot be made: {error.strerror}") from error
    if pictures:
        return pack_imagenet.run(arguments)
    for split in SPLITS if arguments.split == "both" else (arguments.split,):
        _pack_split(info.name, split, arguments.input, output, arguments.force)
    return 0


def _pack_split(name: str, split: str, source: Path, output: Path, force: bool) -> None:
    labels, images, _ = RAW_READERS[name](source, split)
    target = output / layout_of(name).file_name(split)
    crc = body_crc32(labels, images)
    if target.exists() and not force:
        existing = _existing_crc(target, name, split)
        if existing != crc:
            raise RenaissanceError(
                f"{target}: exists and holds other samples (CRC-32 {existing:08x}; {source} gives {crc:08x}); "
                f"--force replaces it"
            )
        print(f"{target}: up to date, {labels.size} samples, CRC-32 {crc:08x}")
        return
    write_dts(target, name, split, np.asarray(labels), images)
    print(f"{target}: packed {labels.size} samples, CRC-32 {crc:08x}")


def _existing_crc(target: Path, name: str, split: str) -> int:
    try:
        header, _, _ = read_dts(target, name, split)
    except RenaissanceError as error:
        raise RenaissanceError(f"{error}. The existing file is not usable; --force replaces it") from error
    return header.body_crc32
