"""Four-dimensional NHWC shapes: right-aligned when fewer than four sizes are given, every size at least 1."""

from __future__ import annotations

from dataclasses import dataclass

from renaissance.core.errors import ShapeError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape ``[N,H,W,C]``. Conventions: convolution weight KRSC = [K,R,S,C], FC weight [out,1,1,in],
    bias and BN vectors [1,1,1,C], labels [N,1,1,1], scalars [1,1,1,1].

    Raises ShapeError for a size below 1 or above 2**31 - 1.
    """

    n: int = 1
    h: int = 1
    w: int = 1
    c: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip("NHWC", self.dims, strict=True):
            if not 1 <= size <= INT32_MAX:
                raise ShapeError(f"shape {list(self.dims)}: axis {axis} is {size}; expected 1 to {INT32_MAX}")

    @classmethod
    def of(cls, *sizes: int) -> Shape:
        """Build from 0 to 4 sizes, right-aligned: ``Shape.of(3)`` is [1,1,1,3], ``Shape.of(2, 3)`` is [1,1,2,3]."""
        if len(sizes) > 4:
            raise ShapeError(f"shape {list(sizes)} has {len(sizes)} sizes; expected at most 4 (N, H, W, C)")
        return cls(*((1,) * (4 - len(sizes)) + sizes))

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """The sizes in the order N, H, W, C."""
        return (self.n, self.h, self.w, self.c)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.n * self.h * self.w * self.c

    def with_n(self, n: int) -> Shape:
        """The same shape with another batch size."""
        return Shape(n, self.h, self.w, self.c)

    def __str__(self) -> str:
        return f"[{self.n},{self.h},{self.w},{self.c}]"
