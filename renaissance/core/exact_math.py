"""Sine, cosine, logarithm and exponential that give the same bits on every host.

The C library's versions differ in the last bit between versions and instruction sets; delivered bytes and initial
weights may not (law 1). These use only additions, multiplications and divisions of float64 in a fixed order, which IEEE
754 defines exactly, and are accurate to a few units in the last place. They are never built with fast-math.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

LN2 = 0.6931471805599453


@njit(cache=True, inline="always")
def _sin_small(x):  # type: ignore[no-untyped-def]  # float64 radians in [-pi/4, pi/4] -> float64
    z = x * x
    p = -1.0 / 1307674368000.0
    p = p * z + 1.0 / 6227020800.0
    p = p * z - 1.0 / 39916800.0
    p = p * z + 1.0 / 362880.0
    p = p * z - 1.0 / 5040.0
    p = p * z + 1.0 / 120.0
    p = p * z - 1.0 / 6.0
    return x + x * (z * p)


@njit(cache=True, inline="always")
def _cos_small(x):  # type: ignore[no-untyped-def]  # float64 radians in [-pi/4, pi/4] -> float64
    z = x * x
    p = 1.0 / 20922789888000.0
    p = p * z - 1.0 / 87178291200.0
    p = p * z + 1.0 / 479001600.0
    p = p * z - 1.0 / 3628800.0
    p = p * z + 1.0 / 40320.0
    p = p * z - 1.0 / 720.0
    p = p * z + 1.0 / 24.0
    p = p * z - 0.5
    return 1.0 + z * p


@njit(cache=True)
def sin_cos_degrees(degrees):  # type: ignore[no-untyped-def]  # float64 -> (float64, float64)
    """(sine, cosine) of an angle in degrees; exact at multiples of 90."""
    quarter = np.floor(degrees / 90.0 + 0.5)
    radians = (degrees - quarter * 90.0) * (3.141592653589793 / 180.0)
    s = _sin_small(radians)
    c = _cos_small(radians)
    turn = np.int64(quarter) & 3
    if turn == 0:
        return s, c
    if turn == 1:
        return c, -s
    if turn == 2:
        return -s, -c
    return -c, s


@njit(cache=True)
def exp2(x):  # type: ignore[no-untyped-def]  # float64 in (-1000, 1000) -> float64
    """Two to the power ``x``."""
    whole = np.floor(x + 0.5)
    y = (x - whole) * 0.6931471805599453
    p = 1.0 / 6227020800.0
    p = p * y + 1.0 / 479001600.0
    p = p * y + 1.0 / 39916800.0
    p = p * y + 1.0 / 3628800.0
    p = p * y + 1.0 / 362880.0
    p = p * y + 1.0 / 40320.0
    p = p * y + 1.0 / 5040.0
    p = p * y + 1.0 / 720.0
    p = p * y + 1.0 / 120.0
    p = p * y + 1.0 / 24.0
    p = p * y + 1.0 / 6.0
    p = p * y + 0.5
    p = p * y + 1.0
    result = p * y + 1.0
    step = 2.0 if whole > 0.0 else 0.5
    for _ in range(np.int64(abs(whole))):
        result *= step
    return result


@njit(cache=True)
def _log_parts(x):  # type: ignore[no-untyped-def]  # float64 > 0 -> (exponent, ln of the mantissa), float64
    """x = 2**exponent * m with m in [sqrt(1/2), sqrt(2)); ln m is the series of 2 artanh((m - 1) / (m + 1))."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    t = (mantissa - 1.0) / (mantissa + 1.0)
    z = t * t
    series = 1.0 / 23.0
    for k in range(21, 0, -2):
        series = series * z + 1.0 / k
    return float(exponent), 2.0 * t * series


@njit(cache=True)
def log(x):  # type: ignore[no-untyped-def]  # float64 > 0 -> float64
    """Natural logarithm."""
    exponent, rest = _log_parts(x)
    return exponent * LN2 + rest


@njit(cache=True)
def log2(x):  # type: ignore[no-untyped-def]  # float64 > 0 -> float64
    """Binary logarithm; exact for powers of two."""
    exponent, rest = _log_parts(x)
    return exponent + rest / LN2
