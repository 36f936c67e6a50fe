"""Random float64 values from Philox words: uniform, normal, truncated normal.

A value is a pure function of (seed, purpose word, element index, attempt): element i uses word i % 4 of block i // 4
(docs/random-numbers.md). Values have the same bits on every host (``core.exact_math``).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from renaissance.core.errors import ValueRejected
from renaissance.core.exact_math import log, sin_cos_degrees
from renaissance.core.philox import UNIT_24, philox_array

F64 = npt.NDArray[np.float64]

MAX_ATTEMPTS = 64
"""Draws per element of a truncated normal. An attempt falls outside +-2 sigma with probability 0.046, so 64 failures
in a row (1e-86) mean a broken generator, not bad luck."""


def words(seed: int, c1: int, count: int, attempt: int = 0) -> npt.NDArray[np.uint32]:
    """The first ``count`` Philox words of counter series (block, c1, attempt, 0), uint32 [count]."""
    blocks = -(-count // 4)
    if blocks > 1 << 32:
        raise ValueRejected(f"random fill of {count} elements; expected at most {1 << 34}")
    four = philox_array(seed, np.arange(blocks, dtype=np.uint64), c1, attempt, 0)
    return np.stack(four, axis=1).reshape(-1)[:count]


def uniform_draws(seed: int, c1: int, count: int) -> F64:
    """Uniform values in [0, 1) from the upper 24 bits of each word, float64 [count]."""
    return (words(seed, c1, count) >> np.uint32(8)).astype(np.float64) * UNIT_24


def normal_draws(seed: int, c1: int, count: int, attempt: int = 0) -> F64:
    """Standard normal values by Box-Muller, float64 [count]; each pair of words makes a pair of values.

    u1 = ((r0 >> 8) | 1) * 2**-24 is never 0, u2 = (r1 >> 8) * 2**-24 (spec/framework 1.9).
    """
    values: F64 = _box_muller(words(seed, c1, count + count % 2, attempt) >> np.uint32(8))
    return values[:count]


def truncated_draws(seed: int, c1: int, count: int, bound: float) -> F64:
    """Standard normal values inside [-bound, bound]; an element outside is drawn again with the next attempt word."""
    values = normal_draws(seed, c1, count)
    for attempt in range(1, MAX_ATTEMPTS):
        outside = np.abs(values) > bound
        if not outside.any():
            return values
        values[outside] = normal_draws(seed, c1, count, attempt)[outside]
    raise ValueRejected(
        f"truncated normal: no value inside +-{bound} sigma after {MAX_ATTEMPTS} draws; use a wider bound"
    )


@njit(cache=True)
def _box_muller(numbers):  # type: ignore[no-untyped-def]  # uint32 [2n], 24-bit values -> float64 [2n]
    values = np.empty(numbers.size)
    for i in range(0, numbers.size, 2):
        radius = math.sqrt(-2.0 * log((numbers[i] | np.uint32(1)) * UNIT_24))
        sine, cosine = sin_cos_degrees(numbers[i + 1] * UNIT_24 * 360.0)  # the angle is exact
        values[i], values[i + 1] = radius * cosine, radius * sine
    return values
