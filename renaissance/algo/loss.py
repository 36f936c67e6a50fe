"""Cross-entropy with label smoothing: its configuration and its formulas in float64.

With logits z, p = softmax(z) and smoothing e over K classes (spec/framework 4.1, without the 1e-8 guard):

    loss_i = -(1 - e) * ln p_y - (e / K) * sum_c ln p_c
    d loss_i / d z_c = p_c - e / K - (1 - e) * [c = y]

The batch loss is the mean over the valid rows; rows with label -1 give no loss and no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.algo.checks import number
from renaissance.core.errors import ShapeError, ValueRejected

F64 = npt.NDArray[np.float64]

MASKED_LABEL = -1


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Frozen configuration of the loss; ``label_smoothing`` lies in [0, 1)."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:  # also false for NaN
            raise ValueRejected(f"label_smoothing is {self.label_smoothing}; expected 0 <= value < 1")


class CrossEntropyLoss:
    """Softmax cross-entropy; ``CrossEntropyLoss().label_smoothing(0.1)``."""

    def __init__(self) -> None:
        self._config = LossConfig()

    def label_smoothing(self, epsilon: float) -> CrossEntropyLoss:
        """Share of the target that is spread evenly over all classes, 0 <= epsilon < 1 (ValueRejected otherwise)."""
        self._config = LossConfig(number("label_smoothing", epsilon))
        return self

    def config(self) -> LossConfig:
        """The frozen configuration."""
        return self._config

    def __repr__(self) -> str:
        return f"CrossEntropyLoss(label_smoothing={self._config.label_smoothing})"


def reference_cross_entropy(
    logits: npt.ArrayLike, labels: npt.ArrayLike, label_smoothing: float = 0.0
) -> tuple[float, F64]:
    """Mean loss and its gradient for ``logits`` [N,K] and integer ``labels`` [N]; the gradient is float64 [N,K].

    Raises ShapeError when the two do not fit, ValueRejected for a label outside -1..K-1. Without a valid row both
    results are 0.
    """
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if z.ndim != 2 or y.shape != z.shape[:1]:
        raise ShapeError(f"cross-entropy: logits {z.shape} and labels {y.shape}; expected [N,K] and [N]")
    classes = z.shape[1]
    if y.size and not MASKED_LABEL <= y.min() <= y.max() < classes:
        raise ValueRejected(f"cross-entropy: labels span {y.min()} to {y.max()}; expected -1 to {classes - 1}")
    valid = y != MASKED_LABEL
    count = int(valid.sum())
    if count == 0:
        return 0.0, np.zeros_like(z)
    shifted = z - z.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    target = np.full_like(z, label_smoothing / classes)
    target[valid, y[valid]] += 1.0 - label_smoothing
    loss = -math.fsum((target * log_p)[valid].ravel()) / count
    return loss, np.where(valid[:, None], (np.exp(log_p) - target) / count, 0.0)
