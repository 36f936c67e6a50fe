"""What the learning rate does after warm-up: one frozen value per rule, each a pure function of the position.

With base rate b, S steps an epoch, s the step counted from the start of the run, d the same counted from the end of
warm-up, D the steps from there to the end (spec/framework 4.3):

    constant       b
    polynomial     e + (b - e) * (1 - min(1, d / (D + 1))) ** power
    cosine         e + (b - e) * (1 + cos(pi * min(1, d / D'))) / 2, D' = D by batch, D - S by epoch: the last epoch
                   reaches e
    step           b * gamma ** floor(s / (size * S))
    multi-step     b * gamma ** (number of milestones <= floor(s / S))
    exponential    b * gamma ** floor(d / S)
    wsd            b while d < floor(D * f) =: c, then e + (b - e) * (1 - (d - c) / (D - c))
    warm restarts  periods of T_0 * S, T_0 * T_mult * S, ... steps; at step t of one of T steps:
                   e + (b - e) * (1 + cos(pi * t / T)) / 2

Step and multi-step both count the epochs of the run, those of warm-up included: a step size of n is the milestones n,
2n, 3n, ... (upstream counts the one from the end of warm-up and the other from the start of the run). By epoch, s is
the first step of the epoch, so the rate is constant inside it. When nothing is left after warm-up (D or D' <= 0) the
rate is b.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """Where a step is: ``step`` is s and ``warmup`` the length of warm-up (both in steps), ``total`` all steps."""

    step: int
    warmup: int
    total: int
    steps_per_epoch: int
    by_batch: bool

    @property
    def since_warmup(self) -> int:
        return self.step - self.warmup

    @property
    def span(self) -> int:
        """Steps from the end of warm-up to the end of the run."""
        return self.total - self.warmup

    @property
    def epoch(self) -> int:
        """Finished epochs of the run."""
        return self.step // self.steps_per_epoch


@dataclass(frozen=True, slots=True)
class Constant:
    def rate(self, base: float, at: Position) -> float:
        return base


@dataclass(frozen=True, slots=True)
class Polynomial:
    power: float
    end_lr: float

    def rate(self, base: float, at: Position) -> float:
        if at.span <= 0:
            return base
        left = 1.0 - min(1.0, at.since_warmup / (at.span + 1))
        return float(self.end_lr + (base - self.end_lr) * left**self.power)


@dataclass(frozen=True, slots=True)
class Cosine:
    eta_min: float

    def rate(self, base: float, at: Position) -> float:
        span = at.span if at.by_batch else at.span - at.steps_per_epoch
        if span <= 0:
            return base
        return _half_cosine(base, self.eta_min, min(1.0, at.since_warmup / span))


@dataclass(frozen=True, slots=True)
class Step:
    step_size: int  # epochs
    gamma: float

    def rate(self, base: float, at: Position) -> float:
        return float(base * self.gamma ** (at.epoch // self.step_size))


@dataclass(frozen=True, slots=True)
class MultiStep:
    milestones: tuple[int, ...]  # epochs, rising
    gamma: float

    def rate(self, base: float, at: Position) -> float:
        return float(base * self.gamma ** bisect_right(self.milestones, at.epoch))


@dataclass(frozen=True, slots=True)
class Exponential:
    gamma: float

    def rate(self, base: float, at: Position) -> float:
        return float(base * self.gamma ** (at.since_warmup // at.steps_per_epoch))


@dataclass(frozen=True, slots=True)
class WarmupStableDecay:
    decay_start: float  # share of the steps after warm-up
    end_lr: float

    def rate(self, base: float, at: Position) -> float:
        stable = math.floor(at.span * self.decay_start)
        if at.since_warmup < stable or at.span <= stable:
            return base
        return self.end_lr + (base - self.end_lr) * (1.0 - (at.since_warmup - stable) / (at.span - stable))


@dataclass(frozen=True, slots=True)
class WarmRestarts:
    t_0: int  # epochs
    t_mult: int
    eta_min: float

    def rate(self, base: float, at: Position) -> float:
        period, into = self.t_0 * at.steps_per_epoch, at.since_warmup
        if self.t_mult == 1:
            into %= period
        while into >= period:
            into -= period
            period *= self.t_mult
        return _half_cosine(base, self.eta_min, into / period)


Decay = Constant | Polynomial | Cosine | Step | MultiStep | Exponential | WarmupStableDecay | WarmRestarts


def _half_cosine(base: float, end: float, progress: float) -> float:
    return end + (base - end) * (1.0 + math.cos(math.pi * progress)) / 2.0
