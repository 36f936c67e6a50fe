"""What a consumer holds: views of one slot of the ring, and what the dataserver says about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError
from renaissance.data.dlpack import CPU_DEVICE, bf16_capsule
from renaissance.data.protocol import SlotHeader


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of the ring; the addresses stay the same for the life of the station."""

    images: npt.NDArray[Any]  # [B, R, R, padded channels], uint16 bit patterns for BF16
    labels: npt.NDArray[np.int32]  # [B]


@dataclass(frozen=True, slots=True)
class CorruptEntry:
    """One sample that could not be delivered at one place of the stream."""

    sample: int
    epoch: int
    batch: int
    text: str  # file, record, offset and what is wrong
    action: str  # "substitute" or "blank"
    substitute: int | None  # the sample that took its place


class Batch:
    """One delivered batch. Its arrays are valid until ``release()``; after that the dataserver overwrites them.

    ``labels`` are -1 and ``images`` zero in the rows from ``valid`` on. A copy is the caller's to make.
    """

    __slots__ = ("_give_back", "_header", "_kept", "_released", "dtype", "images", "labels", "slot")

    def __init__(
        self, view: SlotView, slot: int, dtype: DType, header: SlotHeader, release: Callable[[Batch], None]
    ) -> None:
        self.images = view.images
        self.labels = view.labels
        self.slot = slot
        self.dtype = dtype
        self._give_back = release
        self._header = header
        self._kept = False
        self._released = False

    @property
    def epoch(self) -> int:
        return self._header.epoch

    @property
    def index(self) -> int:
        """Number of the batch in its epoch, from 0."""
        return self._header.index

    @property
    def valid(self) -> int:
        """Rows that hold a sample."""
        return self._header.valid

    @property
    def sequence(self) -> int:
        return self._header.sequence

    @property
    def digest(self) -> str:
        """Hex digest of the batch, as the dataserver computed it."""
        return self._header.digest.hex()

    @property
    def digest_bytes(self) -> bytes:
        return self._header.digest

    def keep(self) -> Batch:
        """Take the batch out of the hands of ``station.epoch``: the caller releases it."""
        self._kept = True
        return self

    @property
    def kept(self) -> bool:
        return self._kept

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Give the slot back. Doing it twice is harmless. May be called from any thread."""
        self._give_back(self)

    def __enter__(self) -> Batch:
        return self.keep()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __dlpack__(self, **options: Any) -> object:
        """The images as a DLPack capsule without a copy; BF16 is exported as bfloat16, which NumPy cannot do."""
        if self.dtype is not DType.BF16:
            return self.images.__dlpack__(**options)
        if options.get("stream") is not None:
            raise DeviceError("images are in host memory; a stream makes no sense for them")
        if options.get("dl_device") not in (None, CPU_DEVICE) or options.get("copy"):
            raise BufferError("bf16 images are exported in place, on the CPU only")
        return bf16_capsule(self.images)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, index={self.index}, valid={self.valid}, slot={self.slot})"
