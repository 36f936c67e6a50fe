"""DTensor: the descriptor of one tensor in a rank's arena. It owns no memory and is the same on every rank.

The slot rule (spec/framework 2.3) makes an FP32 slot exactly twice its half slot: a master tensor lies at twice the
relative position of its half copy, so one element-wise cast over a region span converts all tensors of the region,
padding included. Every slot has 16 spare bytes for vectorised over-reads at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from renaissance.core.dtype import DType
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import ALIGNMENT, Region, align
from renaissance.core.shape import Shape
from renaissance.tensor.init import InitConfig

SPARE_BYTES = 16
"""Bytes past the last element that a vectorised kernel may read."""

UNPLACED = -1
"""Offset of a tensor whose memory plan is not finalized yet."""


def slot_bytes(shape: Shape, dtype: DType) -> int:
    """Bytes of the arena that a tensor of this shape takes, a multiple of 256."""
    return _slot_of(shape.numel, dtype)


def _slot_of(elements: int, dtype: DType) -> int:
    if dtype.itemsize == 1:
        return align(elements + SPARE_BYTES)
    half = align(2 * elements + SPARE_BYTES)
    return half if dtype.itemsize == 2 else 2 * half


@dataclass(frozen=True, slots=True)
class DTensor:
    """One tensor of a memory plan: what it is, where it lies, how it starts.

    ``slot_bytes`` is either ``slot_bytes(shape, dtype)`` or a larger slot given by the compiler (the maximum over the
    variants). ``offset`` is in bytes from the start of the arena, a multiple of 256, ``UNPLACED`` until the plan is
    finalized. Elements are compact NHWC on every backend; a model that wants padded channels has a layer for it.

    Raises MemoryPlanError for a slot that is too small or misaligned, and for a bad offset.
    """

    id: int
    name: str
    shape: Shape
    dtype: DType
    region: Region
    slot_bytes: int
    offset: int = UNPLACED
    init: InitConfig | None = None

    def __post_init__(self) -> None:
        needed = slot_bytes(self.shape, self.dtype)
        if self.slot_bytes < needed or self.slot_bytes % ALIGNMENT:
            raise MemoryPlanError(
                f"tensor {self.name!r} {self.shape} {self.dtype.name} in {self.region.name}: slot of {self.slot_bytes} "
                f"bytes; expected a multiple of {ALIGNMENT}, at least {needed}"
            )
        if self.offset != UNPLACED and (self.offset < 0 or self.offset % ALIGNMENT):
            raise MemoryPlanError(
                f"tensor {self.name!r} in {self.region.name}: offset {self.offset}; expected a multiple of {ALIGNMENT}"
            )

    @classmethod
    def make(
        cls,
        id: int,
        name: str,
        shape: Shape,
        dtype: DType,
        region: Region,
        *,
        init: InitConfig | None = None,
    ) -> DTensor:
        """An unplaced tensor whose slot follows from its own shape."""
        return cls(id, name, shape, dtype, region, slot_bytes(shape, dtype), init=init)

    def at(self, offset: int) -> DTensor:
        """The same tensor placed at ``offset`` bytes."""
        return replace(self, offset=offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical elements."""
        return self.shape.numel * self.dtype.itemsize

    @property
    def placed(self) -> bool:
        """True once the memory plan has given the tensor an offset."""
        return self.offset != UNPLACED

    @property
    def end(self) -> int:
        """First byte after the slot; raises MemoryPlanError while the tensor is unplaced."""
        if not self.placed:
            raise MemoryPlanError(f"tensor {self.name!r} has no offset yet; finalize the memory plan first")
        return self.offset + self.slot_bytes

    def __str__(self) -> str:
        where = f"@{self.offset}" if self.placed else "unplaced"
        return f"#{self.id} {self.name} {self.shape} {self.dtype.name} {self.region.name} {where} +{self.slot_bytes}"
