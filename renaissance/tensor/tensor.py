"""Tensor: a host array of compact NHWC elements, for parameters, checkpoints and tests.

The base is 256-byte aligned and memory is zero at construction. There is no implicit copy: ``numpy()`` is a view,
``clone()`` copies. BF16 elements are stored as uint16 bit patterns. Random fills are pure functions of
(seed, stream, element index): domain TENSOR_FILL of docs/random-numbers.md, c0 = block of four elements, c2 = attempt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError, ValueRejected
from renaissance.core.philox import Domain, purpose
from renaissance.core.region import ALIGNMENT
from renaissance.core.shape import Shape
from renaissance.tensor.draws import normal_draws, truncated_draws, uniform_draws, words

MAX_SHOWN = 16
"""Elements that ``to_string`` shows."""

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_BY_NUMPY = {
    np.dtype(np.float32): DType.FP32,
    np.dtype(np.float16): DType.FP16,
    np.dtype(np.int8): DType.INT8,
    np.dtype(np.int32): DType.INT32,
    np.dtype(np.uint8): DType.UINT8,
}
_LIMITS = {DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT32: (-(2**31), 2**31 - 1)}


class Tensor:
    """A zeroed host tensor of ``shape`` and ``dtype``.

    Fills change the tensor and return it; a fill that the dtype cannot hold raises DTypeError, a bad range
    ValueRejected. Factories (``zeros``, ``full``, ``uniform``, ...) make a new tensor.
    """

    __slots__ = ("_array", "_dtype", "_shape")

    def __init__(self, shape: Shape, dtype: DType = DType.FP32) -> None:
        self._shape = shape
        self._dtype = DType(dtype)
        raw = np.zeros(self.nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._array: npt.NDArray[Any] = raw[start : start + self.nbytes].view(self._dtype.numpy).reshape(shape.dims)

    # -- factories ----------------------------------------------------------------------------------------------

    @classmethod
    def zeros(cls, shape: Shape, dtype: DType = DType.FP32) -> Tensor:
        """A tensor of zeros."""
        return cls(shape, dtype)

    @classmethod
    def full(cls, shape: Shape, value: float, dtype: DType = DType.FP32) -> Tensor:
        """A tensor of one value."""
        return cls(shape, dtype).fill(value)

    @classmethod
    def uniform(
        cls, shape: Shape, low: float, high: float, seed: int, stream: int = 0, dtype: DType = DType.FP32
    ) -> Tensor:
        """Floats in [low, high)."""
        return cls(shape, dtype).fill_uniform(low, high, seed, stream)

    @classmethod
    def uniform_int(
        cls, shape: Shape, low: int, high: int, seed: int, stream: int = 0, dtype: DType = DType.INT32
    ) -> Tensor:
        """Integers: INT32 in [low, high), the byte types in [low, high]."""
        return cls(shape, dtype).fill_uniform_int(low, high, seed, stream)

    @classmethod
    def normal(
        cls, shape: Shape, mean: float, std: float, seed: int, stream: int = 0, dtype: DType = DType.FP32
    ) -> Tensor:
        """Normal floats."""
        return cls(shape, dtype).fill_normal(mean, std, seed, stream)

    @classmethod
    def randn(cls, shape: Shape, seed: int, stream: int = 0, dtype: DType = DType.FP32) -> Tensor:
        """Standard normal floats."""
        return cls.normal(shape, 0.0, 1.0, seed, stream, dtype)

    @classmethod
    def truncated_normal(
        cls,
        shape: Shape,
        mean: float,
        std: float,
        seed: int,
        stream: int = 0,
        bound: float = 2.0,
        dtype: DType = DType.FP32,
    ) -> Tensor:
        """Normal floats inside mean +- bound * std."""
        return cls(shape, dtype).fill_truncated_normal(mean, std, seed, stream, bound)

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any], dtype: DType | None = None) -> Tensor:
        """Copy an array of 0 to 4 dimensions (right-aligned), of exactly the NumPy type that stores ``dtype``.

        ``dtype`` may be left out except for BF16, whose bit patterns are plain uint16 to NumPy.
        """
        dtype = _BY_NUMPY.get(array.dtype) if dtype is None else DType(dtype)
        if dtype is None:
            raise DTypeError(f"tensor: no element type for NumPy {array.dtype}; give dtype= (BF16 is stored as uint16)")
        if array.dtype != dtype.numpy:
            raise DTypeError(f"tensor: array is {array.dtype}, but {dtype.name} is stored as {dtype.numpy}")
        tensor = cls(Shape.of(*array.shape), dtype)
        tensor._array[...] = array.reshape(tensor.shape.dims)
        return tensor

    # -- access -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> DType:
        return self._dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._shape.numel

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._shape.numel * self._dtype.itemsize

    @property
    def row_stride(self) -> int:
        """Bytes from one row (fixed n and h) to the next."""
        return self._shape.w * self._shape.c * self._dtype.itemsize

    @property
    def address(self) -> int:
        """Address of the first element, a multiple of 256."""
        return int(self._array.ctypes.data)

    def numpy(self) -> npt.NDArray[Any]:
        """A view [N,H,W,C] without a copy (uint16 bit patterns for BF16)."""
        return self._array

    def to_float32(self) -> npt.NDArray[np.float32]:
        """A new float32 array [N,H,W,C] of the values."""
        if self._dtype is DType.BF16:
            return fp32_from_bf16(self._array).reshape(self._shape.dims)
        return self._array.astype(np.float32)

    def clone(self) -> Tensor:
        """A deep copy."""
        return Tensor.from_numpy(self._array, self._dtype)

    # -- fills --------------------------------------------------------------------------------------------------

    def zero(self) -> Tensor:
        """Set every element to 0."""
        self._array[...] = 0
        return self

    def fill(self, value: float) -> Tensor:
        """Set every element to ``value``; integer types take whole numbers in their range only."""
        if self._dtype in _FLOATS:
            self._store(np.full(self._shape.dims, value, dtype=np.float64))
            return self
        low, high = _LIMITS[self._dtype]
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            raise ValueRejected(f"fill: {value} does not fit {self._dtype.name}; expected a whole number {low}..{high}")
        self._array[...] = int(value)
        return self

    def fill_uniform(self, low: float, high: float, seed: int, stream: int = 0) -> Tensor:
        """Floats in [low, high); low must be below high."""
        self._require_float("fill_uniform")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueRejected(f"fill_uniform: bounds are {low}, {high}; expected finite numbers, low < high")
        c1 = purpose(Domain.TENSOR_FILL, stream)
        self._store(low + (high - low) * uniform_draws(seed, c1, self.numel))
        return self

    def fill_uniform_int(self, low: int, high: int, seed: int, stream: int = 0) -> Tensor:
        """Integers: INT32 in [low, high) with low < high, the byte types in [low, high] with low <= high."""
        if self._dtype not in _LIMITS:
            raise DTypeError(f"fill_uniform_int: tensor is {self._dtype.name}; expected INT32, INT8 or UINT8")
        count = high - low + (self._dtype is not DType.INT32)
        least, most = _LIMITS[self._dtype]
        if count < 1 or low < least or low + count - 1 > most:
            form = "low < high" if self._dtype is DType.INT32 else "low <= high"
            raise ValueRejected(
                f"fill_uniform_int: bounds are {low}, {high}; expected {form}, values in {least}..{most}"
            )
        drawn = words(seed, purpose(Domain.TENSOR_FILL, stream), self.numel).astype(np.uint64)
        offsets = ((drawn * np.uint64(count)) >> np.uint64(32)).astype(np.int64)
        self._array[...] = (low + offsets).astype(self._dtype.numpy).reshape(self._shape.dims)
        return self

    def fill_normal(self, mean: float, std: float, seed: int, stream: int = 0) -> Tensor:
        """Normal floats; std must be 0 or more."""
        self._require_float("fill_normal")
        _check_normal("fill_normal", mean, std)
        self._store(mean + std * normal_draws(seed, purpose(Domain.TENSOR_FILL, stream), self.numel))
        return self

    def fill_truncated_normal(self, mean: float, std: float, seed: int, stream: int = 0, bound: float = 2.0) -> Tensor:
        """Normal floats inside mean +- bound * std, redrawn until they are; bound must be at least 0.5."""
        self._require_float("fill_truncated_normal")
        _check_normal("fill_truncated_normal", mean, std)
        if not bound >= MIN_TRUNCATION:
            raise ValueRejected(f"fill_truncated_normal: bound is {bound}; expected at least {MIN_TRUNCATION}")
        self._store(mean + std * truncated_draws(seed, purpose(Domain.TENSOR_FILL, stream), self.numel, bound))
        return self

    # -- comparison and text ------------------------------------------------------------------------------------

    def is_close(self, other: Tensor, tolerance: float = 1e-3) -> bool:
        """Same shape, same dtype and every difference at most ``tolerance``; integers must be equal.

        NaN is close to nothing, not even to NaN; an infinity is close to the same infinity only.
        """
        if self._shape != other._shape or self._dtype is not other._dtype:
            return False
        if self._dtype not in _FLOATS:
            return bool(np.array_equal(self._array, other._array))
        a, b = self.to_float32().astype(np.float64), other.to_float32().astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and equal infinities are caught by a == b
            return bool(((a == b) | (np.abs(a - b) <= tolerance)).all())

    def to_string(self, name: str = "", precision: int = 4) -> str:
        """The summary and the first 16 elements, as one line of text."""
        shown: Sequence[float] = self.to_float32().reshape(-1)[:MAX_SHOWN].tolist()
        if self._dtype in _FLOATS:
            values = [f"{v:.{precision}g}" for v in shown]
        else:
            values = [str(v) for v in self._array.reshape(-1)[:MAX_SHOWN].tolist()]
        more = f", ... {self.numel - MAX_SHOWN} more" if self.numel > MAX_SHOWN else ""
        return f"{self.summary(name)}: [{', '.join(values)}{more}]"

    def summary(self, name: str = "") -> str:
        """Name, shape, dtype and bytes."""
        return f"{name or 'tensor'} {self._shape} {self._dtype.name} {self.nbytes} bytes"

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    # -- inside -------------------------------------------------------------------------------------------------

    def _require_float(self, operation: str) -> None:
        if self._dtype not in _FLOATS:
            raise DTypeError(f"{operation}: tensor is {self._dtype.name}; expected FP32, FP16 or BF16")

    def _store(self, values: npt.NDArray[np.float64]) -> None:
        """Round float64 values to the element type (nearest even; BF16 by way of FP32). Overflow becomes infinity."""
        values = values.reshape(self._shape.dims)
        with np.errstate(over="ignore"):
            if self._dtype is DType.BF16:
                self._array[...] = bf16_from_fp32(values.astype(np.float32))
            else:
                self._array[...] = values.astype(self._dtype.numpy)


MIN_TRUNCATION = 0.5
"""Narrower bounds reject more than 60 % of the draws, and then redrawing is the wrong method."""


def _check_normal(operation: str, mean: float, std: float) -> None:
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0.0):
        raise ValueRejected(f"{operation}: mean {mean}, std {std}; expected finite numbers, std >= 0")
