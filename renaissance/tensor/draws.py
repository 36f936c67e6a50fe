"""Random float64 values from Philox words: uniform, normal, truncated normal.

A value is a pure function of (seed, purpose word, element index, attempt): element i uses word i % 4 of block i // 4
(docs/random-numbers.md). Values have the same bits on every host: the C library's logarithm, sine and cosine differ
between versions and instruction sets, so these are computed here from additions, multiplications and divisions in a
fixed order (NumPy runs one operation at a time, without contraction), accurate to a few units in the last place.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import ValueRejected
from renaissance.core.philox import UNIT_24, philox_array

F64 = npt.NDArray[np.float64]

MAX_ATTEMPTS = 64
"""Draws per element of a truncated normal. An attempt falls outside +-2 sigma with probability 0.046, so 64 failures
in a row (1e-86) mean a broken generator, not bad luck."""

LN2 = 0.6931471805599453
HALF_ROOT = 0.7071067811865476

# Series in z = t * t, highest power first; t is at most pi/4 for sine and cosine, 0.172 for the logarithm.
_SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, -1, -1))
_COSINE = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(9, -1, -1))
_ARTANH = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))


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
    pairs = words(seed, c1, count + count % 2, attempt).reshape(-1, 2) >> np.uint32(8)
    radius = np.sqrt(-2.0 * log((pairs[:, 0] | np.uint32(1)).astype(np.float64) * UNIT_24))
    sine, cosine = sin_cos_turns(pairs[:, 1].astype(np.float64) * UNIT_24)
    return np.stack((radius * cosine, radius * sine), axis=1).reshape(-1)[:count]


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


def log(x: F64) -> F64:
    """Natural logarithm of positive normal values: 2 artanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2))."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < HALF_ROOT
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    return (exponent - low) * LN2 + 2.0 * t * _horner(_ARTANH, t * t)


def sin_cos_turns(turns: F64) -> tuple[F64, F64]:
    """Sine and cosine of angles in turns, in [0, 1); exact at quarter turns."""
    quarter = np.floor(4.0 * turns + 0.5)
    t = (turns - 0.25 * quarter) * (2.0 * math.pi)  # the difference is exact
    s, c = t * _horner(_SINE, t * t), _horner(_COSINE, t * t)
    q = quarter.astype(np.int64) % 4
    return np.choose(q, (s, c, -s, -c)), np.choose(q, (c, -s, -c, s))


def _horner(coefficients: tuple[float, ...], z: F64) -> F64:
    total = np.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * z + coefficient
    return total
