"""Element types of tensors and of delivered images.

NumPy has no bfloat16, so BF16 arrays are stored as ``uint16`` bit patterns; ``bf16_from_fp32`` and ``fp32_from_bf16``
are the reference conversions (round to nearest even, NaN stays NaN).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import DTypeError

FP32_SMALLEST_NORMAL = 2.0**-126
"""Compute threads flush smaller numbers to 0."""
FP32_LARGEST = (2.0 - 2.0**-23) * 2.0**127
FP32_ROUNDS_TO_ONE = 1.0 - 2.0**-25
"""Smallest number that is 1 as a float32 (ties go to even)."""


class DType(IntEnum):
    """Values 0 to 3 are the codes of TSR files and of upstream; BF16 and UINT8 are ours."""

    FP32 = 0
    FP16 = 1
    INT8 = 2
    INT32 = 3
    BF16 = 4
    UINT8 = 5

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type that stores this element (BF16 is stored as uint16 bit patterns)."""
        return np.dtype(_NUMPY[self])

    @property
    def is_half(self) -> bool:
        """True for the two 16-bit floating types."""
        return self in (DType.FP16, DType.BF16)

    @classmethod
    def parse(cls, name: str) -> DType:
        """Return the type called ``name`` ("fp32", "bf16", "uint8", ...; any case)."""
        try:
            return cls[name.upper()]
        except KeyError:
            allowed = ", ".join(m.name.lower() for m in cls)
            raise DTypeError(f"unknown dtype {name!r}; expected one of: {allowed}") from None


_ITEMSIZE = {DType.FP32: 4, DType.FP16: 2, DType.INT8: 1, DType.INT32: 4, DType.BF16: 2, DType.UINT8: 1}
_NUMPY = {
    DType.FP32: np.float32,
    DType.FP16: np.float16,
    DType.INT8: np.int8,
    DType.INT32: np.int32,
    DType.BF16: np.uint16,
    DType.UINT8: np.uint8,
}


def bf16_from_fp32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns (nearest even); NaN keeps its sign and stays a quiet NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    quiet_nan = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet_nan, rounded)


def fp32_from_bf16(patterns: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bit patterns to float32 (exact)."""
    return (np.ascontiguousarray(patterns, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
