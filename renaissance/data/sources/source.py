"""``Source``: a stored set of any kind, opened by name, read sample by sample, and shared with other processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.data.catalogue import check_split, dataset_info
from renaissance.data.formats.dts import LAYOUTS
from renaissance.data.formats.imagenet import imagenet_file_name, picture_level
from renaissance.data.sources.packed import PackedReader, open_packed, packed_levels
from renaissance.data.sources.pixels import PixelReader, open_pixels
from renaissance.data.sources.spec import Arrays, Encoding, SourceSpec, view_sections, write_sections
from renaissance.data.sources.tree import TreeReader, open_tree

FORMATS = ("auto", "dts", "raw")


class _Reader(Protocol):
    def read(self, sample: int, out: memoryview) -> int: ...
    def describe(self, sample: int) -> str: ...
    def close(self) -> None: ...


class Source:
    """One split of a stored set: its spec, its index and the open files. A context manager.

    Not thread-safe: each thread or process attaches its own to the same index. ``labels`` is int32[N], ``sizes``
    uint32[N] (bytes of each stored sample as ``read_into`` returns it; zeros for a tree opened without measuring),
    ``offsets`` uint64[N] for a packed file of pictures (where each begins in the file) and else None, ``block_starts``
    int64[K+1] (first sample of each block of a packed file of pictures, then N) and else None: folders of a tree are
    no blocks, since each holds one class and an epoch by folders would be one class after the other. All are read-only.
    """

    def __init__(self, spec: SourceSpec, arrays: Arrays) -> None:
        for array in arrays.values():
            array.flags.writeable = False
        self.spec = spec
        self._arrays = arrays
        self.labels: npt.NDArray[np.int32] = arrays["labels"]
        self.block_starts: npt.NDArray[np.int64] | None = arrays.get("block_starts")
        self.offsets: npt.NDArray[np.uint64] | None = arrays.get("offsets")
        if spec.encoding is Encoding.PIXELS:
            self.sizes: npt.NDArray[np.uint32] = np.broadcast_to(np.uint32(spec.pixel_bytes), spec.samples)
            self._reader: _Reader = PixelReader(spec, arrays)
        else:
            self.sizes = arrays["sizes"]
            self._reader = TreeReader(spec, arrays) if spec.tree else PackedReader(spec, arrays)

    @classmethod
    def open(
        cls,
        name: str,
        folder: str | os.PathLike[str],
        split: str,
        format: str = "auto",
        level: int | str | None = None,
        verify: bool = False,
        measure: bool = True,
    ) -> Source:
        """Open one split ("train" or "val") of a data set in ``folder`` and build its index.

        ``format``: "dts" the packed file, "raw" the published form (for ImageNet a folder tree with any number of
        classes), "auto" the packed file when there is one. ``level`` (0 to 3, "RAW") chooses among packed files of
        pictures; None takes the only one there is. ``verify`` reads a packed file whole and compares its CRC-32; what
        "auto" finds unpacked has no checksum and is checked as far as its headers go.
        ``measure`` False leaves the sizes of a tree's files unknown and saves two thirds of the scan.

        Raises ValueRejected for a name, split, format or level that does not exist or is not clear, MissingFileError
        with what is expected, FormatError and DigestMismatch naming file, offset, expected and found.
        """
        info, path = dataset_info(name), os.path.abspath(os.fspath(folder))
        check_split(split)
        if format not in FORMATS:
            raise ValueRejected(f"unknown data format {format!r}; expected one of: {', '.join(FORMATS)}")
        if not os.path.isdir(path):
            raise MissingFileError(f"{path}: no such folder (data set {info.name!r})")
        if verify and format == "raw":
            raise ValueRejected(f"{path}: published files and folder trees have no checksums; open them without verify")
        if info.name in LAYOUTS:
            if level is not None:
                raise ValueRejected(f"level {level!r} of data set {info.name!r}: only packed pictures have levels")
            return cls(*open_pixels(path, info.name, split, format, verify))
        chosen = _packed_level(path, split, format, level)
        if chosen is not None:
            return cls(*open_packed(path, split, chosen, info.name, verify))
        return cls(*open_tree(path, split, info.name, measure))

    def write_index(self, buffer: memoryview) -> None:
        """Copy the index into ``buffer``, at least ``spec.index_bytes`` long, for ``attach``. Raises ValueRejected."""
        write_sections(self.spec, self._arrays, buffer)

    @classmethod
    def attach(cls, spec: SourceSpec, buffer: memoryview | bytes) -> Source:
        """The same set from its spec and an index written by ``write_index``, without a copy, also in another process.

        Files are opened when first read, read-only, and nothing but ``spec.files`` (or what lies below the root of a
        tree) is ever opened. The source keeps ``buffer`` exported until it is gone. Raises ValueRejected for a buffer
        that is too small.
        """
        return cls(spec, view_sections(spec, memoryview(buffer)))

    def read_into(self, sample: int, out: memoryview) -> int:
        """Read the stored bytes of one sample to the start of ``out`` (bytes, writable) and return their count.

        Raises ValueRejected when ``out`` is too small, IndexError for a sample that does not exist, CorruptSample
        naming file, record and offset when this sample cannot be read or is no longer what was indexed, FormatError or
        MissingFileError when its container was written to, replaced or removed since it was opened, and
        RenaissanceError when the system has run out of descriptors or memory.
        """
        if not 0 <= sample < self.spec.samples:
            raise IndexError(self._no_sample(sample))
        return self._reader.read(sample, out)

    def read(self, sample: int) -> bytes:
        """The stored bytes of one sample. Raises as ``read_into``."""
        out = bytearray(self.size(sample))
        return bytes(out[: self.read_into(sample, memoryview(out))])

    def size(self, sample: int) -> int:
        """Bytes of one stored sample; asks the system where the tree was opened without measuring."""
        if not 0 <= sample < self.spec.samples:
            raise IndexError(self._no_sample(sample))
        if isinstance(self._reader, TreeReader) and not self.spec.largest:
            return self._reader.size(sample)
        return int(self.sizes[sample])

    def describe(self, sample: int) -> str:
        """Where a sample lies, for messages: the path of a picture, or file, record, block and offset."""
        if not 0 <= sample < self.spec.samples:
            raise IndexError(self._no_sample(sample))
        return self._reader.describe(sample)

    def class_names(self) -> list[str] | None:
        """Names of the class folders of a tree in the order of their labels; None for a packed set."""
        return self._reader.class_names() if isinstance(self._reader, TreeReader) else None

    def _no_sample(self, sample: int) -> str:
        return f"{self.spec.source}: sample {sample} does not exist; expected 0 to {self.spec.samples - 1}"

    def close(self) -> None:
        """Close the files. The index stays readable, and reading opens the files again."""
        self._reader.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _packed_level(folder: str, split: str, format: str, level: int | str | None) -> int | str | None:
    """The level of the packed file to open, or None for the folder tree."""
    if level is not None:
        wanted = picture_level(level).name
        if format == "raw":
            raise ValueRejected(f"level {level!r}: a folder tree has no levels; leave out the level or the format")
        path = Path(folder) / imagenet_file_name(split, wanted)
        if not os.path.lexists(path):
            raise MissingFileError(f"{path}: no such file; {_what_is_there(folder, split)}")
        return wanted
    if format == "raw":
        return None
    levels = packed_levels(folder, split)
    if len(levels) > 1:
        raise ValueRejected(f"{folder}: packed {split} files of levels {_listed(levels)}; choose one with the level")
    if levels:
        return levels[0]
    if format == "dts" or not os.path.lexists(os.path.join(folder, "train")):
        names = f"{imagenet_file_name(split, 0)} (or lv1, lv2, lv3, raw)"
        tree = "" if format == "dts" else ", and no folder train with one folder per class"
        raise MissingFileError(f"{folder}: no {names}{tree}; make one with `renaissance pack imagenet`")
    return None


def _what_is_there(folder: str, split: str) -> str:
    levels = packed_levels(folder, split)
    return f"the folder has level {_listed(levels)}" if levels else "the folder has no packed pictures of this split"


def _listed(levels: Sequence[Any]) -> str:
    return ", ".join(str(level) for level in levels)
