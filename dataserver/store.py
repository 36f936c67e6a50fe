"""Data sets in memory: each split is read once, into a sealed memfd that all workers map."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from dataserver.shared import create_memfd, seal_read_only
from dataserver.spec import PIXELS, Load, LoadedSet
from renaissance.core.errors import DataServerError, MissingFileError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.catalogue import SPLITS, dataset_info
from renaissance.data.formats import open_dataset

_log = get_logger("dataserver.store")


class DatasetStore:
    """The data sets this daemon serves, by canonical name. A client names one of them; it can never name a path."""

    def __init__(self, folders: Mapping[str, Path], data_format: str = "auto") -> None:
        """Raises ValueRejected for an unknown name or none, MissingFileError for a folder that does not exist."""
        if not folders:
            raise ValueRejected("no data set to serve; give at least one --data NAME=FOLDER")
        self._folders: dict[str, Path] = {}
        self._format = data_format
        for name, folder in folders.items():
            canonical = dataset_info(name).name
            if canonical in self._folders:
                raise ValueRejected(f"data set {canonical!r} is given twice")
            if not folder.is_dir():
                raise MissingFileError(f"{folder}: no such folder (data set {canonical!r})")
            self._folders[canonical] = folder
        self._loaded: dict[tuple[str, str], tuple[LoadedSet, int]] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._folders)

    @property
    def loaded_bytes(self) -> int:
        with self._lock:
            return sum(shape.total_bytes for shape, _ in self._loaded.values())

    def check(self, name: str, split: str) -> str:
        """The canonical name. Raises ValueRejected for a split that does not exist, KeyError when not served."""
        if split not in SPLITS:
            raise ValueRejected(f"split is {split!r}; expected one of: {', '.join(SPLITS)}")
        canonical = dataset_info(name).name
        if canonical not in self._folders:
            raise KeyError(canonical)
        return canonical

    def load(self, canonical: str, split: str, limit: int) -> tuple[LoadedSet, int]:
        """Shape and memfd of one split, read on first use. Raises what ``open_dataset`` raises for damaged files, and
        DataServerError when all that is loaded would take more than ``limit`` bytes.
        """
        with self._lock:
            if (canonical, split) not in self._loaded:
                used = sum(shape.total_bytes for shape, _ in self._loaded.values())
                self._loaded[canonical, split] = self._read(canonical, split, limit - used)
            return self._loaded[canonical, split]

    def _read(self, canonical: str, split: str, room: int) -> tuple[LoadedSet, int]:
        data = open_dataset(canonical, self._folders[canonical], split, self._format)
        samples, height, width, channels = data.images.shape
        shape = LoadedSet(
            name=canonical,
            split=split,
            load=Load.FULLY,
            encoding=PIXELS,
            samples=samples,
            num_classes=data.num_classes,
            height=height,
            width=width,
            channels=channels,
            origin=data.source,
        )
        if shape.total_bytes > room:
            raise DataServerError(
                f"{canonical} {split} takes {shape.total_bytes} bytes, {max(0, room)} are left for data; start the "
                "dataserver with a larger --memory-limit"
            )
        fd = create_memfd(f"{canonical}-{split}", shape.total_bytes)
        with mmap.mmap(fd, shape.total_bytes) as mapped:
            images, labels = shape.pixels(memoryview(mapped))
            images[:] = data.images
            labels[:] = data.labels
            del images, labels
        seal_read_only(fd)
        _log.info("%s %s: %d samples from %s (%s)", canonical, split, samples, data.source, data.format)
        return shape, fd

    def close(self) -> None:
        with self._lock:
            for _, fd in self._loaded.values():
                os.close(fd)
            self._loaded.clear()
