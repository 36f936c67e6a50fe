"""What a worker must know of a data set and of a session, as frozen values that cross process boundaries."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.data.protocol import RingLayout, align


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """A data set in a memfd: images u8[samples, height, width, channels] at 0, then labels i32[samples]."""

    source: str  # files it was read from, for messages
    samples: int
    num_classes: int
    height: int
    width: int
    channels: int

    @property
    def image_bytes(self) -> int:
        return self.samples * self.height * self.width * self.channels

    @property
    def labels_offset(self) -> int:
        return align(self.image_bytes, mmap.PAGESIZE)

    @property
    def total_bytes(self) -> int:
        return self.labels_offset + 4 * self.samples

    def views(self, buffer: memoryview) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """(images, labels) in a mapping of ``total_bytes``."""
        shape = (self.samples, self.height, self.width, self.channels)
        images = np.frombuffer(buffer, np.uint8, self.image_bytes).reshape(shape)
        return images, np.frombuffer(buffer, np.int32, self.samples, self.labels_offset)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything that decides the bytes of a session, and nothing else."""

    dataset_name: str
    split: str  # "train" or "val"
    dataset: DatasetShape
    recipe_json: str
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batches_per_epoch: int
    layout: RingLayout

    @property
    def validation(self) -> bool:
        return self.split == "val"

    def valid_rows(self, index: int) -> int:
        """Rows of batch ``index`` that hold a sample of this rank."""
        own = -(-(self.dataset.samples - self.rank) // self.world_size)
        return max(0, min(self.layout.batch_size, own - index * self.layout.batch_size))

    def advance(self, epoch: int, index: int, steps: int) -> tuple[int, int]:
        """The position ``steps`` batches after (epoch, index)."""
        batches = index + steps
        return epoch + batches // self.batches_per_epoch, batches % self.batches_per_epoch
