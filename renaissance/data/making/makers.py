"""From stored samples to finished rows: one maker for each way in which a set is stored and loaded.

``PixelsInMemory``   images of one size that every worker maps: one compiled call for the whole share
``PixelsOnDisk``     images of one size read ahead from their files, gathered in a buffer of limited size
``Pictures``         encoded pictures of any size, from the memfd or read ahead, made row by row

A maker is asked again and again for the rest of a share and does a part of it each time, so that one session never
keeps a worker from the others for long; it makes nothing while the next sample is still being read.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from renaissance.core.digest import xxh64
from renaissance.core.errors import CorruptSample, without_frames
from renaissance.data.compile import CompiledRecipe, compile_recipe
from renaissance.data.making.policy import Policy, ShareOfBatch
from renaissance.data.making.spec import NOT_STORED, LoadedSet, SessionSpec
from renaissance.data.making.tables import EpochTables
from renaissance.data.pictures import compile_pictures
from renaissance.data.readahead import ReadAhead, StoredSample
from renaissance.data.recipe import Recipe
from renaissance.data.sources import Encoding, Source

PIXELS_AT_ONCE = 256
"""Rows of images of one size that are gathered and made together."""

PICTURES_AT_ONCE = 8
"""Rows after which a worker looks at its other sessions; some 20 ms of photographs."""

READERS = 2
"""Reading threads of a worker and session: while one waits for the disk, another asks for the next sample."""

Upcoming = Callable[[int, int], Iterator[int]]
"""(epoch, batch index) -> the worker's sample ids from there on, in the order in which they will be needed."""


class Maker(ABC):
    """Owned by one Share."""

    @abstractmethod
    def restart(self, epoch: int, index: int) -> None:
        """The next share that is asked for is that of (epoch, index), and then those that follow it."""

    @abstractmethod
    def make(self, share: ShareOfBatch, first: int) -> int:
        """Make rows from position ``first`` of the share on; returns how many, 0 when the next is not there yet.

        Raises CorruptSample where the policy says so.
        """

    def close(self) -> None:
        """Free what is not freed with the object. Never waits."""
        return


def open_maker(
    spec: SessionSpec, data: memoryview, rows: npt.NDArray[np.int64], on_ready: Callable[[], None]
) -> tuple[Maker, EpochTables, Policy]:
    """What makes the ``rows`` of every batch of a session whose set is mapped as ``data``.

    ``on_ready`` is called from any thread when a maker that made nothing can go on.
    """
    dataset = spec.dataset
    if dataset.source is None:
        images, labels = dataset.pixels(data)
        return PixelsInMemory(spec, images), EpochTables(spec, rows, labels, None), Policy(spec, labels)
    source = Source.attach(dataset.source, data)
    tables = EpochTables(spec, rows, source.labels, source.block_starts)
    policy = Policy(spec, source.labels)
    stored: _Stored = (
        _InMemory(dataset, data, source) if dataset.in_memory else _Ahead(spec, data, source, tables.upcoming, on_ready)
    )
    kind = PixelsOnDisk if dataset.is_pixels else Pictures
    return kind(spec, stored, policy), tables, policy


class PixelsInMemory(Maker):
    """The whole set is mapped; no sample can be damaged."""

    def __init__(self, spec: SessionSpec, images: npt.NDArray[np.uint8]) -> None:
        self._spec = spec
        self._images = images
        self._compiled = _compile(spec)

    def restart(self, epoch: int, index: int) -> None:
        return

    def make(self, share: ShareOfBatch, first: int) -> int:
        spec = self._spec
        self._compiled.process(
            self._images,
            share.ids,
            share.ids,
            spec.seed,
            share.epoch,
            spec.validation,
            share.out,
            share.rows,
            share.hashes,
        )
        return share.rows.size


class _Stored(ABC):
    """The stored bytes of samples, in order or, for substitutes, one at will."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @abstractmethod
    def restart(self, epoch: int, index: int) -> None: ...

    @abstractmethod
    def next(self, sample: int) -> StoredSample | None:
        """The next sample of the order, which is ``sample``; None when it is not there yet."""

    def fetch(self, sample: int) -> npt.NDArray[np.uint8]:
        """Any sample, read now. Raises CorruptSample."""
        out = np.empty(int(self.source.sizes[sample]), np.uint8)
        return out[: self.source.read_into(sample, out.data)]

    def close(self) -> None:
        self.source.close()


class _InMemory(_Stored):
    """Views into the memfd."""

    def __init__(self, dataset: LoadedSet, data: memoryview, source: Source) -> None:
        super().__init__(source)
        self._bytes = np.frombuffer(data, np.uint8)
        self._places = dataset.places(data)

    def restart(self, epoch: int, index: int) -> None:
        return

    def next(self, sample: int) -> StoredSample:
        try:
            return StoredSample(sample, self.fetch(sample), None)
        except CorruptSample as error:
            return StoredSample(sample, self._bytes[:0], without_frames(error))

    def fetch(self, sample: int) -> npt.NDArray[np.uint8]:
        place = self._places[sample]
        if place == NOT_STORED:  # it could not be read when the set was loaded; this raises, and says why
            return super().fetch(sample)
        return self._bytes[int(place) : int(place) + int(self.source.sizes[sample])]


class _Ahead(_Stored):
    """Read from the files by threads, each with a source of its own."""

    def __init__(
        self, spec: SessionSpec, index: memoryview, source: Source, upcoming: Upcoming, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(source)
        self._upcoming = upcoming
        readers = [Source.attach(source.spec, index) for _ in range(READERS)]
        self._ahead = ReadAhead(readers, source.sizes, spec.read_ahead, on_ready)

    def restart(self, epoch: int, index: int) -> None:
        self._ahead.restart(self._upcoming(epoch, index))

    def next(self, sample: int) -> StoredSample | None:
        taken = self._ahead.take()
        assert taken is None or taken.sample in (sample, -1), f"read ahead {taken.sample}, expected {sample}"
        return taken

    def close(self) -> None:
        super().close()
        self._ahead.close()


class PixelsOnDisk(Maker):
    """Gathers up to PIXELS_AT_ONCE images, then makes their rows in one compiled call."""

    def __init__(self, spec: SessionSpec, stored: _Stored, policy: Policy) -> None:
        self._spec = spec
        self._stored = stored
        self._policy = policy
        self._compiled = _compile(spec)
        d = spec.dataset
        self._images = np.zeros((PIXELS_AT_ONCE, d.height, d.width, d.channels), np.uint8)
        self._flat = self._images.reshape(PIXELS_AT_ONCE, -1)
        self._at = np.full(PIXELS_AT_ONCE, -1, np.int64)  # picture of each gathered row, -1 = zeros
        self._gathered = 0

    def restart(self, epoch: int, index: int) -> None:
        self._gathered = 0
        self._stored.restart(epoch, index)

    def make(self, share: ShareOfBatch, first: int) -> int:
        count = min(PIXELS_AT_ONCE, share.rows.size - first)
        while self._gathered < count:
            if not self._gather(share, first + self._gathered):
                return 0
            self._gathered += 1
        self._gathered = 0
        spec, part = self._spec, slice(first, first + count)
        self._compiled.process(
            self._images,
            self._at[:count],
            np.maximum(share.ids[part], 0),
            spec.seed,
            share.epoch,
            spec.validation,
            share.out,
            share.rows[part],
            share.hashes,
        )
        return count

    def _gather(self, share: ShareOfBatch, k: int) -> bool:
        here, sample = self._gathered, int(share.ids[k])
        self._at[here] = here if sample >= 0 else -1
        if sample < 0:
            return True
        got = self._stored.next(sample)
        if got is None:
            return False
        if got.error is None:
            self._flat[here] = got.stored
        elif isinstance(got.error, CorruptSample):
            self._policy.settle(share, k, str(got.error), self._use, self._blank)
        else:
            raise got.error
        return True

    def _use(self, sample: int) -> None:
        self._flat[self._gathered] = self._stored.fetch(sample)

    def _blank(self) -> None:
        self._at[self._gathered] = -1

    def close(self) -> None:
        self._stored.close()


class Pictures(Maker):
    """Decodes and makes one row after the other, straight into the slot."""

    def __init__(self, spec: SessionSpec, stored: _Stored, policy: Policy) -> None:
        layout = spec.layout
        self._spec = spec
        self._stored = stored
        self._policy = policy
        self._encoding: Encoding = spec.dataset.encoding
        recipe = Recipe.from_json(spec.recipe_json)
        self._recipe = compile_pictures(recipe, layout.dtype, layout.padded_channels)
        self._zeros_hash = np.uint64(xxh64(np.zeros(layout.row_bytes, np.uint8)))

    def restart(self, epoch: int, index: int) -> None:
        self._stored.restart(epoch, index)

    def make(self, share: ShareOfBatch, first: int) -> int:
        last = min(first + PICTURES_AT_ONCE, share.rows.size)
        for k in range(first, last):
            sample = int(share.ids[k])
            if sample < 0:
                self._blank(share, k)
                continue
            got = self._stored.next(sample)
            if got is None:
                return k - first
            self._make_row(share, k, got)
        return last - first

    def _make_row(self, share: ShareOfBatch, k: int, got: StoredSample) -> None:
        if got.error is None:
            try:
                self._decode(share, k, got.sample, got.stored)
                return
            except CorruptSample as error:
                text = str(error)
        elif isinstance(got.error, CorruptSample):
            text = str(got.error)  # not raised again: its traceback would keep this frame, and the ring, alive
        else:
            raise got.error
        self._policy.settle(
            share,
            k,
            text,
            use=lambda sample: self._decode(share, k, sample, self._stored.fetch(sample)),
            blank=lambda: self._blank(share, k),
        )

    def _decode(self, share: ShareOfBatch, k: int, sample: int, stored: npt.NDArray[np.uint8]) -> None:
        """The picture of ``sample`` with the draws of the sample at position ``k``."""
        spec, row = self._spec, int(share.rows[k])
        try:
            share.hashes[row] = self._recipe.make(
                stored, self._encoding, int(share.ids[k]), spec.seed, share.epoch, spec.validation, share.out[row]
            )
        except CorruptSample as error:
            raise CorruptSample(f"{self._stored.source.describe(sample)}: {error}") from error

    def _blank(self, share: ShareOfBatch, k: int) -> None:
        row = int(share.rows[k])
        share.out[row] = 0
        share.hashes[row] = self._zeros_hash

    def close(self) -> None:
        self._stored.close()


def _compile(spec: SessionSpec) -> CompiledRecipe:
    d, layout = spec.dataset, spec.layout
    recipe = Recipe.from_json(spec.recipe_json)
    return compile_recipe(recipe, d.height, d.width, d.channels, layout.dtype, layout.padded_channels)


def map_data(fd: int, dataset: LoadedSet) -> memoryview:
    """The memfd of a set, private (a shared mapping of a sealed memfd is refused by older kernels)."""
    if dataset.source is None:
        # Writable as far as NumPy knows: kernels are compiled for such arrays, and the memfd is sealed anyway.
        return memoryview(mmap.mmap(fd, dataset.total_bytes, flags=mmap.MAP_PRIVATE))
    return memoryview(mmap.mmap(fd, dataset.total_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
