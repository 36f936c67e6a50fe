"""Learning-rate schedules: chained configuration, and a frozen pure function of (epoch, batch).

With E epochs of S steps, U warm-up epochs (at most E), base rate b and start rate s (spec/framework 4.3, with one
change: the first epoch is never trained at the start rate, which is 0 by default):

    by epoch   warm-up, epoch e < U:        s + (b - s) * (e + 1) / U
               afterwards:                  decay(d, D'), d = (e - U) * S, D' = D - S: the last epoch reaches the end
    by batch   warm-up, global step k < US: s + (b - s) * (k + 1) / (U * S)
               afterwards:                  decay(d, D), d = k - U * S

    D = (E - U) * S
    constant   decay = b
    cosine     decay = eta + (b - eta) * (1 + cos(pi * min(1, d / D'))) / 2, and b when D' <= 0

Epochs and batches count from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from renaissance.core.errors import ValueRejected

DEFAULT_BASE_LR = 0.1
DEFAULT_ETA_MIN = 1e-6


class ScheduleKind(StrEnum):
    """The decay after warm-up; the value is what result files show."""

    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """The learning rate of every step of a run, as plain data.

    ``warmup_epochs`` is U, at most ``epochs``; ``eta_min`` belongs to the cosine.
    """

    kind: ScheduleKind
    epochs: int
    steps_per_epoch: int
    base_lr: float
    start_lr: float
    warmup_epochs: int
    by_batch: bool
    eta_min: float = 0.0

    def lr(self, epoch: int, batch: int = 0) -> float:
        """Learning rate of batch ``batch`` of epoch ``epoch`` (the same for all batches when stepping by epoch).

        Raises ValueRejected outside the schedule.
        """
        if not 0 <= epoch < self.epochs:
            raise ValueRejected(f"learning rate: epoch is {epoch}; expected 0 to {self.epochs - 1}")
        if not 0 <= batch < self.steps_per_epoch:
            raise ValueRejected(f"learning rate: batch is {batch}; expected 0 to {self.steps_per_epoch - 1}")
        steps = self.steps_per_epoch
        span = (self.epochs - self.warmup_epochs) * steps
        if self.by_batch:
            return self._rate(epoch * steps + batch, self.warmup_epochs * steps, 1, span)
        return self._rate(epoch, self.warmup_epochs, steps, span - steps)

    def _rate(self, position: int, warmup: int, unit: int, span: int) -> float:
        """Rate at ``position``, in units of ``unit`` steps, with ``span`` steps from the end of warm-up to the end."""
        if position < warmup:
            return self.start_lr + (self.base_lr - self.start_lr) * (position + 1) / warmup
        if self.kind is ScheduleKind.CONSTANT or span <= 0:
            return self.base_lr
        progress = min(1.0, (position - warmup) * unit / span)
        return self.eta_min + (self.base_lr - self.eta_min) * (1.0 + math.cos(math.pi * progress)) / 2.0


class Scheduler:
    """Settings all schedules share: base rate 0.1, no warm-up, stepping by epoch."""

    _kind: ScheduleKind

    def __init__(self) -> None:
        self._base_lr = DEFAULT_BASE_LR
        self._warmup = 0
        self._start_lr: float | None = None
        self._start_factor: float | None = None
        self._by_batch: bool | None = None

    def base_lr(self, value: float) -> Self:
        """Rate after warm-up, > 0."""
        value = float(value)
        if not (math.isfinite(value) and value > 0.0):
            raise ValueRejected(f"base_lr is {value}; expected a finite value > 0")
        self._base_lr = value
        return self

    def warmup(self, epochs: int) -> Self:
        """Epochs over which the rate rises linearly to the base rate, >= 0."""
        self._warmup = _count("warmup", epochs, 0)
        return self

    def warmup_start_lr(self, value: float) -> Self:
        """Rate that warm-up starts from, >= 0. Raises ValueRejected when warmup_start_factor is set."""
        value = float(value)
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueRejected(f"warmup_start_lr is {value}; expected a finite value >= 0")
        if self._start_factor is not None:
            raise ValueRejected(f"warmup_start_lr is {value}, but warmup_start_factor is set already; choose one")
        self._start_lr = value
        return self

    def warmup_start_factor(self, value: float) -> Self:
        """Start of warm-up as a share of the base rate, 0 to 1. Raises ValueRejected when warmup_start_lr is set."""
        value = float(value)
        if not 0.0 <= value <= 1.0:
            raise ValueRejected(f"warmup_start_factor is {value}; expected 0 to 1")
        if self._start_lr is not None:
            raise ValueRejected(f"warmup_start_factor is {value}, but warmup_start_lr is set already; choose one")
        self._start_factor = value
        return self

    def step_by_batch(self) -> Self:
        """Change the rate every step. Raises ValueRejected after step_by_epoch()."""
        return self._choose_unit("step_by_batch", True)

    def step_by_epoch(self) -> Self:
        """Change the rate every epoch (the default). Raises ValueRejected after step_by_batch()."""
        return self._choose_unit("step_by_epoch", False)

    def _choose_unit(self, setter: str, by_batch: bool) -> Self:
        if self._by_batch is not None and self._by_batch != by_batch:
            raise ValueRejected(f"{setter}: the schedule already steps by {'batch' if self._by_batch else 'epoch'}")
        self._by_batch = by_batch
        return self

    def prepare(self, epochs: int, steps: int) -> LrSchedule:
        """The schedule of a run of ``epochs`` epochs of ``steps`` steps, both > 0.

        Raises ValueRejected for these, and for options that contradict each other.
        """
        epochs, steps = _count("schedule: epochs", epochs, 1), _count("schedule: steps per epoch", steps, 1)
        if self._warmup == 0 and (self._start_lr is not None or self._start_factor is not None):
            raise ValueRejected("a warm-up start rate is set, but warmup is 0 epochs; set warmup(epochs) or drop it")
        start = self._start_lr if self._start_lr is not None else (self._start_factor or 0.0) * self._base_lr
        return LrSchedule(
            self._kind,
            epochs,
            steps,
            self._base_lr,
            start,
            min(self._warmup, epochs),
            bool(self._by_batch),
            self._decay_end(),
        )

    def _decay_end(self) -> float:
        return 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_lr={self._base_lr}, warmup={self._warmup})"


class ConstantLR(Scheduler):
    """The base rate, after an optional warm-up."""

    _kind = ScheduleKind.CONSTANT


class CosineAnnealingLR(Scheduler):
    """Half a cosine from the base rate to ``eta_min`` (default 1e-6), after an optional warm-up."""

    _kind = ScheduleKind.COSINE

    def __init__(self) -> None:
        super().__init__()
        self._eta_min = DEFAULT_ETA_MIN

    def eta_min(self, value: float) -> CosineAnnealingLR:
        """Rate at the end, 0 <= value <= base_lr (the upper bound is checked by prepare)."""
        value = float(value)
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueRejected(f"eta_min is {value}; expected a finite value >= 0")
        self._eta_min = value
        return self

    def _decay_end(self) -> float:
        if self._eta_min > self._base_lr:
            raise ValueRejected(f"eta_min is {self._eta_min}, above base_lr {self._base_lr}; expected at most base_lr")
        return self._eta_min


def _count(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueRejected(f"{name} is {value!r}; expected a whole number >= {low}")
    return value
