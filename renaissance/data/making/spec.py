"""What whoever makes rows must know of a data set and of a session, as frozen values that cross process boundaries."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from renaissance.data.formats.arrays import ArrayDataset
from renaissance.data.protocol import RingLayout, align
from renaissance.data.sources import Encoding, Source, SourceSpec

SAMPLE_ALIGNMENT = 64
NOT_STORED = np.uint64(2**64 - 1)
"""The place of a sample that could not be read when its set was loaded; whoever needs it reads it again himself."""

DEFAULT_READ_AHEAD = 32 << 20
DEFAULT_MAX_CORRUPT = 100
DEFAULT_MAX_CORRUPT_SHARE = 0.01


class Load(StrEnum):
    """Where the stored bytes of a set are while it is served."""

    FULLY = "fully"  # in one memfd that all workers map
    PARTIAL = "partial"  # in its files, read ahead by the workers


class OnCorrupt(StrEnum):
    """What becomes of a sample that cannot be read or decoded."""

    FAIL = "fail"  # the session ends with an error that names it
    SUBSTITUTE = "substitute"  # another one, drawn by Philox, takes its place
    BLANK = "blank"  # a row of zeros with label -1


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """One split as the daemon holds it, and what lies where in its memfd.

    =====================  ==============================================================================
    PIXELS, FULLY          images u8[samples, height, width, channels], labels i32[samples] (page aligned)
    any other, FULLY       index of the source, places u64[samples], stored bytes (each part page aligned)
    PARTIAL                index of the source
    =====================  ==============================================================================
    """

    name: str  # canonical
    split: str
    load: Load
    encoding: Encoding
    samples: int
    num_classes: int
    height: int  # pixels; 0: vary from sample to sample
    width: int
    channels: int
    origin: str  # files it comes from, for messages
    blocks: int = 0  # blocks of the container that order "blocks" permutes, 0: it has none
    index_bytes: int = 0
    data_bytes: int = 0  # stored samples in the memfd, each aligned
    source: SourceSpec | None = None  # None when the pixels were read whole

    @property
    def is_pixels(self) -> bool:
        """True when samples have one size and need no decoding."""
        return self.encoding is Encoding.PIXELS

    @property
    def in_memory(self) -> bool:
        return self.load is Load.FULLY

    @property
    def image_bytes(self) -> int:
        return self.samples * self.height * self.width * self.channels

    @property
    def labels_offset(self) -> int:
        return align(self.image_bytes, mmap.PAGESIZE)

    @property
    def data_offset(self) -> int:
        """Of the first stored sample, in a memfd of stored bytes."""
        return align(self.index_bytes, mmap.PAGESIZE) + align(8 * self.samples, mmap.PAGESIZE)

    @property
    def total_bytes(self) -> int:
        """Size of the memfd."""
        if self.source is None:
            return self.labels_offset + 4 * self.samples
        return self.data_offset + self.data_bytes if self.in_memory else self.index_bytes

    def pixels(self, buffer: memoryview) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """(images, labels) in a mapping of ``total_bytes``; for PIXELS that are in memory."""
        shape = (self.samples, self.height, self.width, self.channels)
        images = np.frombuffer(buffer, np.uint8, self.image_bytes).reshape(shape)
        return images, np.frombuffer(buffer, np.int32, self.samples, self.labels_offset)

    def write_pixels(self, data: ArrayDataset, write: Callable[[int, memoryview], None]) -> None:
        """Hand a set that was read whole to ``write(offset, bytes)``, as ``pixels`` finds it."""
        write(0, data.images.reshape(-1).data)
        write(self.labels_offset, data.labels.data)

    @classmethod
    def of_pixels(cls, data: ArrayDataset) -> LoadedSet:
        """Small images that were read whole."""
        samples, height, width, channels = data.images.shape
        return cls(
            name=data.name,
            split=data.split,
            load=Load.FULLY,
            encoding=Encoding.PIXELS,
            samples=samples,
            num_classes=data.num_classes,
            height=height,
            width=width,
            channels=channels,
            origin=data.source,
        )

    @classmethod
    def of_source(cls, source: Source) -> LoadedSet:
        """A stored set of which only the index is in memory."""
        spec, starts = source.spec, source.block_starts
        return cls(
            name=spec.name,
            split=spec.split,
            load=Load.PARTIAL,
            encoding=spec.encoding,
            samples=spec.samples,
            num_classes=spec.num_classes,
            height=spec.height,
            width=spec.width,
            channels=spec.channels,
            origin=spec.source,
            blocks=0 if starts is None else starts.size - 1,
            index_bytes=spec.index_bytes,
            source=spec,
        )

    def places(self, buffer: memoryview) -> npt.NDArray[np.uint64]:
        """u64[samples]: offset of each stored sample in the memfd, or NOT_STORED."""
        return np.frombuffer(buffer, np.uint64, self.samples, align(self.index_bytes, mmap.PAGESIZE))


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything that decides the bytes of a session, and how damaged samples and files are dealt with."""

    dataset_name: str
    split: str  # "train" or "val"
    dataset: LoadedSet
    recipe_json: str
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batches_per_epoch: int
    layout: RingLayout
    order: str = "global"  # or "blocks", renaissance.data.order
    on_corrupt: OnCorrupt = OnCorrupt.FAIL
    max_corrupt: int = DEFAULT_MAX_CORRUPT  # distinct damaged samples after which the session fails; the hub counts
    max_corrupt_share: float = DEFAULT_MAX_CORRUPT_SHARE  # of the set, at least one sample
    read_ahead: int = DEFAULT_READ_AHEAD  # bytes per worker, PARTIAL only

    @property
    def validation(self) -> bool:
        return self.split == "val"

    @property
    def corrupt_limit(self) -> int:
        """So many distinct damaged samples are put up with; one more fails the session."""
        return min(self.max_corrupt, max(1, int(self.max_corrupt_share * self.dataset.samples)))

    @property
    def worker_bytes(self) -> int:
        """Memory that each worker may take for this session beside the ring (bytes)."""
        source = self.dataset.source
        return 0 if source is None or self.dataset.in_memory else max(self.read_ahead, source.largest)

    def valid_rows(self, index: int) -> int:
        """Rows of batch ``index`` that hold a sample of this rank."""
        own = -(-(self.dataset.samples - self.rank) // self.world_size)
        return max(0, min(self.layout.batch_size, own - index * self.layout.batch_size))

    def advance(self, epoch: int, index: int, steps: int) -> tuple[int, int]:
        """The position ``steps`` batches after (epoch, index)."""
        batches = index + steps
        return epoch + batches // self.batches_per_epoch, batches % self.batches_per_epoch
