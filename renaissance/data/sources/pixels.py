"""Images of one size (MNIST, CIFAR) read by record, without loading the set: packed files, idx files and CIFAR batches.

The index holds the labels alone, 4 bytes a sample: where a record lies follows from its number. Labels are read and
checked when the set is opened; pixels only when they are asked for. Compressed files cannot be read by record and are
refused with what to do.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import FormatError, MissingFileError, ValueRejected
from renaissance.core.files import opened_regular
from renaissance.data.catalogue import DatasetInfo, dataset_info
from renaissance.data.formats.arrays import Bytes, check_labels
from renaissance.data.formats.cifar import CIFAR_LAYOUTS, CifarLayout, check_record_labels, cifar_records, find_cifar
from renaissance.data.formats.dts import LAYOUTS, OFFSETS, REGION_BYTES, header_problems, read_dts_header
from renaissance.data.formats.idx import (
    IMAGE_MAGIC,
    MNIST_FILES,
    find_raw,
    read_idx_header,
    read_idx_labels,
)
from renaissance.data.sources.reading import (
    Container,
    check_body,
    check_header,
    check_room,
    inside,
    read_fully,
    stamp_of,
)
from renaissance.data.sources.spec import Arrays, Encoding, FileStamp, SourceSpec, printable, sections_of

_RECORDS_AT_ONCE = 2048


def open_pixels(folder: str, name: str, split: str, format: str, verify: bool = False) -> tuple[SourceSpec, Arrays]:
    """Index one split of a set of small images. ``format``: "auto" takes the packed file when there is one.

    ``verify`` compares a packed file with its CRC-32; the published files have none of their own. Raises
    MissingFileError with the expected names, ValueRejected for compressed files, FormatError and DigestMismatch.
    """
    info = dataset_info(name)
    packed = os.path.join(folder, LAYOUTS[info.name].file_name(split))
    if format == "dts" or (format == "auto" and os.path.lexists(packed)):
        if not os.path.lexists(packed):
            raise MissingFileError(f"{packed}: no such file; make it with `renaissance pack {info.name}`")
        return _open_dts(inside(folder, packed), info, split, verify)
    opened = _open_idx if info.name == "mnist" else _open_cifar
    try:
        return opened(folder, info, split)
    except MissingFileError as error:
        if format == "raw":
            raise
        raise MissingFileError(f"{error}, or a packed {os.path.basename(packed)}") from error


def _open_dts(path: str, info: DatasetInfo, split: str, verify: bool) -> tuple[SourceSpec, Arrays]:
    header, problems = read_dts_header(Path(path))
    # Those of this set and split say more; the others (size of the file, reserved bytes) only the reader sees.
    problems = [*header_problems(header, split, info.name), *problems]
    if problems:
        raise FormatError(f"{path}: {problems[0]}")
    n = header.num_samples
    with opened_regular(Path(path)) as (file, _):
        stamp = stamp_of(file.fileno())
        check_header(path, file.fileno(), header.pack())
        labels = np.empty(n, np.uint8)
        if read_fully(file.fileno(), labels.data, REGION_BYTES) < n:
            raise FormatError(f"{path}: ends before its {n} labels; it was cut while being opened")
        if verify:
            check_body(path, file.fileno(), REGION_BYTES, header.body_crc32, OFFSETS["body_crc32"])
    check_labels(labels, info, path, REGION_BYTES)
    return _spec(info, split, "dts", labels, (path,), (stamp,), REGION_BYTES + n, info.pixels, 0, path)


def _open_idx(folder: str, info: DatasetInfo, split: str) -> tuple[SourceSpec, Arrays]:
    names = MNIST_FILES[split]
    found = [find_raw(Path(folder), file) for file in (names.images, names.labels)]
    if found[0] is None or found[1] is None:
        missing = [n for n, path in zip((names.images, names.labels), found, strict=True) if path is None]
        raise MissingFileError(f"{folder}: no {' and no '.join(missing)}; expected the published MNIST files there")
    image_path, label_path = inside(folder, str(found[0])), inside(folder, str(found[1]))
    header, compressed = read_idx_header(Path(image_path))
    if compressed:
        raise ValueRejected(
            f"{image_path}: is compressed, and a record inside cannot be found without unpacking all before it; "
            f"unpack it (gunzip -k), make a packed file (renaissance pack {info.name}), or load the set fully"
        )
    if header.magic != IMAGE_MAGIC:
        raise FormatError(f"{image_path}: offset 0: idx magic is {header.magic}; expected {IMAGE_MAGIC} (images)")
    if header.shape[1:] != (info.height, info.width):
        raise FormatError(
            f"{image_path}: offset 8: images of {header.shape[1]} x {header.shape[2]} pixels; expected {info.height} x "
            f"{info.width} for {info.name}"
        )
    with opened_regular(Path(image_path)) as (file, size):
        stamp = stamp_of(file.fileno())
    if size != header.file_bytes:
        raise FormatError(f"{image_path}: is {size} bytes long; its header makes {header.file_bytes}")
    labels = read_idx_labels(Path(label_path), info)
    if labels.size != header.shape[0]:
        raise FormatError(
            f"{image_path}: {header.shape[0]} images but {labels.size} labels in {label_path}; expected equal counts"
        )
    if not labels.size:
        raise FormatError(f"{image_path}: holds no images")
    source = f"{image_path}, {label_path}"
    return _spec(info, split, "raw", labels, (image_path,), (stamp,), header.header_bytes, info.pixels, 0, source)


def _open_cifar(folder: str, info: DatasetInfo, split: str) -> tuple[SourceSpec, Arrays]:
    layout = CIFAR_LAYOUTS[info.name]
    found = find_cifar(Path(folder), info.name, split)
    if found is None:
        if os.path.lexists(archive := os.path.join(folder, layout.archive)):
            raise ValueRejected(
                f"{archive}: is compressed, and a record inside cannot be found without unpacking all before it; "
                f"unpack it (tar -xzf), make a packed file (renaissance pack {info.name}), or load the set fully"
            )
        raise MissingFileError(
            f"{folder}: no {' and no '.join(layout.files[split])}, neither in {layout.folder} nor in the folder itself"
        )
    paths = tuple(inside(folder, str(path)) for path in found)
    labels, stamps = [], []
    for path in paths:
        part, stamp = _cifar_labels(path, layout)
        labels.append(part)
        stamps.append(stamp)
    source = f"{paths[0]}{f' to {os.path.basename(paths[-1])}' if len(paths) > 1 else ''}"
    spec, arrays = _spec(
        info, split, "raw", np.concatenate(labels), paths, tuple(stamps), 0, layout.record_bytes,
        layout.pixel_offset, source, planar=True,
    )  # fmt: skip
    return spec, arrays


def _cifar_labels(path: str, layout: CifarLayout) -> tuple[Bytes, FileStamp]:
    count, record = cifar_records(Path(path), layout), layout.record_bytes
    labels = np.empty((count, layout.label_bytes), np.uint8)
    buffer = np.empty((min(count, _RECORDS_AT_ONCE), record), np.uint8)
    with opened_regular(Path(path)) as (file, size):
        stamp = stamp_of(file.fileno())
        for first in range(0, count, _RECORDS_AT_ONCE):
            part = buffer[: min(_RECORDS_AT_ONCE, count - first)]
            if read_fully(file.fileno(), part.reshape(-1).data, first * record) < part.size or size != count * record:
                raise FormatError(f"{path}: changed while being opened; open it again when nobody writes it")
            labels[first : first + len(part)] = part[:, : layout.label_bytes]
    check_record_labels(path, labels, 0, layout)
    return labels[:, layout.label_offset], stamp


def _spec(
    info: DatasetInfo,
    split: str,
    format: str,
    labels: Bytes,
    files: tuple[str, ...],
    stamps: tuple[FileStamp, ...],
    first_byte: int,
    record_bytes: int,
    pixel_offset: int,
    source: str,
    planar: bool = False,
) -> tuple[SourceSpec, Arrays]:
    arrays: Arrays = {"labels": labels.astype(np.int32)}
    sections, index_bytes = sections_of(arrays)
    spec = SourceSpec(
        name=info.name,
        split=split,
        format=format,
        level=None,
        encoding=Encoding.PIXELS,
        num_classes=info.num_classes,
        samples=int(labels.size),
        height=info.height,
        width=info.width,
        channels=info.channels,
        files=files,
        tree=False,
        source=printable(os.fsencode(source)),
        stored_bytes=int(labels.size) * info.pixels,
        largest=info.pixels,
        index_bytes=index_bytes,
        sections=sections,
        stamps=stamps,
        first_byte=first_byte,
        record_bytes=record_bytes,
        pixel_offset=pixel_offset,
        planar=planar,
    )
    return spec, arrays


class PixelReader:
    """Reads images of one size by their record; planes become interleaved pixels."""

    def __init__(self, spec: SourceSpec, arrays: Arrays) -> None:
        self._spec = spec
        self._size = spec.pixel_bytes
        self._containers = [Container(path, stamp) for path, stamp in zip(spec.files, spec.stamps, strict=True)]
        counts = [(stamp.size - spec.first_byte) // spec.record_bytes for stamp in spec.stamps]
        self._firsts: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))
        # Planes are read here and interleaved into the caller's buffer.
        self._planes = np.empty((spec.channels, spec.height, spec.width), np.uint8)
        self._plane_bytes = self._planes.reshape(-1).data

    def read(self, sample: int, out: memoryview) -> int:
        """Pixels u8[H,W,C] of one image; returns their count."""
        size, (container, offset) = self._size, self._where(sample)
        if out.nbytes < size:
            check_room(out, size, self.describe(sample))
        into = self._plane_bytes if self._spec.planar else out[:size]
        self._containers[container].read(into, offset, self.describe, sample)
        if self._spec.planar:
            pixels = np.frombuffer(out, np.uint8, size)
            pixels.reshape(self._spec.height, self._spec.width, -1)[:] = self._planes.transpose(1, 2, 0)
        return size

    def _where(self, sample: int) -> tuple[int, int]:
        container = int(np.searchsorted(self._firsts, sample, side="right")) - 1 if len(self._containers) > 1 else 0
        record = sample - int(self._firsts[container])
        return container, self._spec.first_byte + record * self._spec.record_bytes + self._spec.pixel_offset

    def describe(self, sample: int) -> str:
        """File, record (counted in that file) and offset of the pixels."""
        container, offset = self._where(sample)
        record = sample - int(self._firsts[container])
        return f"{printable(os.fsencode(self._spec.files[container]))}, record {record} (offset {offset})"

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for container in self._containers:
            container.close()
