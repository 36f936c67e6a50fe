"""``renaissance preview``: a PNG contact sheet of what a recipe does to samples, each as stored and as delivered."""

from __future__ import annotations

import argparse
from pathlib import Path

from renaissance.core.errors import ValueRejected
from renaissance.core.files import opened_regular
from renaissance.data.chain import fixed_size
from renaissance.data.preview import Samples, preview, recipe_text, sheet_row
from renaissance.data.protocol import MAX_EPOCH, check_range
from renaissance.data.recipe import DECODE_MODES, Recipe
from renaissance.data.sheet import cell_size, contact_sheet, write_png
from renaissance.data.sources.source import FORMATS
from renaissance.data.transform_text import transform_from_text

MAX_RECIPE_BYTES = 1 << 20
DEFAULT_SAMPLES, DEFAULT_DRAWS = 6, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("dataset", metavar="NAME", help="name of the data set, for example cifar10")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with its files")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="which split (default: train)")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="which files (default: packed, else published)"
    )
    parser.add_argument("--level", metavar="L", help="which packed level of pictures: 0 to 3 or RAW")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", type=Path, metavar="FILE", help="a recipe in its JSON form")
    what.add_argument(
        "--transforms",
        nargs="+",
        metavar="T",
        help="transforms in order, such as 'RandomResizedCrop(224)' RandomHorizontalFlip",
    )
    parser.add_argument(
        "--decode",
        choices=DECODE_MODES,
        help=f"how pictures are decoded, with --transforms (default: {DECODE_MODES[0]})",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--samples", metavar="I,J,...", help="sample ids, counted from 0")
    which.add_argument(
        "--random", type=int, metavar="N", help=f"the first N of the shuffled epoch (default: {DEFAULT_SAMPLES})"
    )
    parser.add_argument("--draws", type=int, metavar="K", help=f"epochs shown beside each (default: {DEFAULT_DRAWS})")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws (default: 0)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the PNG to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the sheet and print where it is; 1 when a sample shown cannot be decoded."""
    level = arguments.level
    level = int(level) if level is not None and level.isdecimal() else level
    with Samples(arguments.dataset, arguments.folder, arguments.split, arguments.format, level) as samples:
        recipe = _recipe(arguments, samples)
        draws = arguments.draws if arguments.draws is not None else DEFAULT_DRAWS if recipe.is_random else 1
        check_range("--draws", draws, 1, MAX_EPOCH)
        check_range("--epoch", arguments.epoch, 0, MAX_EPOCH - draws + 1)
        check_range("--seed", arguments.seed, 0, 2**64 - 1)
        epochs = range(arguments.epoch, arguments.epoch + draws)
        chosen = _samples(arguments, samples)
        shown = list(preview(samples, recipe, chosen, arguments.seed, epochs))
        heading = [
            f"{samples.name} {samples.split}: {len(samples)} samples, {samples.form} ({samples.source})",
            recipe_text(recipe, samples.encoding),
            f"seed {arguments.seed}",
        ]
        rows = [sheet_row(samples, one, epochs) for one in shown]
        write_png(arguments.output, contact_sheet(heading, rows, cell_size(recipe.resolution)))
    damaged = [one for one in shown if one.stored is None]
    print(f"{arguments.output}: {len(shown)} samples, {draws} draw{'' if draws == 1 else 's'} of each")
    for one in damaged:
        print(f"  cannot be decoded: {one.damage}")
    return 1 if damaged else 0


def _recipe(arguments: argparse.Namespace, samples: Samples) -> Recipe:
    if arguments.recipe is not None:
        if arguments.decode is not None:
            raise ValueRejected(f"--decode {arguments.decode}: the recipe file says how pictures are decoded; drop it")
        return read_recipe(arguments.recipe)
    transforms = [transform_from_text(text) for text in arguments.transforms]
    side = fixed_size(transforms)
    return Recipe.build(
        transforms,
        resolution=samples.default_side() if side is None else side,
        color_channels=samples.channels,
        decode=arguments.decode or DECODE_MODES[0],
    )


def read_recipe(path: Path) -> Recipe:
    """A recipe from a file with its JSON form. Raises MissingFileError and ValueRejected."""
    with opened_regular(path) as (file, size):
        if size > MAX_RECIPE_BYTES:
            raise ValueRejected(f"{path}: {size} bytes; a recipe has at most {MAX_RECIPE_BYTES}")
        return Recipe.from_json(file.read(size).decode(errors="replace"))


def _samples(arguments: argparse.Namespace, samples: Samples) -> list[int]:
    if arguments.samples is None:
        count = DEFAULT_SAMPLES if arguments.random is None else arguments.random
        check_range("--random", count, 1, 2**31 - 1)
        return samples.first_of_epoch(arguments.seed, arguments.epoch, count)
    try:
        return [int(part) for part in arguments.samples.split(",")]
    except ValueError:
        raise ValueRejected(f"--samples {arguments.samples!r}: expected numbers with commas, such as 0,5,17") from None
