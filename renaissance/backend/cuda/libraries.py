"""What the backend asks of NVIDIA's libraries, as small interfaces: cuDNN, cuBLASLt and NCCL, or stand-ins for them.

A plan is made once, when a program is captured for the first time, and then only executed: it is bound to sizes and
types, not to addresses. ``execute`` allocates nothing, never waits and may run while its stream is capturing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.core.dtype import DType


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A cross-correlation with zero padding; x [N,H,W,C], w [K,R,S,C/groups], y [N,Ho,Wo,K], all compact NHWC.

    ``dtype`` is that of x, w and y, and of what is written: cuDNN has a wider result for few shapes only.
    """

    direction: Direction
    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    stride: int
    pad: int
    groups: int
    dtype: DType

    @property
    def out_h(self) -> int:
        return (self.h + 2 * self.pad - self.r) // self.stride + 1

    @property
    def out_w(self) -> int:
        return (self.w + 2 * self.pad - self.s) // self.stride + 1


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """Row-major C[m,n] = op(A)[m,k] op(B)[k,n]; ``ta``: A is stored [k,m], ``tb``: B is stored [n,k].

    ``dtype`` is that of A and B, ``result`` that of C (FP32 or ``dtype``); sums are FP32.
    """

    m: int
    n: int
    k: int
    ta: bool
    tb: bool
    dtype: DType
    result: DType


class Plan(Protocol):
    """How one operation is computed: sizes and algorithm are fixed, addresses are not."""

    @property
    def workspace(self) -> int:
        """Bytes of working memory that ``execute`` needs."""

    @property
    def name(self) -> str:
        """The algorithm, for the numeric profile and for dumps."""

    def execute(self, stream: int, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        """Put the operation on ``stream``. Operands of a convolution: (x, w, y), (dy, w, dx) or (dy, x, dw); of a
        product: (A, B, C)."""


class Convolutions(Protocol):
    """cuDNN."""

    def plan(self, spec: ConvolutionSpec) -> Plan:
        """A deterministic plan, always the same one for the same spec. Raises DeviceError that names the spec when the
        library has none, and when it is asked for one for the first time while a stream is capturing."""

    def facts(self) -> dict[str, str]:
        """Version, and a digest of the plans in use: part of the numeric profile."""


class Products(Protocol):
    """cuBLASLt."""

    def plan(self, spec: ProductSpec) -> Plan:
        """As ``Convolutions.plan``."""

    def facts(self) -> dict[str, str]:
        """As ``Convolutions.facts``."""


class Collectives(Protocol):
    """NCCL, one rank per process."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def mean(self, stream: int, values: Buffer) -> None:
        """Every rank's float32 ``values`` become their mean over the ranks, in place. All ranks call alike."""

    def facts(self) -> dict[str, str]:
        """Version: part of the numeric profile."""

    def close(self) -> None:
        """Leave the others, after the graphs that hold collectives are gone. May be called again."""
