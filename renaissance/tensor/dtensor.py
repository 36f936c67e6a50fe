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

INPUT_ALIGNMENT = 4
FEATURE_ALIGNMENT = 8
MASK_ALIGNMENT = 8
UNPLACED = -1
"""Offset of a tensor whose memory plan is not finalized yet."""


def channel_alignment(dtype: DType, region: Region, backend: str = "cpu") -> int:
    """Multiple that the channel count of a row is padded to, for ``backend`` "cpu" or "cuda".

    On the CPU every region is compact, the inputs too: they are the shared slots of the dataserver, and a grey image
    shall not carry four times its bytes. Raises MemoryPlanError for another backend name.
    """
    if backend == "cpu":
        return 1
    if backend != "cuda":
        raise MemoryPlanError(f"channel alignment: unknown backend {backend!r}; expected one of: cpu, cuda")
    if dtype.is_half and region in (Region.I_A_DATA, Region.I_B_DATA):
        return INPUT_ALIGNMENT
    if dtype.is_half and region in (Region.F_FEATURE_FP16, Region.F_GRAD_SLOT_FP16):
        return FEATURE_ALIGNMENT
    if dtype is DType.INT8 and region is Region.S_MASK:
        return MASK_ALIGNMENT
    return 1


def slot_bytes(shape: Shape, dtype: DType, region: Region, backend: str = "cpu") -> int:
    """Bytes of the arena that a tensor of this shape takes, a multiple of 256."""
    padded = shape.n * shape.h * shape.w * align(shape.c, channel_alignment(dtype, region, backend))
    return _slot_of(padded, dtype)


def _slot_of(elements: int, dtype: DType) -> int:
    if dtype.itemsize == 1:
        return align(elements + SPARE_BYTES)
    half = align(2 * elements + SPARE_BYTES)
    return half if dtype.itemsize == 2 else 2 * half


@dataclass(frozen=True, slots=True)
class DTensor:
    """One tensor of a memory plan: what it is, where it lies, how it starts.

    ``slot_bytes`` is either ``slot_bytes(shape, dtype, region)`` or a larger slot given by the compiler (the maximum
    over the variants). ``offset`` is in bytes from the start of the arena, a multiple of 256, ``UNPLACED`` until the
    plan is finalized. ``channel_alignment`` is fixed by the backend (1 on the CPU).

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
    channel_alignment: int = 1

    def __post_init__(self) -> None:
        needed = _slot_of(self._padded_numel, self.dtype)
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
        backend: str = "cpu",
    ) -> DTensor:
        """An unplaced tensor whose slot follows from its own shape."""
        a = channel_alignment(dtype, region, backend)
        slot = slot_bytes(shape, dtype, region, backend)
        return cls(id, name, shape, dtype, region, slot, init=init, channel_alignment=a)

    def at(self, offset: int) -> DTensor:
        """The same tensor placed at ``offset`` bytes."""
        return replace(self, offset=offset)

    @property
    def padded_c(self) -> int:
        """Channels per row including padding."""
        return align(self.shape.c, self.channel_alignment)

    @property
    def is_compact(self) -> bool:
        """True when rows carry no padding channels."""
        return self.padded_c == self.shape.c

    @property
    def nbytes(self) -> int:
        """Bytes of the logical elements."""
        return self.shape.numel * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes of the elements including padding channels."""
        return self._padded_numel * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Device strides of N, H, W, C in elements."""
        cp = self.padded_c
        return cp * self.shape.w * self.shape.h, cp * self.shape.w, cp, 1

    @property
    def host_strides(self) -> tuple[int, int, int, int]:
        """Strides of N, H, W, C in elements of the compact copy on the host."""
        c = self.shape.c
        return c * self.shape.w * self.shape.h, c * self.shape.w, c, 1

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

    @property
    def _padded_numel(self) -> int:
        return self.shape.n * self.shape.h * self.shape.w * self.padded_c

    def __str__(self) -> str:
        where = f"@{self.offset}" if self.placed else "unplaced"
        return f"#{self.id} {self.name} {self.shape} {self.dtype.name} {self.region.name} {where} +{self.slot_bytes}"
