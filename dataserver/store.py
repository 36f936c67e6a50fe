"""Data sets of the daemon: each split is loaded once, on first use, into a sealed memfd that all workers map.

Every split has a lock of its own, so that one that is being loaded delays nobody but those who want it; progress and
sizes are read without waiting for any load.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dataserver.filling import Filler
from dataserver.shared import create_memfd, seal_read_only, write_all
from renaissance.core.errors import DataServerError, MissingFileError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.data.catalogue import SPLITS, DatasetInfo, dataset_info
from renaissance.data.formats import open_dataset
from renaissance.data.making.spec import SAMPLE_ALIGNMENT, Load, LoadedSet
from renaissance.data.protocol import align
from renaissance.data.sources import Source

LOADS = ("auto", "fully", "partial")
AUTO_SHARE = 4
"""``auto`` loads pictures fully when their stored bytes fit in this part (one of so many) of the memory limit."""
STOP_SECONDS = 1.0
"""So long a load may take to notice that the daemon stops."""

_log = get_logger("dataserver.store")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A split that is being loaded: bytes read so far, of how many, since when (``time.monotonic``)."""

    name: str
    split: str
    done_bytes: int
    total_bytes: int
    started: float


@dataclass(slots=True, eq=False)
class _Split:
    """``lock`` is held while it is loaded; the other fields are guarded by the store's lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: tuple[LoadedSet, int] | None = None
    reserved: int = 0  # bytes counted against the limit, from before they are taken
    total: int = 0  # bytes to load; 0 while nothing is being loaded
    started: float = 0.0
    filler: Filler | None = None


class DatasetStore:
    """The data sets this daemon serves, by canonical name. A client names one of them; it can never name a path."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        data_format: str = "auto",
        load: str = "auto",
        level: int | str | None = None,
    ) -> None:
        """``load``: "fully", "partial", or "auto" (pixels fully; pictures fully when they fit in a quarter of the
        memory limit). ``level``: which packed level of pictures, 0 to 3 or "RAW"; None takes the one that is there.

        Raises ValueRejected for an unknown name or none and for options that nothing here can obey, MissingFileError
        for a folder that does not exist.
        """
        if not folders:
            raise ValueRejected("no data set to serve; give at least one --data NAME=FOLDER")
        if load not in LOADS:
            raise ValueRejected(f"load is {load!r}; expected one of: {', '.join(LOADS)}")
        self._folders: dict[str, Path] = {}
        self._format, self._load, self._level = data_format, load, level
        for name, folder in folders.items():
            canonical = dataset_info(name).name
            if canonical in self._folders:
                raise ValueRejected(f"data set {canonical!r} is given twice")
            if not folder.is_dir():
                raise MissingFileError(f"{folder}: no such folder (data set {canonical!r})")
            self._folders[canonical] = folder
        if level is not None and all(dataset_info(name).pixels for name in self._folders):
            raise ValueRejected(f"level is {level!r}, but only packed pictures have levels; leave it out")
        self._splits: dict[tuple[str, str], _Split] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @property
    def names(self) -> list[str]:
        return sorted(self._folders)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of memory that loaded sets take, and that those being loaded will take."""
        with self._lock:
            return sum(split.reserved for split in self._splits.values())

    def progress(self) -> list[LoadProgress]:
        """The splits that are being loaded now. Never waits for them."""
        with self._lock:
            return [
                LoadProgress(name, split, s.filler.done_bytes if s.filler else 0, s.total, s.started)
                for (name, split), s in sorted(self._splits.items())
                if s.started and s.loaded is None
            ]

    def check(self, name: str, split: str) -> str:
        """The canonical name. Raises ValueRejected for a split that does not exist, KeyError when not served."""
        if split not in SPLITS:
            raise ValueRejected(f"split is {split!r}; expected one of: {', '.join(SPLITS)}")
        canonical = dataset_info(name).name
        if canonical not in self._folders:
            raise KeyError(canonical)
        return canonical

    def load(self, canonical: str, split: str, limit: int, rings: int = 0) -> tuple[LoadedSet, int]:
        """One split and its memfd, loaded on first use; waits while another thread loads the same split.

        Raises what the readers raise for damaged files, and DataServerError when all that is loaded and the ``rings``
        would take more than ``limit`` bytes or when the daemon stops meanwhile. After a failure nothing is left and it
        can be tried again.
        """
        with self._lock:
            place = self._splits.setdefault((canonical, split), _Split())
        with place.lock:
            if place.loaded is None:
                self._refuse_when_stopping()
                with self._lock:
                    place.started = time.monotonic()
                try:
                    loaded = self._read(place, canonical, split, limit, rings)
                    with self._lock:
                        place.loaded = loaded
                finally:
                    with self._lock:
                        place.filler, place.started, place.total = None, 0.0, 0
                        if place.loaded is None:
                            place.reserved = 0
            return place.loaded

    def _refuse_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise DataServerError("the dataserver is stopping")

    def _read(self, place: _Split, canonical: str, split: str, limit: int, rings: int) -> tuple[LoadedSet, int]:
        room = limit - rings  # for all data sets together
        info = dataset_info(canonical)
        if info.pixels and self._load != "partial":
            return self._read_pixels(place, info, split, room)
        folder = self._folders[canonical]
        with Source.open(canonical, folder, split, self._format, None if info.pixels else self._level) as source:
            loaded = self._plan(source, limit // AUTO_SHARE, room)
            self._reserve(place, loaded, room)
            return loaded, self._fill_memfd(place, source, loaded)

    def _read_pixels(self, place: _Split, info: DatasetInfo, split: str, room: int) -> tuple[LoadedSet, int]:
        data = open_dataset(info.name, self._folders[info.name], split, self._format)
        loaded = LoadedSet.of_pixels(data)
        self._reserve(place, loaded, room)
        fd = create_memfd(f"{info.name}-{split}", loaded.total_bytes)
        try:
            loaded.write_pixels(data, lambda offset, part: write_all(fd, offset, part))
            seal_read_only(fd)
        except BaseException:
            os.close(fd)
            raise
        _log.info("%s %s: %d samples from %s (%s)", info.name, split, loaded.samples, data.source, data.format)
        return loaded, fd

    def _plan(self, source: Source, quarter: int, room: int) -> LoadedSet:
        """How this split is loaded, said in the log."""
        spec = source.spec
        partial = LoadedSet.of_source(source)
        aligned = int((source.sizes.astype(np.int64) + SAMPLE_ALIGNMENT - 1 & -SAMPLE_ALIGNMENT).sum())
        fully = replace(partial, load=Load.FULLY, data_bytes=aligned)
        fits = spec.stored_bytes <= quarter and fully.total_bytes <= room - self.loaded_bytes
        load = Load(self._load) if self._load != "auto" else Load.FULLY if fits else Load.PARTIAL
        why = "" if self._load != "auto" else f"; a quarter of the memory limit is {quarter} bytes"
        how = "held in memory" if load is Load.FULLY else "read from its files, ahead of use"
        _log.info(
            "%s %s: %d samples, %d bytes stored in %s (%s): %s (load %s)%s",
            *(spec.name, spec.split, spec.samples, spec.stored_bytes, spec.source, spec.format, how, load.value, why),
        )
        return fully if load is Load.FULLY else partial

    def _reserve(self, place: _Split, loaded: LoadedSet, room: int) -> None:
        """Count it against the room before anything is allocated, so that two loads cannot share the same."""
        with self._lock:
            left = max(0, room - sum(s.reserved for s in self._splits.values()))
            if loaded.total_bytes > left:
                advice = "" if loaded.source is None or not loaded.in_memory else ", or with --load partial"
                raise DataServerError(
                    f"{loaded.name} {loaded.split} takes {loaded.total_bytes} bytes, {left} are left for data; start "
                    f"the dataserver with a larger --memory-limit{advice}"
                )
            place.reserved = loaded.total_bytes
            place.total = loaded.data_bytes

    def _fill_memfd(self, place: _Split, source: Source, loaded: LoadedSet) -> int:
        fd = create_memfd(f"{loaded.name}-{loaded.split}", loaded.total_bytes)
        try:
            index = bytearray(loaded.index_bytes)
            source.write_index(memoryview(index))
            write_all(fd, 0, index)
            if loaded.in_memory:
                filler = Filler(fd, loaded, source, index, self._stopping)
                with self._lock:
                    place.filler = filler
                places = filler.run()
                write_all(fd, align(loaded.index_bytes, mmap.PAGESIZE), places.data)
            seal_read_only(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def interrupt(self) -> None:
        """Loads that run fail soon, with an error; none begins any more. For the way down, before ``close``."""
        self._stopping.set()

    def close(self) -> None:
        """Frees everything but what a load has that does not end in STOP_SECONDS: a read that never returns."""
        self.interrupt()
        with self._lock:
            splits = list(self._splits.items())
        deadline = time.monotonic() + STOP_SECONDS
        for (name, kind), split in splits:
            if not split.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                _log.warning("%s %s: is still being loaded; not waited for any longer", name, kind)
                continue
            try:
                if split.loaded is not None:
                    os.close(split.loaded[1])
                split.loaded, split.reserved = None, 0
            finally:
                split.lock.release()
