"""Examining a data folder and the machine before the first epoch: what would end, falsify or slow down a run.

Nothing is changed, and nothing is printed: ``examine`` returns a ``Report`` of facts and findings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.data.catalogue import dataset_info
from renaissance.data.doctor.duplicates import examine_duplicates
from renaissance.data.doctor.files import Stored, examine_tree, open_splits, reads_tree, spread
from renaissance.data.doctor.findings import Finding, Report, Severity
from renaissance.data.doctor.machine import (
    examine_cores,
    examine_disk,
    examine_limits,
    examine_memory,
    examine_rate,
)
from renaissance.data.doctor.pictures import examine_pictures
from renaissance.data.doctor.rate import MOST_SAMPLES, rate_per_core, usual_recipe
from renaissance.data.formats.imagenet import picture_level

__all__ = ["Finding", "Options", "Report", "Severity", "examine"]

SAMPLES = 500
RESOLUTION = 224

Steps = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is looked at. ``samples`` None: every picture, and the checksum of every packed file."""

    format: str = "auto"
    level: int | str | None = None
    samples: int | None = SAMPLES  # pictures of each split that are decoded
    duplicates: bool = False
    rate: float | None = None  # samples/s that the trainer needs
    resolution: int = RESOLUTION  # of the recipe whose rate is measured
    threads: int | None = None  # None: one per usable core


def examine(name: str, folder: Path, options: Options | None = None, on_step: Steps | None = None) -> Report:
    """Examine a data set. Raises ValueRejected for options that make no sense and MissingFileError for no folder;
    whatever is wrong with the set is in the report.
    """
    options, info = options or Options(), dataset_info(name)
    _check(options)
    if options.level is not None:
        picture_level(options.level)
        if info.pixels:
            raise ValueRejected(f"level is {options.level!r}; only packed pictures have levels, not {info.name}")
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder; give the one that holds the files of {info.name}")
    report = Report(info.name, str(folder))
    cores = examine_cores(report)
    examine_limits(report)
    if not info.pixels and reads_tree(folder, options.format):
        examine_tree(folder, report)
    splits = open_splits(info, folder, options.format, options.level, options.samples is None, report)
    if not splits:
        return report
    try:
        _examine_samples(splits, options, cores, report, on_step)
        examine_memory(splits, report)
        examine_disk(folder, splits, report)
    finally:
        for stored in splits:
            stored.close()
    return report


def _examine_samples(splits: list[Stored], options: Options, cores: int, report: Report, on_step: Steps | None) -> None:
    for stored in splits:
        samples = spread(stored.samples, stored.samples if options.samples is None else options.samples)
        if stored.source is not None:
            tick = _counter(f"decoding {stored.split}", len(samples), on_step)
            examine_pictures(stored, samples, options.threads or cores, report, tick)
    if options.duplicates:
        total = sum(stored.samples for stored in splits)
        examine_duplicates(splits, report, _counter("comparing", total, on_step))
    first = splits[0]
    per_core = rate_per_core(first, spread(first.samples, MOST_SAMPLES), options.resolution)
    if per_core:
        recipe = usual_recipe(first, options.resolution)
        names = [transform.name for transform in recipe.transforms]
        examine_rate(per_core, cores, options.rate, f"{', '.join(names)} to {recipe.resolution} pixels", report)


def _check(options: Options) -> None:
    if options.samples is not None and options.samples < 1:
        raise ValueRejected(f"samples is {options.samples}; expected at least 1, or all of them")
    if options.rate is not None and not 0 < options.rate < 1e9:
        raise ValueRejected(f"rate is {options.rate}; expected samples per second, above 0")


def _counter(what: str, total: int, on_step: Steps | None) -> Callable[[int], None] | None:
    if on_step is None:
        return None
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        on_step(what, done, total)

    return tick
