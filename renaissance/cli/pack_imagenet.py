"""``renaissance pack imagenet``: a folder tree of pictures becomes one DTS file a split.

The options here are those that only pictures have; ``renaissance.cli.pack`` has the common ones. A run that was killed
continues when the same command is given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.core.machine import usable_cores
from renaissance.data.catalogue import SPLITS
from renaissance.data.formats.imagenet import LEVELS
from renaissance.data.formats.imagenet_inputs import read_class_list
from renaissance.data.formats.imagenet_order import ORDERS, PACKINGS
from renaissance.data.formats.imagenet_pack import ON_CORRUPT, PackOptions, PackResult, Progress, pack_imagenet

_OPTIONS = {
    "level": "--level",
    "short_side": "--short-side",
    "jobs": "--jobs",
    "classes": "--classes",
    "order": "--order",
    "seed": "--seed",
    "packing": "--packing",
    "restart_windows": "--restart-windows",
    "on_corrupt": "--on-corrupt",
    "resume": "--resume/--no-resume",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that act for pictures; each is None unless given."""
    group = parser.add_argument_group("pictures (imagenet)", "--input is ROOT with ROOT/{train,val}/<class>/*.JPEG")
    group.add_argument(
        "--level",
        choices=[str(level) for level in LEVELS],
        help="0: original streams (default); 1: short side 400; 2, 3: also cut to 600 x 400, 3 with lower quality; "
        "RAW: pixels, for those who would rather spend disk than CPU",
    )
    group.add_argument("--short-side", type=int, metavar="N", help="level RAW: short side in pixels (default 256)")
    group.add_argument("--jobs", type=int, metavar="N", help="processes that make pictures (default: cores at hand)")
    group.add_argument(
        "--classes", type=Path, metavar="FILE", help="list of class folders, one a line: the line is the label"
    )
    group.add_argument(
        "--order", choices=ORDERS, help="order in the file: philox (default), python42 as existing files have, file"
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of order philox (default 42)")
    group.add_argument("--packing", choices=PACKINGS, help="level 0: greedy packs tighter (default streaming)")
    group.add_argument(
        "--restart-windows",
        choices=("on", "off"),
        help="restart markers, without loss, so that a crop decodes only its part (default: on for levels 1 to 3, "
        "off for level 0, which keeps the original bytes)",
    )
    group.add_argument(
        "--on-corrupt",
        choices=ON_CORRUPT,
        help="what a bad picture does: end the run (default) or be left out; level 0 looks at headers only",
    )
    group.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=None, help="continue a killed run (default)"
    )


def refuse_options(arguments: argparse.Namespace, name: str) -> None:
    """Raise ValueRejected when an option of this file was given for another data set."""
    for attribute, option in _OPTIONS.items():
        if getattr(arguments, attribute) is not None:
            raise ValueRejected(f"pack {name}: {option} acts for imagenet only")


def run(arguments: argparse.Namespace) -> int:
    """Pack the splits asked for, each with a progress bar, a summary and the list of what was left out."""
    classes = None if arguments.classes is None else read_class_list(arguments.classes)
    options = options_of(arguments).settled()
    splits = SPLITS if arguments.split == "both" else (arguments.split,)
    for split in splits:  # before the first is packed for hours
        if not (arguments.input / split).is_dir():
            raise MissingFileError(f"{arguments.input / split}: no such folder; expected class folders in it")
    for split in splits:
        with tqdm(desc=split, unit="img", disable=None, leave=False) as bar:
            result = pack_imagenet(arguments.input, arguments.output, split, options, classes, _advancing(bar))
        _print(result)
    return 0


def _advancing(bar: tqdm[NoReturn]) -> Progress:
    def advance(done: int, total: int) -> None:
        if bar.total is None:
            bar.reset(total)
            bar.initial = done  # pictures of an earlier run do not count as speed
        bar.update(done - bar.n)

    return advance


def options_of(arguments: argparse.Namespace) -> PackOptions:
    """The options of a command line; what is not given keeps its default."""
    given = {
        "level": arguments.level,
        "short_side": arguments.short_side,
        "order": arguments.order,
        "seed": arguments.seed,
        "packing": arguments.packing,
        "restart_windows": None if arguments.restart_windows is None else arguments.restart_windows == "on",
        "on_corrupt": arguments.on_corrupt,
        "jobs": usable_cores() if arguments.jobs is None else arguments.jobs,
        "resume": arguments.resume,
        "replace": arguments.force,
    }
    return PackOptions(**{name: value for name, value in given.items() if value is not None})


def _print(result: PackResult) -> None:
    header = result.header
    facts = (
        f"{header.num_samples} pictures of {header.num_classes} classes in {header.blocks} blocks, "
        f"{header.total_bytes / 2**20:.0f} MiB, CRC-32 {header.body_crc32:08x}"
    )
    if result.up_to_date:
        print(f"{result.path}: up to date, {facts}")
        return
    if result.dropped_blocks:
        print(f"{result.path}: {result.dropped_blocks} blocks of an earlier run were made again; something has changed")
    kept = f" ({result.kept_blocks} blocks kept from an earlier run)" if result.kept_blocks else ""
    print(f"{result.path}: packed {facts}{kept}")
    for path, reason in result.left_out:
        print(f"left out {path}: {reason}")
    if result.left_out:
        print(f"{result.path}: {len(result.left_out)} pictures left out")
