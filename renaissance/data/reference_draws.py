"""The random words of one transform for one sample, in plain Python (docs/random-numbers.md): part of the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.philox import Domain, philox, philox_array, purpose


@dataclass(frozen=True, slots=True)
class Draws:
    """The random words of one transform for one sample."""

    seed: int
    op: int
    sample: int
    epoch_word: int

    def word(self, draw: int) -> int:
        c1 = purpose(Domain.AUGMENTATION, self.op)
        return philox(self.seed, draw // 4, c1, self.sample, self.epoch_word)[draw % 4]

    def unit(self, draw: int) -> float:
        return (self.word(draw) >> 8) * 2.0**-24

    def uniform(self, draw: int, low: float, high: float) -> float:
        return low + self.unit(draw) * (high - low)

    def log_uniform(self, draw: int, low: float, high: float) -> float:
        return math.exp(self.uniform(draw, math.log(low), math.log(high)))

    def below(self, draw: int, n: int) -> int:
        return (self.word(draw) * n) >> 32

    def noise_words(self, count: int) -> npt.NDArray[np.uint32]:
        """The words of the noise domain: one per value of the picture."""
        blocks = np.arange(-(-count // 4))
        words = philox_array(self.seed, blocks, purpose(Domain.NOISE, self.op), self.sample, self.epoch_word)
        return np.stack(words, axis=1).reshape(-1)[:count]
