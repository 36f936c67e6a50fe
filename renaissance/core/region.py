"""The 68 named regions of device memory, in address order (spec/framework 1.5).

The order makes every bulk operation one contiguous span: the gradient buckets, the weight and bias spans, the clear
span. A region whose series letter is not S, T, F, I or R keeps its bytes for the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from renaissance.core.dtype import DType


class Region(IntEnum):
    B_PREV_MEAN = 0
    B_PREV_VAR = 1
    B_NEXT_MEAN = 2
    B_NEXT_VAR = 3
    W_EQ_BIAS = 4
    W_EQ_SCALE = 5
    W_BN_BIAS = 6
    W_BN_WEIGHT = 7
    W_FC_BIAS = 8
    W_FC_WEIGHT = 9
    W_FIRST_CONV = 10
    W_DEEP_CONV = 11
    E_BN_BIAS = 12
    E_BN_WEIGHT = 13
    E_FC_BIAS = 14
    E_FC_WEIGHT = 15
    E_FIRST_CONV = 16
    E_DEEP_CONV = 17
    E_FC_WEIGHT_FP16 = 18
    E_FIRST_CONV_FP16 = 19
    E_DEEP_CONV_FP16 = 20
    A_FC_WEIGHT = 21
    A_FIRST_CONV = 22
    A_DEEP_CONV = 23
    G_BN_BIAS = 24
    G_BN_WEIGHT = 25
    G_FC_BIAS = 26
    G_FC_WEIGHT = 27
    G_FIRST_CONV = 28
    G_DEEP_CONV = 29
    R_RESULT = 30
    G_FC_WEIGHT_FP16 = 31
    G_FIRST_CONV_FP16 = 32
    G_DEEP_CONV_FP16 = 33
    M_BN_BIAS = 34
    M_BN_WEIGHT = 35
    M_FC_BIAS = 36
    M_FC_WEIGHT = 37
    M_FIRST_CONV = 38
    M_DEEP_CONV = 39
    V_BN_BIAS = 40
    V_BN_WEIGHT = 41
    V_FC_BIAS = 42
    V_FC_WEIGHT = 43
    V_FIRST_CONV = 44
    V_DEEP_CONV = 45
    N_FC_WEIGHT = 46
    N_FIRST_CONV = 47
    N_DEEP_CONV = 48
    I_A_LABEL = 49
    I_A_DATA = 50
    I_B_LABEL = 51
    I_B_DATA = 52
    F_FEATURE_FP32 = 53
    F_GRAD_SLOT_FP32 = 54
    F_FEATURE_FP16 = 55
    F_GRAD_SLOT_FP16 = 56
    S_SCALAR_FP32 = 57
    S_SCALAR_FP16 = 58
    S_SCALAR_INT32 = 59
    S_SCALAR_INT8 = 60
    S_MASK = 61
    T_TEMP_FP32 = 62
    T_TEMP_FP16 = 63
    T_TEMP_INT32 = 64
    T_TEMP_INT8 = 65
    R_PREDICTED_LABEL = 66
    R_RESULT_ACCUMULATED = 67

    @property
    def series(self) -> str:
        """The letter before the first underscore."""
        return self.name[0]

    def dtype(self, half: DType | None) -> DType:
        """Element type of the region. ``half`` is the 16-bit type of the numeric profile (None without AMP).

        The names say FP16 for every 16-bit region; with a bf16 profile they hold BF16.
        """
        if self in (Region.I_A_DATA, Region.I_B_DATA):
            return half or DType.FP32
        if self in _INT32:
            return DType.INT32
        if self in _INT8:
            return DType.INT8
        if self in _HALF:
            return half or DType.FP16
        return DType.FP32


_INT32 = {
    Region.I_A_LABEL,
    Region.I_B_LABEL,
    Region.S_SCALAR_INT32,
    Region.T_TEMP_INT32,
    Region.R_PREDICTED_LABEL,
}
_INT8 = {Region.S_SCALAR_INT8, Region.S_MASK, Region.T_TEMP_INT8}
_HALF = {r for r in Region if r.name.endswith("_FP16")} | {
    Region.A_FC_WEIGHT,
    Region.A_FIRST_CONV,
    Region.A_DEEP_CONV,
}


@dataclass(frozen=True, slots=True)
class Span:
    """The regions ``first`` to ``last``, both included, as one contiguous range of bytes."""

    first: Region
    last: Region

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"span {self.first.name}..{self.last.name} runs backwards")

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(i) for i in range(self.first, self.last + 1))

    def __str__(self) -> str:
        return self.first.name if self.first == self.last else f"{self.first.name}..{self.last.name}"


BUCKET_DEEP = Span(Region.G_DEEP_CONV, Region.R_RESULT)
BUCKET_FIRST = Span(Region.G_BN_BIAS, Region.G_FIRST_CONV)
ZERO_GRAD_SPAN = Span(Region.G_BN_BIAS, Region.G_DEEP_CONV_FP16)
NAN_SPAN = Span(Region.G_BN_BIAS, Region.G_DEEP_CONV)
WEIGHT_SPAN = Span(Region.W_FC_WEIGHT, Region.W_DEEP_CONV)
BIAS_SPAN = Span(Region.W_BN_BIAS, Region.W_FC_BIAS)
TRAINED_SPAN = Span(Region.W_BN_BIAS, Region.W_DEEP_CONV)
HALF_WEIGHT_SPAN = Span(Region.A_FC_WEIGHT, Region.A_DEEP_CONV)
EMA_SPAN = Span(Region.E_BN_BIAS, Region.E_DEEP_CONV)
EMA_WEIGHT_SPAN = Span(Region.E_FC_WEIGHT, Region.E_DEEP_CONV)
HALF_EMA_SPAN = Span(Region.E_FC_WEIGHT_FP16, Region.E_DEEP_CONV_FP16)
PREV_STATS_SPAN = Span(Region.B_PREV_MEAN, Region.B_PREV_VAR)
NEXT_STATS_SPAN = Span(Region.B_NEXT_MEAN, Region.B_NEXT_VAR)
RESULT_SPAN = Span(Region.R_RESULT, Region.R_RESULT)
ACCUMULATED_SPAN = Span(Region.R_RESULT_ACCUMULATED, Region.R_RESULT_ACCUMULATED)
PERSISTENT_REGIONS = frozenset(
    {*PREV_STATS_SPAN.regions, *TRAINED_SPAN.regions, *EMA_SPAN.regions} | {r for r in Region if r.series in "MV"}
)
"""What a run carries from step to step, besides a few scalars. Not in it: half copies and folded batch norm, which are
made from these, and the statistics of the current batch (B_NEXT), which become B_PREV only when the step counts."""
ALIGNMENT = 256
"""Bytes: every tensor offset and region base is a multiple of this."""


def align(value: int, alignment: int = ALIGNMENT) -> int:
    """Round ``value`` up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment
