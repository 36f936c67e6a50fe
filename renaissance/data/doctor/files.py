"""The files of a set: what is there, what would be ignored, which classes have samples, whether the splits agree."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import RenaissanceError
from renaissance.data.catalogue import SPLITS, DatasetInfo
from renaissance.data.doctor.findings import Report, Severity
from renaissance.data.formats import open_dataset
from renaissance.data.formats.imagenet import read_extension, read_imagenet_header
from renaissance.data.sources import Encoding, Source
from renaissance.data.sources.packed import packed_levels
from renaissance.data.sources.spec import printable

PICTURE_ENDINGS = (".jpg", ".jpeg")
OTHER_PICTURES = (".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".jpe", ".jfif", ".heic", ".avif")
UNEVEN = 10
"""The largest class may have this many times the samples of the smallest before it is worth saying."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One split that can be opened. Images of one size are in memory, pictures are read from ``source``."""

    split: str
    labels: npt.NDArray[np.int32]
    num_classes: int
    format: str
    level: int | str | None
    encoding: Encoding
    stored_bytes: int
    index_bytes: int
    place: str
    images: npt.NDArray[np.uint8] | None = None
    source: Source | None = None
    class_names: tuple[str, ...] | None = None
    """By label, where the files have them: folders do, and packed pictures of our own."""

    @property
    def samples(self) -> int:
        return int(self.labels.size)

    def close(self) -> None:
        """Close the files."""
        if self.source is not None:
            self.source.close()


def open_splits(
    info: DatasetInfo, folder: Path, format: str, level: int | str | None, verify: bool, report: Report
) -> list[Stored]:
    """Every split that opens; one problem for each that does not. ``verify``: compare whole packed files too."""
    found: list[Stored] = []
    for split in SPLITS:
        try:
            stored = (_pixels if info.pixels else _pictures)(info, folder, split, format, level, verify)
        except RenaissanceError as error:
            report.add(Severity.PROBLEM, split, str(error))
            continue
        found.append(stored)
        report.facts[split] = {
            "samples": stored.samples,
            "classes": stored.num_classes,
            "format": stored.format,
            "level": stored.level,
            "stored_bytes": stored.stored_bytes,
            "index_bytes": stored.index_bytes,
            "place": stored.place,
        }
        _examine_labels(stored, report)
    if len(found) == len(SPLITS) and (difference := _difference(found[0], found[1])):
        advice = "a label does not mean the same in both; pack both splits from one tree"
        report.add(Severity.PROBLEM, "val", difference, advice)
    return found


def _difference(train: Stored, val: Stored) -> str:
    """What is different about the classes of two splits; "" when nothing is, or nothing is known."""
    if train.num_classes != val.num_classes:
        return f"has {val.num_classes} classes, train has {train.num_classes}"
    names = zip(train.class_names or (), val.class_names or (), strict=False)
    other = next(((label, *pair) for label, pair in enumerate(names) if pair[0] != pair[1]), None)
    return "" if other is None else f"label {other[0]} is class {other[2]}, in train it is class {other[1]}"


def _pixels(info: DatasetInfo, folder: Path, split: str, format: str, level: int | str | None, verify: bool) -> Stored:
    # Small enough to be read whole, so that every label and the checksum of a packed file are compared.
    data = open_dataset(info.name, folder, split, format)
    return Stored(
        split,
        data.labels,
        data.num_classes,
        data.format,
        None,
        Encoding.PIXELS,
        data.images.nbytes,
        data.labels.nbytes,
        data.source,
        images=data.images,
    )


def _pictures(
    info: DatasetInfo, folder: Path, split: str, format: str, level: int | str | None, verify: bool
) -> Stored:
    source = Source.open(info.name, folder, split, format, level, verify=verify and format != "raw")
    spec = source.spec
    return Stored(
        split,
        source.labels,
        spec.num_classes,
        spec.format,
        spec.level,
        spec.encoding,
        spec.stored_bytes,
        spec.index_bytes,
        spec.source,
        source=source,
        class_names=_class_names(source),
    )


def _class_names(source: Source) -> tuple[str, ...] | None:
    if source.spec.tree:
        return tuple(source.class_names() or ())
    path = Path(source.spec.files[0])
    try:
        header, _ = read_imagenet_header(path)
        names = (read_extension(path, header) or {}).get("classes")
    except RenaissanceError:  # reading pictures does not need it, and `verify` says what is wrong with it
        return None
    if not isinstance(names, list) or len(names) != source.spec.num_classes:
        return None
    return tuple(printable(str(name).encode("utf-8", "backslashreplace")) for name in names)


def _examine_labels(stored: Stored, report: Report) -> None:
    counts = np.bincount(stored.labels, minlength=stored.num_classes)
    facts = report.facts[stored.split]
    facts["smallest_class"], facts["largest_class"] = int(counts.min()), int(counts.max())
    empty = np.flatnonzero(counts == 0)
    if empty.size:
        report.add(
            Severity.WARNING,
            stored.split,
            f"{empty.size} of {stored.num_classes} classes have no samples",
            "the model gets an output for each of them all the same",
            [_class_named(stored, label) for label in empty.tolist()],
        )
    filled = counts[counts > 0]
    if filled.max() > UNEVEN * filled.min():
        report.add(
            Severity.NOTE,
            stored.split,
            f"classes are uneven: {_class_named(stored, int(counts.argmax()))} has {counts.max()} samples, "
            f"{_class_named(stored, int(np.flatnonzero(counts == filled.min())[0]))} has {filled.min()}",
        )


def _class_named(stored: Stored, label: int) -> str:
    return f"class {label}" + (f" ({stored.class_names[label]})" if stored.class_names else "")


# -- folder trees -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SplitFolder:
    """What lies in ``<root>/<split>``. Counts are of files."""

    classes: dict[str, int] = field(default_factory=dict)  # pictures by class
    endings: Counter[str] = field(default_factory=Counter)  # files that are not read, by ending
    ignored: list[str] = field(default_factory=list)  # some of them
    links: list[str] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)  # folders inside classes
    loose: int = 0  # pictures outside a class


def reads_tree(folder: Path, format: str) -> bool:
    """Whether it is a folder tree (or what was meant as one) that would be read from ``folder``."""
    packed = format == "auto" and any(packed_levels(str(folder), split) for split in SPLITS)
    return format != "dts" and not packed and any((folder / split).is_dir() for split in SPLITS)


def examine_tree(folder: Path, report: Report) -> None:
    """Look at the tree itself, also where it cannot be opened, and report everything at once."""
    found: dict[str, SplitFolder] = {}
    for split in SPLITS:
        try:
            found[split] = scan_split(folder / split)
        except (FileNotFoundError, NotADirectoryError):
            continue  # opening it says so
        except OSError as error:
            report.add(Severity.PROBLEM, split, f"{error.filename or folder / split}: cannot be read: {error.strerror}")
            continue
        _report_split(split, found[split], report)
    if len(found) < len(SPLITS):
        return
    unknown = sorted(set(found["val"].classes) - set(found["train"].classes))
    absent = sorted(set(found["train"].classes) - set(found["val"].classes))
    if unknown:
        report.add(
            Severity.PROBLEM, "val", f"{len(unknown)} classes are not among those of train",
            "remove them, or add their training pictures", unknown,
        )  # fmt: skip
    if absent:
        report.add(
            Severity.WARNING, "val", f"{len(absent)} of {len(found['train'].classes)} classes of train are missing",
            "accuracy says nothing about them", absent,
        )  # fmt: skip


def scan_split(path: Path) -> SplitFolder:
    """Count what is in a split's folder, without following links."""
    content = SplitFolder()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_symlink():
                content.links.append(entry.path)
            elif entry.is_dir():
                if not entry.name.startswith("."):
                    content.classes[entry.name] = _scan_class(entry.path, content)
            elif entry.name.lower().endswith(PICTURE_ENDINGS):
                content.loose += 1
    return content


def _scan_class(path: str, content: SplitFolder) -> int:
    pictures = 0
    with os.scandir(path) as entries:
        for entry in entries:
            ending = os.path.splitext(entry.name)[1].lower()
            if entry.is_symlink():
                content.links.append(entry.path)
            elif entry.is_dir():
                content.nested.append(entry.path)
            elif ending in PICTURE_ENDINGS and not entry.name.startswith("."):
                pictures += 1
            else:
                content.endings[ending or "without an ending"] += 1
                content.ignored.append(entry.path) if ending in OTHER_PICTURES else None
    return pictures


def _report_split(split: str, content: SplitFolder, report: Report) -> None:
    empty = sorted(name for name, count in content.classes.items() if not count)
    severity = Severity.PROBLEM if split == "train" else Severity.WARNING
    for level, text, advice, places, count in (
        (severity, "class folders without a picture", "fill or remove them", empty, len(empty)),
        (
            Severity.PROBLEM,
            "pictures lie outside a class folder and would not be read",
            f"sort them into {split}/<class>/",
            [],
            content.loose,
        ),
        (
            Severity.PROBLEM,
            "links, which are not followed",
            "put copies or mounts in their place",
            content.links,
            len(content.links),
        ),
        (
            Severity.WARNING,
            "folders inside class folders are not read",
            "move their pictures up",
            content.nested,
            len(content.nested),
        ),
        (
            Severity.WARNING,
            "pictures of other types are not read (only .jpg and .jpeg are)",
            "convert them to JPEG, or pack the set",
            content.ignored,
            len(content.ignored),
        ),
    ):
        if count:
            report.add(level, split, f"{count} {text}", advice, places, count)
    others = {ending: n for ending, n in content.endings.items() if ending not in OTHER_PICTURES}
    if others:
        named = ", ".join(f"{n} {ending}" for ending, n in sorted(others.items(), key=lambda item: -item[1])[:5])
        report.add(Severity.NOTE, split, f"other files are left alone: {named}")


def spread(samples: int, wanted: int) -> Sequence[int]:
    """``wanted`` sample ids spread evenly over a set, so that all its parts are seen."""
    return range(samples) if wanted >= samples else np.linspace(0, samples - 1, wanted).round().astype(int).tolist()
