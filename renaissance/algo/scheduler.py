"""Learning-rate schedules: chained configuration, and a frozen pure function of (epoch, batch).

With E epochs of S steps, U warm-up epochs (at most E), base rate b and start rate s (spec/framework 4.3, with one
change: the first epoch is never trained at the start rate, which is 0 by default):

    by epoch   warm-up, epoch e < U:        s + (b - s) * (e + 1) / U
    by batch   warm-up, global step k < US: s + (b - s) * (k + 1) / (U * S)

and after it what ``algo.decay`` says. Epochs and batches count from 0 here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Self

from renaissance.algo.checks import number
from renaissance.algo.decay import (
    Constant,
    Cosine,
    Decay,
    Exponential,
    MultiStep,
    Polynomial,
    Position,
    Step,
    WarmRestarts,
    WarmupStableDecay,
)
from renaissance.core.errors import ValueRejected

DEFAULT_BASE_LR = 0.1
DEFAULT_ETA_MIN = 1e-6
LARGEST_LR = 3e38
"""The device holds the rate as a float32."""


class ScheduleKind(StrEnum):
    """The decay after warm-up; the value is what result files show."""

    CONSTANT = "constant"
    COSINE = "cosine"
    POLYNOMIAL = "polynomial"
    STEP = "step"
    MULTI_STEP = "multi_step"
    EXPONENTIAL = "exponential"
    WSD = "wsd"
    WARM_RESTARTS = "warm_restarts"


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """The learning rate of every step of a run, as plain data. ``warmup_epochs`` is U, at most ``epochs``."""

    kind: ScheduleKind
    epochs: int
    steps_per_epoch: int
    base_lr: float
    start_lr: float
    warmup_epochs: int
    by_batch: bool
    decay: Decay

    def lr(self, epoch: int, batch: int = 0) -> float:
        """Learning rate of batch ``batch`` of epoch ``epoch`` (the same for all batches when stepping by epoch).

        Raises ValueRejected outside the schedule.
        """
        if not 0 <= epoch < self.epochs:
            raise ValueRejected(f"learning rate: epoch is {epoch}; expected 0 to {self.epochs - 1}")
        if not 0 <= batch < self.steps_per_epoch:
            raise ValueRejected(f"learning rate: batch is {batch}; expected 0 to {self.steps_per_epoch - 1}")
        steps = self.steps_per_epoch
        warmup = self.warmup_epochs * steps
        if epoch < self.warmup_epochs:
            done, of = (epoch * steps + batch + 1, warmup) if self.by_batch else (epoch + 1, self.warmup_epochs)
            return self.start_lr + (self.base_lr - self.start_lr) * done / of
        step = epoch * steps + (batch if self.by_batch else 0)
        at = Position(step, warmup, self.epochs * steps, steps, self.by_batch)
        return self.decay.rate(self.base_lr, at)

    def epoch_rates(self, epoch: int) -> list[float]:
        """The learning rate of every step of an epoch. Raises as ``lr``."""
        if not self.by_batch:
            return [self.lr(epoch)] * self.steps_per_epoch
        return [self.lr(epoch, batch) for batch in range(self.steps_per_epoch)]


class Scheduler(ABC):
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
        if _above_zero("base_lr", value) > LARGEST_LR:
            raise ValueRejected(f"base_lr is {value}; expected at most {LARGEST_LR}")
        self._base_lr = float(value)
        return self

    def warmup(self, epochs: int) -> Self:
        """Epochs over which the rate rises linearly to the base rate, >= 0."""
        self._warmup = _count("warmup", epochs, 0)
        return self

    def warmup_start_lr(self, value: float) -> Self:
        """Rate that warm-up starts from, >= 0. Raises ValueRejected when warmup_start_factor is set."""
        value = _not_negative("warmup_start_lr", value)
        if self._start_factor is not None:
            raise ValueRejected(f"warmup_start_lr is {value}, but warmup_start_factor is set already; choose one")
        self._start_lr = value
        return self

    def warmup_start_factor(self, value: float) -> Self:
        """Start of warm-up as a share of the base rate, 0 to 1. Raises ValueRejected when warmup_start_lr is set."""
        value = _share("warmup_start_factor", value)
        if self._start_lr is not None:
            raise ValueRejected(f"warmup_start_factor is {value}, but warmup_start_lr is set already; choose one")
        self._start_factor = value
        return self

    def step_by_batch(self, on: bool = True) -> Self:
        """Change the rate every step. Raises ValueRejected after step_by_epoch()."""
        if not isinstance(on, bool):
            raise ValueRejected(f"step_by_batch is {on!r}; expected True or False")
        return self._choose_unit("step_by_batch", on)

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
        warmup, by_batch, decay = min(self._warmup, epochs), bool(self._by_batch), self._decay()
        schedule = LrSchedule(self._kind, epochs, steps, self._base_lr, start, warmup, by_batch, decay)
        try:
            highest = schedule.lr(epochs - 1, steps - 1)  # of a schedule that grows
        except OverflowError:
            highest = math.inf
        if not highest < LARGEST_LR:
            raise ValueRejected(f"{self!r} grows to {highest} in {epochs} epochs; expected a gamma that stays finite")
        return schedule

    @abstractmethod
    def _decay(self) -> Decay:
        """What comes after warm-up; raises ValueRejected for options that contradict each other."""

    def _at_most_base(self, name: str, value: float) -> float:
        if value > self._base_lr:
            raise ValueRejected(f"{name} is {value}, above base_lr {self._base_lr}; expected at most base_lr")
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_lr={self._base_lr}, warmup={self._warmup})"


class ConstantLR(Scheduler):
    """The base rate, after an optional warm-up."""

    _kind = ScheduleKind.CONSTANT

    def _decay(self) -> Decay:
        return Constant()


class PolynomialLR(Scheduler):
    """From the base rate to ``end_lr`` (default 1e-4) along a power (default 2) of the steps that are left."""

    _kind = ScheduleKind.POLYNOMIAL

    def __init__(self) -> None:
        super().__init__()
        self._power, self._end_lr = 2.0, 1e-4

    def power(self, value: float) -> PolynomialLR:
        """Exponent, > 0; 1 is a straight line."""
        self._power = _above_zero("power", value)
        return self

    def end_lr(self, value: float) -> PolynomialLR:
        """Rate at the end, 0 <= value <= base_lr (the upper bound is checked by prepare)."""
        self._end_lr = _not_negative("end_lr", value)
        return self

    def _decay(self) -> Decay:
        return Polynomial(self._power, self._at_most_base("end_lr", self._end_lr))


class CosineAnnealingLR(Scheduler):
    """Half a cosine from the base rate to ``eta_min`` (default 1e-6), after an optional warm-up."""

    _kind = ScheduleKind.COSINE

    def __init__(self) -> None:
        super().__init__()
        self._eta_min = DEFAULT_ETA_MIN

    def eta_min(self, value: float) -> CosineAnnealingLR:
        """Rate at the end, 0 <= value <= base_lr (the upper bound is checked by prepare)."""
        self._eta_min = _not_negative("eta_min", value)
        return self

    def _decay(self) -> Decay:
        return Cosine(self._at_most_base("eta_min", self._eta_min))


class StepLR(Scheduler):
    """Times ``gamma`` (default 0.1) after every ``step_size`` (default 10) epochs of the run, warm-up included."""

    _kind = ScheduleKind.STEP

    def __init__(self) -> None:
        super().__init__()
        self._step_size, self._gamma = 10, 0.1

    def step_size(self, epochs: int) -> StepLR:
        """Epochs between two changes, >= 1."""
        self._step_size = _count("step_size", epochs, 1)
        return self

    def gamma(self, value: float) -> StepLR:
        """Factor of each change, > 0."""
        self._gamma = _above_zero("gamma", value)
        return self

    def _decay(self) -> Decay:
        return Step(self._step_size, self._gamma)


class MultiStepLR(Scheduler):
    """Times ``gamma`` (default 0.1) after as many epochs of the run as each of ``milestones`` says."""

    _kind = ScheduleKind.MULTI_STEP

    def __init__(self) -> None:
        super().__init__()
        self._milestones: tuple[int, ...] = ()
        self._gamma = 0.1

    def milestones(self, epochs: Iterable[int]) -> MultiStepLR:
        """Numbers of finished epochs, warm-up included, rising: 30 means that the 31st epoch has the smaller rate."""
        given = tuple(epochs) if isinstance(epochs, Iterable) and not isinstance(epochs, str) else (epochs,)
        checked = tuple(_count(f"milestones: number {i + 1}", epoch, 1) for i, epoch in enumerate(given))
        if any(b <= a for a, b in pairwise(checked)):
            raise ValueRejected(f"milestones is {list(checked)}; expected rising numbers of epochs")
        self._milestones = checked
        return self

    def gamma(self, value: float) -> MultiStepLR:
        """Factor at each milestone, > 0."""
        self._gamma = _above_zero("gamma", value)
        return self

    def _decay(self) -> Decay:
        if not self._milestones:
            raise ValueRejected("MultiStepLR has no milestones; call milestones([30, 60]), or take ConstantLR")
        if self._milestones[0] < self._warmup:
            raise ValueRejected(
                f"milestones begins with {self._milestones[0]}, inside the warm-up of {self._warmup} epochs; milestones"
                " count the epochs of the run, warm-up included"
            )
        return MultiStep(self._milestones, self._gamma)


class ExponentialLR(Scheduler):
    """Times ``gamma`` (default 0.95) after every epoch that follows warm-up."""

    _kind = ScheduleKind.EXPONENTIAL

    def __init__(self) -> None:
        super().__init__()
        self._gamma = 0.95

    def gamma(self, value: float) -> ExponentialLR:
        """Factor per epoch, > 0."""
        self._gamma = _above_zero("gamma", value)
        return self

    def _decay(self) -> Decay:
        return Exponential(self._gamma)


class WSDLR(Scheduler):
    """Warm-up, stable, decay: the base rate until ``decay_start`` (default 0.8) of the steps after warm-up are done,
    then a straight line to ``end_lr`` (default 0)."""

    _kind = ScheduleKind.WSD

    def __init__(self) -> None:
        super().__init__()
        self._decay_start, self._end_lr = 0.8, 0.0

    def decay_start(self, share: float) -> WSDLR:
        """Share of the steps after warm-up that keep the base rate, 0 to 1; 1 never decays."""
        self._decay_start = _share("decay_start", share)
        return self

    def end_lr(self, value: float) -> WSDLR:
        """Rate at the end, 0 <= value <= base_lr (the upper bound is checked by prepare)."""
        self._end_lr = _not_negative("end_lr", value)
        return self

    def _decay(self) -> Decay:
        return WarmupStableDecay(self._decay_start, self._at_most_base("end_lr", self._end_lr))


class CosineAnnealingWithWarmRestartsLR(Scheduler):
    """Half cosines from the base rate to ``eta_min`` (default 0), the first over ``t_0`` (default 10) epochs, each
    next one ``t_mult`` (default 1) times as long."""

    _kind = ScheduleKind.WARM_RESTARTS

    def __init__(self) -> None:
        super().__init__()
        self._t_0, self._t_mult, self._eta_min = 10, 1, 0.0

    def t_0(self, epochs: int) -> CosineAnnealingWithWarmRestartsLR:
        """Epochs of the first period, >= 1."""
        self._t_0 = _count("t_0", epochs, 1)
        return self

    def t_mult(self, factor: int) -> CosineAnnealingWithWarmRestartsLR:
        """How many times as long each next period is, >= 1."""
        self._t_mult = _count("t_mult", factor, 1)
        return self

    def eta_min(self, value: float) -> CosineAnnealingWithWarmRestartsLR:
        """Rate that each period falls to, 0 <= value <= base_lr (the upper bound is checked by prepare)."""
        self._eta_min = _not_negative("eta_min", value)
        return self

    def _decay(self) -> Decay:
        return WarmRestarts(self._t_0, self._t_mult, self._at_most_base("eta_min", self._eta_min))


def _count(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueRejected(f"{name} is {value!r}; expected a whole number >= {low}")
    return value


def _above_zero(name: str, value: float) -> float:
    value = number(name, value)
    if not (math.isfinite(value) and value > 0.0):
        raise ValueRejected(f"{name} is {value}; expected a finite value > 0")
    return value


def _not_negative(name: str, value: float) -> float:
    value = number(name, value)
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueRejected(f"{name} is {value}; expected a finite value >= 0")
    return value


def _share(name: str, value: float) -> float:
    value = number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueRejected(f"{name} is {value}; expected 0 to 1")
    return value
