"""Opening a data set by name: the one way in for everything that reads images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.data.catalogue import SPLITS, DatasetInfo, check_split, dataset_info
from renaissance.data.formats.arrays import ArrayDataset, Bytes
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, read_raw_cifar10, read_raw_cifar100
from renaissance.data.formats.dts import LAYOUTS, read_dts
from renaissance.data.formats.idx import MNIST_FILES, read_raw_mnist

FORMATS = ("auto", "dts", "raw")

RAW_READERS = {"mnist": read_raw_mnist, "cifar10": read_raw_cifar10, "cifar100": read_raw_cifar100}
"""Readers of the published form: (folder, split) -> labels uint8 [N], images uint8 [N,H,W,C], source."""


def open_dataset(name: str, folder: Path, split: str, format: str = "auto", verify: bool = True) -> ArrayDataset:
    """Read one split ("train" or "val") of a data set of small images into memory.

    ``format``: "dts" reads the packed file, "raw" the published files, "auto" the packed file when it exists and
    else the published ones. ``verify`` compares a packed file with its CRC-32 (compressed published files are always
    compared with theirs). Raises ValueRejected for an unknown name, split or format and for a data set this version
    cannot read, MissingFileError with the expected names, and FormatError or DigestMismatch for damaged files.
    """
    info, folder = dataset_info(name), Path(folder)
    check_split(split)
    if format not in FORMATS:
        raise ValueRejected(f"unknown data format {format!r}; expected one of: {', '.join(FORMATS)}")
    if info.name not in LAYOUTS:
        raise ValueRejected(
            f"data set {info.name!r} is not one of small images that are held in memory ({', '.join(LAYOUTS)}); serve "
            "it with dataserver, which reads it sample by sample"
        )
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder (data set {info.name!r})")
    packed = folder / LAYOUTS[info.name].file_name(split)
    if format == "dts" or (format == "auto" and packed.exists()):
        if not packed.exists():
            raise MissingFileError(f"{packed}: no such file; make it with `renaissance pack {info.name}`")
        _, labels, images = read_dts(packed, info.name, split, verify)
        return _dataset(info, split, labels, images, str(packed), "dts")
    try:
        labels, images, source = RAW_READERS[info.name](folder, split)
    except MissingFileError as error:
        packed_too = "" if format == "raw" else f", or a packed {packed.name}"
        raise MissingFileError(
            f"{error}{packed_too}; `renaissance fetch {info.name}` gets the published files"
        ) from error
    return _dataset(info, split, labels, images, source, "raw")


def dataset_files(name: str, folder: Path) -> list[Path]:
    """The files of a small-image data set that exist in ``folder``: packed ones, then the published ones, extracted
    (also in the published sub-folder) and not. Empty for ImageNet, whose files are found by their folders.
    """
    info = dataset_info(name)
    names = [LAYOUTS[info.name].file_name(split) for split in SPLITS] if info.name in LAYOUTS else []
    if info.name == "mnist":
        raw = [name for files in MNIST_FILES.values() for name in (files.images, files.labels)]
        names += [name + ending for name in raw for ending in ("", ".gz")]
    elif info.name in CIFAR_LAYOUTS:
        layout = CIFAR_LAYOUTS[info.name]
        extracted = [name for split in SPLITS for name in layout.files[split]]
        names += [f"{layout.folder}/{name}" for name in extracted] + extracted + [layout.archive]
    return [folder / file_name for file_name in names if (folder / file_name).is_file()]


def _dataset(info: DatasetInfo, split: str, labels: Bytes, images: Bytes, source: str, format: str) -> ArrayDataset:
    return ArrayDataset(
        name=info.name,
        split=split,
        images=images,
        labels=labels.astype(np.int32),
        num_classes=info.num_classes,
        source=source,
        format=format,
    )
