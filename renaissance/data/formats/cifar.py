"""CIFAR-10 and CIFAR-100 as published: records of label bytes and three 32 x 32 colour planes (the binary version).

The files lie in the published sub-folder, directly in the data folder, or still in the published ``.tar.gz``, which is
read without unpacking it; all three give equal arrays. Any number of records will do, so a part of the set reads like
the whole. Records become NHWC pixels; of CIFAR-100's two labels the fine one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from renaissance.core.errors import FormatError, MissingFileError
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import SPLITS, DatasetInfo, check_split, dataset_info
from renaissance.data.formats.archive import opened_archive
from renaissance.data.formats.arrays import Bytes

SIDE = 32
PLANES = 3
PIXEL_BYTES = PLANES * SIDE * SIDE
COARSE_CLASSES = 20
"""Super-classes of CIFAR-100; their label is read only to see that the file is what it should be."""

_RECORDS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class CifarLayout:
    """Where the files of a CIFAR set are and what a record looks like: label bytes, then R, G and B planes."""

    info: DatasetInfo
    folder: str  # published sub-folder of the data folder
    archive: str
    files: dict[str, tuple[str, ...]]  # by split, in the order of the samples
    label_bytes: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one stored sample."""
        return self.label_bytes + PIXEL_BYTES

    @property
    def label_offset(self) -> int:
        """Offset in a record of the label that counts: the last label byte (CIFAR-100: the fine label)."""
        return self.label_bytes - 1

    @property
    def pixel_offset(self) -> int:
        """Offset in a record of the 3072 pixel bytes, plane by plane."""
        return self.label_bytes


CIFAR_LAYOUTS = {
    layout.info.name: layout
    for layout in (
        CifarLayout(
            dataset_info("cifar10"),
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "val": ("test_batch.bin",)},
            label_bytes=1,
        ),
        CifarLayout(
            dataset_info("cifar100"),
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            {"train": ("train.bin",), "val": ("test.bin",)},
            label_bytes=2,
        ),
    )
}


def cifar_layout_of(file_name: str) -> tuple[CifarLayout, str] | None:
    """The set and split whose published file has this name (no folder), or None."""
    for layout in CIFAR_LAYOUTS.values():
        for split, names in layout.files.items():
            if file_name in names:
                return layout, split
    return None


def interleaved(planes: Bytes) -> Bytes:
    """Pixels uint8 [N,32,32,3] (a copy, C-contiguous) of stored planes uint8 [N,3072]."""
    return np.ascontiguousarray(planes.reshape(-1, PLANES, SIDE, SIDE).transpose(0, 2, 3, 1))


def find_cifar(folder: Path, name: str, split: str) -> tuple[Path, ...] | None:
    """The extracted files of a split, in the order of the samples: in the sub-folder, else in ``folder`` itself.

    None when neither holds all of them.
    """
    layout = CIFAR_LAYOUTS[name]
    for place in (folder / layout.folder, folder):
        files = tuple(place / file for file in layout.files[check_split(split)])
        if all(file.is_file() for file in files):
            return files
    return None


def cifar_records(path: Path, layout: CifarLayout) -> int:
    """Records of an extracted file. Raises FormatError unless it holds a whole number of them, at least one."""
    with opened_regular(path) as (_, size):
        return _whole_records(path, size, layout)


def read_cifar_file(path: Path, layout: CifarLayout) -> tuple[Bytes, Bytes]:
    """Labels uint8 [N] and images uint8 [N,32,32,3] of one extracted file.

    Raises MissingFileError, or FormatError naming file, record and offset.
    """
    with opened_regular(path) as (file, size):
        labels, images = _empty(_whole_records(path, size, layout))
        _decode(path, _pieces(file, layout), labels, images, layout)
    return labels, images


def read_raw_cifar10(folder: Path, split: str) -> tuple[Bytes, Bytes, str]:
    """Labels uint8 [N], images uint8 [N,32,32,3] and the names of the files of one CIFAR-10 split.

    Raises MissingFileError with the names that are looked for, or FormatError.
    """
    return _read_raw(folder, "cifar10", split)


def read_raw_cifar100(folder: Path, split: str) -> tuple[Bytes, Bytes, str]:
    """As ``read_raw_cifar10``, for CIFAR-100 with its fine labels."""
    return _read_raw(folder, "cifar100", split)


def read_cifar_archive(path: Path, layout: CifarLayout, split: str) -> tuple[Bytes, Bytes]:
    """Labels and images of one split, straight from the published archive; the archive is read to its end.

    Raises FormatError for damage, a missing or doubled member, and whatever ``read_cifar_file`` refuses.
    """
    wanted = layout.files[check_split(split)]
    parts: dict[str, tuple[Bytes, Bytes]] = {}
    with opened_archive(path) as archive:
        for member, inner in archive.files():
            if inner not in {f"{layout.folder}/{name}" for name in wanted}:
                continue
            name, place = inner.rpartition("/")[2], f"{path}: {inner}"
            if name in parts:
                raise FormatError(f"{place}: is in the archive twice; fetch it again")
            parts[name] = _empty(_whole_records(place, member.size, layout))
            _decode(place, archive.read(member), *parts[name], layout)
    missing = [name for name in wanted if name not in parts]
    if missing:
        raise FormatError(f"{path}: holds no {layout.folder}/{missing[0]}; it is not the published {layout.archive}")
    if len(wanted) == 1:
        return parts[wanted[0]]
    labels = np.concatenate([parts[name][0] for name in wanted])
    return labels, np.concatenate([parts[name][1] for name in wanted])


def check_cifar_file(path: Path) -> str | None:
    """Read a published CIFAR file (or archive) in full and describe it; None when its name is not one of them.

    Raises what ``read_cifar_file`` and ``read_cifar_archive`` raise.
    """
    for layout in CIFAR_LAYOUTS.values():
        if path.name == layout.archive:
            counts = [len(read_cifar_archive(path, layout, split)[0]) for split in SPLITS]
            return f"{layout.info.name} archive, {counts[0]} + {counts[1]} samples"
    known = cifar_layout_of(path.name)
    if known is None:
        return None
    layout, split = known
    return f"{layout.info.name} {split}, {len(read_cifar_file(path, layout)[0])} samples"


def _read_raw(folder: Path, name: str, split: str) -> tuple[Bytes, Bytes, str]:
    layout = CIFAR_LAYOUTS[name]
    files = find_cifar(folder, name, split)
    if files is not None:
        labels, images = _read_files(files, layout)
        return labels, images, f"{files[0]}{f' to {files[-1].name}' if len(files) > 1 else ''}"
    archive = folder / layout.archive
    if archive.is_file():
        labels, images = read_cifar_archive(archive, layout, split)
        return labels, images, str(archive)
    raise MissingFileError(_what_is_missing(folder, layout, split))


def _what_is_missing(folder: Path, layout: CifarLayout, split: str) -> str:
    names = layout.files[split]
    for place in (folder / layout.folder, folder):
        missing = [name for name in names if not (place / name).is_file()]
        if len(missing) < len(names):
            return f"{place}: no {', no '.join(missing)}; a set is read only with all its files ({', '.join(names)})"
    expected = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{folder}: no {expected}, neither in {layout.folder} nor in the folder itself, and no {layout.archive}"


def _whole_records(place: object, size: int, layout: CifarLayout) -> int:
    count, rest = divmod(size, layout.record_bytes)
    if rest or not count:
        other = next(o for o in CIFAR_LAYOUTS.values() if o is not layout)
        hint = f"; it may be {other.info.name}" if size and size % other.record_bytes == 0 else ""
        raise FormatError(
            f"{place}: is {size} bytes long; expected records of {layout.record_bytes} bytes ({layout.info.name}), "
            + (f"but record {count} (offset {count * layout.record_bytes}) has {rest}" if rest else "but it is empty")
            + f"{hint}. Fetch it again"
        )
    return count


def _empty(count: int) -> tuple[Bytes, Bytes]:
    return np.empty(count, np.uint8), np.empty((count, SIDE, SIDE, PLANES), np.uint8)


def _pieces(file: BinaryIO, layout: CifarLayout) -> Iterator[bytes]:
    while piece := file.read(_RECORDS_AT_ONCE * layout.record_bytes):
        yield piece


def _read_files(files: Sequence[Path], layout: CifarLayout) -> tuple[Bytes, Bytes]:
    # Straight into the arrays of the whole split: it would need twice the memory to put parts together.
    counts = [cifar_records(file, layout) for file in files]
    labels, images = _empty(sum(counts))
    first = 0
    for path, count in zip(files, counts, strict=True):
        here = slice(first, first + count)
        with opened_regular(path) as (file, _):
            _decode(path, _pieces(file, layout), labels[here], images[here], layout)
        first += count
    return labels, images


def _decode(place: object, pieces: Iterator[bytes], labels: Bytes, images: Bytes, layout: CifarLayout) -> None:
    """Fill ``labels`` and ``images`` from the bytes of as many records, which come in pieces of any size.

    Raises FormatError for a label that is no class, and when there are more or fewer records.
    """
    done, kept = 0, b""
    for piece in pieces:
        data = kept + piece
        whole = len(data) // layout.record_bytes
        kept = data[whole * layout.record_bytes :]
        done += whole
        if done > labels.size:
            break
        records = np.frombuffer(data, np.uint8, whole * layout.record_bytes).reshape(whole, layout.record_bytes)
        check_record_labels(place, records, done - whole, layout)
        labels[done - whole : done] = records[:, layout.label_offset]
        images[done - whole : done] = interleaved(records[:, layout.pixel_offset :])
    if done != labels.size or kept:
        raise FormatError(
            f"{place}: changed while being read: {done} whole records instead of {labels.size}; try again when nobody "
            "writes it"
        )


def check_record_labels(place: object, records: Bytes, first: int, layout: CifarLayout) -> None:
    """Raise FormatError naming the first record whose label is no class.

    ``records`` uint8 [N, at least the label bytes] begin with record ``first`` of the file called ``place``.
    """
    limits = (COARSE_CLASSES, layout.info.num_classes)[-layout.label_bytes :]
    for at, limit in enumerate(limits):
        wrong = np.flatnonzero(records[:, at] >= limit)
        if wrong.size:
            record = first + int(wrong[0])
            what = "label" if layout.label_bytes == 1 else ("coarse label", "fine label")[at]
            raise FormatError(
                f"{place}: record {record} (offset {record * layout.record_bytes + at}): {what} is "
                f"{records[wrong[0], at]}; expected 0 to {limit - 1}. The file is damaged or of another data set"
            )
