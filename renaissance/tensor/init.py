"""Initial values of parameters: the policy (``Initializer``) and the values themselves (``fill_parameter``).

A value is a pure function of (seed, parameter ordinal, element index): the ordinal is the position of the parameter
among all parameters of the model, so weights do not depend on variants, batch sizes, addresses or the order in which
tensors are filled. Philox counter words (docs/random-numbers.md):

    c0  element block: element i of the compact NHWC order uses block i // 4, word i % 4
    c1  purpose(WEIGHT_INIT, parameter ordinal)
    c2  attempt: 0 for the first draw; a truncated normal outside its bounds is drawn again with 1, 2, ...
    c3  0

Kinds and formulas: spec/framework 1.10. Arithmetic is float64, rounded once to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.enums import FanMode, InitKind
from renaissance.core.errors import ValueRejected
from renaissance.core.philox import Domain, purpose
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor.draws import normal_draws, truncated_draws, uniform_draws

TRUNCATION = 2.0
"""Half width of TRUNC_NORMAL in standard deviations."""

_KAIMING = (InitKind.KAIMING_NORMAL, InitKind.KAIMING_UNIFORM)
_BN_KINDS = (InitKind.STANDARD, InitKind.ZERO_GAMMA)
_CONV_AND_FC_KINDS = tuple(k for k in InitKind if k not in _BN_KINDS)


@dataclass(frozen=True, slots=True)
class InitConfig:
    """How one tensor starts. Raises ValueRejected for a parameter that is not a finite number, or a negative sigma.

    ``scale`` is the constant of CONSTANTS, the variance numerator of TRUNC_NORMAL and a gain factor of the Kaiming and
    Xavier kinds; ``a`` is the negative slope of the Kaiming kinds; ``sigma`` belongs to FIXED_NORMAL.
    """

    kind: InitKind = InitKind.NONE
    scale: float = 1.0
    fan: FanMode = FanMode.FAN_IN
    a: float = 0.0
    sigma: float = 0.01

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("a", self.a), ("sigma", self.sigma)):
            if not math.isfinite(value):
                raise ValueRejected(f"initializer: {name} is {value}; expected a finite number")
        if self.sigma < 0:
            raise ValueRejected(f"initializer: sigma is {self.sigma}; expected a value >= 0")
        if self.kind is InitKind.TRUNC_NORMAL and self.scale < 0:
            raise ValueRejected(f"initializer: scale of TRUNC_NORMAL is {self.scale}; expected a value >= 0")


ZEROS = InitConfig(InitKind.ZEROS)
ONES = InitConfig(InitKind.CONSTANTS, scale=1.0)

_ONES_REGIONS = frozenset(
    {Region.B_PREV_VAR, Region.B_NEXT_VAR, Region.W_EQ_SCALE, Region.W_BN_WEIGHT, Region.E_BN_WEIGHT}
)
_ZERO_REGIONS = frozenset(
    {Region.B_PREV_MEAN, Region.B_NEXT_MEAN, Region.W_EQ_BIAS, Region.W_BN_BIAS, Region.W_FC_BIAS}
    | {r for r in Region if r.series in "EG" and r.name.endswith("_BIAS")}
    | {r for r in Region if r.series in "MV"}
)


class Initializer:
    """Policy of initial values, one kind for convolutions, one for FC layers, one for batch norm; setters chain.

    Defaults: convolution TRUNC_NORMAL, FC KAIMING_UNIFORM, a = 0, FAN_IN, scale 1, FC sigma 0.01; biases are 0 and
    batch norm starts as gamma 1, beta 0.
    """

    def __init__(self) -> None:
        self._conv = InitKind.TRUNC_NORMAL
        self._fc = InitKind.KAIMING_UNIFORM
        self._bn = InitKind.STANDARD
        self._fan = FanMode.FAN_IN
        self._a = 0.0
        self._scale = 1.0
        self._sigma = 0.01

    def conv(self, kind: InitKind) -> Initializer:
        """Kind of every convolution weight."""
        self._conv = _weight_kind("conv", kind)
        return self

    def fc(self, kind: InitKind) -> Initializer:
        """Kind of every FC weight."""
        self._fc = _weight_kind("fc", kind)
        return self

    def bn(self, kind: InitKind) -> Initializer:
        """STANDARD: every batch norm starts as gamma 1, beta 0. ZERO_GAMMA: the last one of every residual block starts
        with gamma 0, so that the block is the identity at first."""
        kind = InitKind(kind)
        if kind not in _BN_KINDS:
            allowed = ", ".join(k.name for k in _BN_KINDS)
            raise ValueRejected(f"initializer.bn: {kind.name} is for weights; expected one of: {allowed}")
        self._bn = kind
        return self

    def fan_mode(self, mode: FanMode) -> Initializer:
        """Which fan the Kaiming kinds and TRUNC_NORMAL divide by."""
        self._fan = FanMode(mode)
        return self

    def nonlinearity(self, a: float) -> Initializer:
        """Negative slope ``a`` of the Kaiming gain sqrt(2 / (1 + a*a)); sqrt(5) gives the usual linear-layer default
        of PyTorch."""
        self._a = InitConfig(a=float(a)).a
        return self

    def scale(self, value: float) -> Initializer:
        """Gain factor (Kaiming, Xavier), variance numerator (TRUNC_NORMAL) or constant (CONSTANTS)."""
        self._scale = InitConfig(scale=float(value)).scale
        return self

    def sigma(self, value: float) -> Initializer:
        """Standard deviation of FIXED_NORMAL."""
        self._sigma = InitConfig(sigma=float(value)).sigma
        return self

    def config_for(self, region: Region) -> InitConfig:
        """The initial values of a tensor in ``region`` that has no explicit configuration (spec/framework 1.10)."""
        if region in (Region.W_FIRST_CONV, Region.W_DEEP_CONV):
            return self._weight(self._conv)
        if region is Region.W_FC_WEIGHT:
            return self._weight(self._fc)
        if region in _ONES_REGIONS:
            return ONES
        if region in _ZERO_REGIONS:
            return ZEROS
        return InitConfig()

    def gamma(self, ends_block: bool) -> InitConfig:
        """The initial gamma of a batch norm; ``ends_block``: it is the last one of a residual block."""
        return InitConfig(InitKind.ZERO_GAMMA) if ends_block and self._bn is InitKind.ZERO_GAMMA else ONES

    def _weight(self, kind: InitKind) -> InitConfig:
        return InitConfig(kind, self._scale, self._fan, self._a, self._sigma)


def _weight_kind(setter: str, kind: InitKind) -> InitKind:
    kind = InitKind(kind)
    if kind not in _CONV_AND_FC_KINDS:
        allowed = ", ".join(k.name for k in _CONV_AND_FC_KINDS)
        raise ValueRejected(f"initializer.{setter}: {kind.name} is for batch norm only; expected one of: {allowed}")
    return kind


def fans(shape: Shape) -> tuple[int, int]:
    """(fan_in, fan_out) of a KRSC or FC weight: C*R*S and K*R*S."""
    return shape.c * shape.h * shape.w, shape.n * shape.h * shape.w


def fan_of(shape: Shape, mode: FanMode) -> int:
    """The fan that ``mode`` names; FAN_AVG is the integer mean of the two."""
    fan_in, fan_out = fans(shape)
    return {FanMode.FAN_IN: fan_in, FanMode.FAN_OUT: fan_out, FanMode.FAN_AVG: (fan_in + fan_out) // 2}[mode]


def distribution(config: InitConfig, shape: Shape) -> tuple[str, float]:
    """The law of one element: ("constant", value), ("uniform", bound), ("normal", sigma) or ("truncated", sigma)."""
    kind, fan_sum = config.kind, sum(fans(shape))
    gain = config.scale * (math.sqrt(2.0 / (1.0 + config.a * config.a)) if kind in _KAIMING else 1.0)
    fan = fan_of(shape, config.fan)
    match kind:
        case InitKind.KAIMING_NORMAL:
            return "normal", abs(gain) / math.sqrt(fan)
        case InitKind.KAIMING_UNIFORM:
            return "uniform", abs(gain) * math.sqrt(3.0 / fan)
        case InitKind.XAVIER_NORMAL:
            return "normal", abs(gain) * math.sqrt(2.0 / fan_sum)
        case InitKind.XAVIER_UNIFORM:
            return "uniform", abs(gain) * math.sqrt(6.0 / fan_sum)
        case InitKind.TRUNC_NORMAL:
            return "truncated", math.sqrt(config.scale / fan)
        case InitKind.FIXED_NORMAL:
            return "normal", config.sigma
        case InitKind.CONSTANTS:
            return "constant", config.scale
        case InitKind.STANDARD:
            return "constant", 1.0
        case InitKind.NONE | InitKind.ZEROS | InitKind.ZERO_GAMMA:
            return "constant", 0.0


def fill_parameter(config: InitConfig, shape: Shape, seed: int, stream_id: int) -> npt.NDArray[np.float32]:
    """Initial values of one parameter, float32 of shape [N,H,W,C], C-contiguous.

    ``stream_id`` is the ordinal of the parameter among all parameters of the model (0 to 2**24 - 1). Stateless: the
    same arguments give the same bytes. STANDARD and ZERO_GAMMA give a batch-norm gamma of 1 and 0.
    """
    law, value = distribution(config, shape)
    c1 = purpose(Domain.WEIGHT_INIT, stream_id)
    if law == "constant":
        flat = np.full(shape.numel, value, dtype=np.float64)
    elif law == "uniform":
        flat = (2.0 * uniform_draws(seed, c1, shape.numel) - 1.0) * value
    elif law == "normal":
        flat = normal_draws(seed, c1, shape.numel) * value
    else:
        flat = truncated_draws(seed, c1, shape.numel, TRUNCATION) * value
    return flat.astype(np.float32).reshape(shape.dims)
