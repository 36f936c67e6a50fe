"""What a task must know about the files of a data set before a process is started for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from renaissance.core.errors import FormatError, MissingFileError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.catalogue import SPLITS, DatasetInfo
from renaissance.data.chain import square_side
from renaissance.data.formats.dts import LAYOUTS
from renaissance.data.formats.imagenet import imagenet_file_name, read_imagenet_header
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Source

_log = get_logger("data.stored")


def check_sizes(recipe: Recipe, info: DatasetInfo) -> None:
    """Raise ValueRejected when a recipe cannot make its resolution from the pictures of a data set."""
    if info.pixels:
        recipe.require_stored_pixels()
        recipe.segments(info.height, info.width)
        return
    index, first = recipe.require_variable_sizes()
    side = square_side(first)
    recipe.segments(side, side, index + 1)


def count_classes(info: DatasetInfo, folder: Path, format: str, level: int | str | None, blocks: bool = False) -> int:
    """Classes of the data set in ``folder``: those the set fixes, else those its training files name.

    Also refuses files that cannot be served, as far as that is known without reading them; ``blocks``: also those that
    have none. Raises MissingFileError, ValueRejected for a level that is not clear, FormatError for files that do not
    belong together.
    """
    if not folder.is_dir():
        raise MissingFileError(f"dataset {info.name!r}: {folder}: no such folder; give the one that holds its files")
    if info.pixels:
        for packed in (folder / LAYOUTS[info.name].file_name(split) for split in SPLITS):
            if format == "dts" and not packed.is_file():
                raise MissingFileError(
                    f"using_dts_format: {packed}: no such file; make it with `renaissance pack {info.name}`"
                )
        return info.num_classes
    with Source.open(info.name, folder, "val", format, level, measure=False) as val:
        spec = val.spec
    if spec.tree:  # the classes are those of the training folders
        if blocks:
            raise ValueRejected(
                f"order is 'blocks', but {spec.source} is a folder tree, which has none; pack it (renaissance pack "
                f"{info.name}), or leave the order at 'global'"
            )
        return spec.num_classes
    packed = folder / imagenet_file_name("train", spec.level if spec.level is not None else 0)
    header, problems = read_imagenet_header(packed, "train", spec.level)
    if problems:
        raise FormatError(f"{packed}: {problems[0]}")
    if header.num_classes != spec.num_classes:
        raise FormatError(
            f"{packed}: has {header.num_classes} classes, and {spec.source} has {spec.num_classes}; a number does not "
            "mean the same class in both. Pack both splits from one tree"
        )
    return header.num_classes


def download_missing(info: DatasetInfo, folder: Path, format: str, mirrors: Sequence[str] | None) -> None:
    """Fetch the published files of a set into ``folder``, unless packed ones are there and wanted.

    Raises ValueRejected for a set that no program can download and for the packed form, and what ``fetch_dataset``
    raises.
    """
    if format == "dts":
        raise ValueRejected(
            f"download: published files can be fetched, packed ones are made from them: drop using_dts_format, or run "
            f"`renaissance fetch {info.name}` and `renaissance pack {info.name}` once"
        )
    if not info.mirrors:
        raise ValueRejected(
            f"download: {info.name} cannot be downloaded by a program; `renaissance fetch {info.name}` says what to do"
        )
    packed = [folder / LAYOUTS[info.name].file_name(split) for split in SPLITS]
    if format == "auto" and all(path.is_file() for path in packed):
        return
    from renaissance.data import download  # HTTP and TLS cost every other start 50 ms

    for file in download.fetch_dataset(info.name, folder, mirrors):
        if file.how != "present":
            _log.info("%s: %s %s", file.path, file.how, file.source)
