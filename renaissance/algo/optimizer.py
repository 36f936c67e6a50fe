"""Optimizers: configuration, and the update formulas in float64 that kernels are checked against.

An optimizer holds no learning rate and no state: a scheduler owns the rate, device memory the moments. With gradient
g, rate h and decay l (spec/framework 4.2):

    SGD           w <- w (1 - h l) - h g
    SGD_MOMENTUM  m <- b m + g;  w <- w (1 - h l) - h m
    SGD_NESTEROV  m <- b m + g;  w <- w (1 - h l) - h (b m + g)
    ADAM          g' = g + l w;  m <- b1 m + (1 - b1) g';  v <- b2 v + (1 - b2) g'^2;
                  w <- w - h (m c1) / (sqrt(v c2) + eps),  c = 1 / (1 - b^t), t counted from 1
    ADAMW         w <- w (1 - h l), then as ADAM with g
    LARS          r = tc |w| / (|g| + l |w| + eps), at most 100, and 1 when |w| or |g| is below 1e-12;
                  m <- b m + h r (g + l w);  w <- w - m
    LARS_NESTEROV m as LARS;  w <- w - (h r (g + l w) + b m)

Norms are those of the whole parameter. Decay of the SGD family is decoupled and scaled by h. Biases and batch-norm
parameters use l = 0; under LARS they go by momentum or Nesterov (``OptimizerConfig.plain_kind``) without a ratio.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from renaissance.algo.checks import number
from renaissance.core.dtype import FP32_LARGEST, FP32_ROUNDS_TO_ONE, FP32_SMALLEST_NORMAL
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import ValueRejected

F64 = npt.NDArray[np.float64]

ADAM_KINDS = frozenset({OptimizerKind.ADAM, OptimizerKind.ADAMW})
LARS_KINDS = frozenset({OptimizerKind.LARS, OptimizerKind.LARS_NESTEROV})
LARS_NORM_FLOOR = 1e-12
LARS_RATIO_CAP = 100.0


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Frozen configuration. Fields that the kind does not use are 0."""

    kind: OptimizerKind
    weight_decay: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    trust_coefficient: float = 0.0

    @property
    def has_first_moment(self) -> bool:
        """True when the M regions hold a momentum or first moment."""
        return self.kind is not OptimizerKind.SGD

    @property
    def plain_kind(self) -> OptimizerKind:
        """The rule for biases and batch-norm parameters, with decay 0."""
        plain = {
            OptimizerKind.LARS: OptimizerKind.SGD_MOMENTUM,
            OptimizerKind.LARS_NESTEROV: OptimizerKind.SGD_NESTEROV,
        }
        return plain.get(self.kind, self.kind)

    @property
    def has_second_moment(self) -> bool:
        """True when the V regions hold a second moment."""
        return self.kind in ADAM_KINDS

    def hyper(self, lr: float) -> HyperParameters:
        """The numbers of one step at learning rate ``lr``."""
        return HyperParameters(
            lr, self.weight_decay, self.momentum, self.beta1, self.beta2, self.eps, self.trust_coefficient
        )


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """What one update needs besides weights, gradient and state."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    trust_coefficient: float = 0.001


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Moments of one parameter (0.0 stands for zeros of any shape) and the number of updates done."""

    m: F64 | float = 0.0
    v: F64 | float = 0.0
    step: int = 0


class Optimizer(ABC):
    """Base of the optimizers: what the task asks of them."""

    @abstractmethod
    def config(self) -> OptimizerConfig:
        """The frozen configuration; raises ValueRejected when the options contradict each other."""

    def __repr__(self) -> str:
        return repr(self.config())


class SGD(Optimizer):
    """Stochastic gradient descent: momentum 0.9, no decay, no Nesterov unless set.

    Momentum 0 is plain SGD, which keeps no state.
    """

    def __init__(self) -> None:
        self._momentum = 0.9
        self._weight_decay = 0.0
        self._nesterov = False

    def momentum(self, value: float) -> SGD:
        """Momentum, 0 <= value < 1."""
        self._momentum = _half_open_unit("momentum", value)
        return self

    def weight_decay(self, value: float) -> SGD:
        """Decoupled decay of FC and convolution weights, >= 0."""
        self._weight_decay = _not_negative("weight_decay", value)
        return self

    def nesterov(self, on: bool = True) -> SGD:
        """Look ahead along the momentum."""
        self._nesterov = _on_or_off("nesterov", on)
        return self

    def config(self) -> OptimizerConfig:
        if self._nesterov and self._momentum == 0.0:
            raise ValueRejected("SGD: nesterov is on but momentum is 0; give a momentum above 0 or drop nesterov()")
        if self._momentum == 0.0:
            return OptimizerConfig(OptimizerKind.SGD, self._weight_decay)
        kind = OptimizerKind.SGD_NESTEROV if self._nesterov else OptimizerKind.SGD_MOMENTUM
        return OptimizerConfig(kind, self._weight_decay, self._momentum)


class LARS(Optimizer):
    """Layer-wise adaptive rates: momentum 0.9, trust coefficient 0.001, eps 1e-8, no decay, no Nesterov unless set.

    Its ratio is only as good as the decay and warm-up it is used with; large batches are what it is for.
    """

    def __init__(self) -> None:
        self._momentum = 0.9
        self._weight_decay = 0.0
        self._trust = 0.001
        self._eps = 1e-8
        self._nesterov = False

    def momentum(self, value: float) -> LARS:
        """Momentum, 0 <= value < 1."""
        self._momentum = _half_open_unit("momentum", value)
        return self

    def weight_decay(self, value: float) -> LARS:
        """Decay of FC and convolution weights inside gradient and ratio, >= 0."""
        self._weight_decay = _not_negative("weight_decay", value)
        return self

    def trust_coefficient(self, value: float) -> LARS:
        """Size of a step relative to its weight at rate 1, at least the smallest normal float32."""
        self._trust = _normal_float32("trust_coefficient", value)
        return self

    def eps(self, value: float) -> LARS:
        """Added to the norm of the gradient, >= 0."""
        self._eps = _not_negative("eps", value)
        return self

    def nesterov(self, on: bool = True) -> LARS:
        """Look ahead along the momentum."""
        self._nesterov = _on_or_off("nesterov", on)
        return self

    def config(self) -> OptimizerConfig:
        if self._nesterov and self._momentum == 0.0:
            raise ValueRejected("LARS: nesterov is on but momentum is 0; give a momentum above 0 or drop nesterov()")
        return OptimizerConfig(
            OptimizerKind.LARS_NESTEROV if self._nesterov else OptimizerKind.LARS,
            self._weight_decay,
            self._momentum,
            eps=self._eps,
            trust_coefficient=self._trust,
        )


class _AdamFamily(Optimizer):
    _kind: OptimizerKind

    def __init__(self) -> None:
        self._beta1 = 0.9
        self._beta2 = 0.999
        self._eps = 1e-8
        self._weight_decay = 0.0

    def beta1(self, value: float) -> Self:
        """Decay of the first moment, 0 < value < 1, also as a float32."""
        self._beta1 = _open_unit("beta1", value)
        return self

    def beta2(self, value: float) -> Self:
        """Decay of the second moment, 0 < value < 1, also as a float32."""
        self._beta2 = _open_unit("beta2", value)
        return self

    def eps(self, value: float) -> Self:
        """Added to the root of the second moment, at least the smallest normal float32 (about 1.2e-38)."""
        self._eps = _normal_float32("eps", value)
        return self

    def weight_decay(self, value: float) -> Self:
        """Decay of FC and convolution weights, >= 0."""
        self._weight_decay = _not_negative("weight_decay", value)
        return self

    def config(self) -> OptimizerConfig:
        return OptimizerConfig(self._kind, self._weight_decay, beta1=self._beta1, beta2=self._beta2, eps=self._eps)


class Adam(_AdamFamily):
    """Adam with decay as an L2 term inside the gradient: beta1 0.9, beta2 0.999, eps 1e-8, no decay unless set."""

    _kind = OptimizerKind.ADAM


class AdamW(_AdamFamily):
    """Adam with decoupled decay: beta1 0.9, beta2 0.999, eps 1e-8, no decay unless set."""

    _kind = OptimizerKind.ADAMW


def reference_update(
    kind: OptimizerKind, w: npt.ArrayLike, g: npt.ArrayLike, state: OptimizerState, hyper: HyperParameters
) -> tuple[F64, OptimizerState]:
    """New weights and state after one step, in float64; ``g`` is the unscaled gradient, of the shape of ``w``.

    The inputs are not changed.
    """
    weights, grad = np.array(w, dtype=np.float64), np.array(g, dtype=np.float64)
    h, decayed = hyper, weights * (1.0 - hyper.lr * hyper.weight_decay)
    match kind:
        case OptimizerKind.SGD:
            return decayed - h.lr * grad, OptimizerState(step=state.step + 1)
        case OptimizerKind.SGD_MOMENTUM:
            m = h.momentum * state.m + grad
            return decayed - h.lr * m, OptimizerState(m, step=state.step + 1)
        case OptimizerKind.SGD_NESTEROV:
            m = h.momentum * state.m + grad
            return decayed - h.lr * (h.momentum * m + grad), OptimizerState(m, step=state.step + 1)
        case OptimizerKind.ADAM:
            step, new = _adam_step(grad + h.weight_decay * weights, state, h)
            return weights - step, new
        case OptimizerKind.ADAMW:
            step, new = _adam_step(grad, state, h)
            return decayed - step, new
        case OptimizerKind.LARS | OptimizerKind.LARS_NESTEROV:
            scaled = h.lr * lars_ratio(weights, grad, h) * (grad + h.weight_decay * weights)
            m = h.momentum * state.m + scaled
            step = m if kind is OptimizerKind.LARS else scaled + h.momentum * m
            return weights - step, OptimizerState(m, step=state.step + 1)


def lars_ratio(w: npt.ArrayLike, g: npt.ArrayLike, hyper: HyperParameters) -> float:
    """How much longer than the plain step LARS makes it for a parameter ``w`` with unscaled gradient ``g``."""
    weight, grad = (float(np.linalg.norm(np.asarray(a, dtype=np.float64).ravel())) for a in (w, g))
    if weight < LARS_NORM_FLOOR or grad < LARS_NORM_FLOOR:
        return 1.0
    ratio = hyper.trust_coefficient * weight / (grad + hyper.weight_decay * weight + hyper.eps)
    return min(ratio, LARS_RATIO_CAP)


def _adam_step(grad: F64, state: OptimizerState, h: HyperParameters) -> tuple[F64, OptimizerState]:
    t = state.step + 1
    m = h.beta1 * state.m + (1.0 - h.beta1) * grad
    v = h.beta2 * state.v + (1.0 - h.beta2) * grad * grad
    c1, c2 = 1.0 / (1.0 - h.beta1**t), 1.0 / (1.0 - h.beta2**t)
    return h.lr * (m * c1) / (np.sqrt(v * c2) + h.eps), OptimizerState(m, v, t)


def _on_or_off(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


def _not_negative(name: str, value: float) -> float:
    """Finite as a float32, which is what the device holds: an infinite one would make every weight NaN."""
    value = number(name, value)
    if not 0.0 <= value <= FP32_LARGEST:
        raise ValueRejected(f"{name} is {value}; expected a value >= 0 that is finite as float32")
    return value


def _normal_float32(name: str, value: float) -> float:
    """An eps that is 0 where it is used makes a weight without a gradient 0 / 0."""
    value = number(name, value)
    if not FP32_SMALLEST_NORMAL <= value <= FP32_LARGEST:
        raise ValueRejected(f"{name} is {value}; expected {FP32_SMALLEST_NORMAL} to {FP32_LARGEST}")
    return value


def _half_open_unit(name: str, value: float) -> float:
    value = number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueRejected(f"{name} is {value}; expected 0 <= value < 1")
    return value


def _open_unit(name: str, value: float) -> float:
    """A beta that is 1 where it is used makes the bias correction 1 / (1 - beta**t) infinite."""
    value = number(name, value)
    if not 0.0 < value < FP32_ROUNDS_TO_ONE:
        raise ValueRejected(f"{name} is {value}; expected 0 < value < 1 (as float32: at most 0.99999994)")
    return value
