"""Normal numbers rounded to whole grey steps, drawn by one table look-up per 32-bit word.

The step of a word is the number of thresholds that are not above it (docs/recipes.md, "GaussianNoise"). Thresholds come
from exactly defined float64 operations, so the table is the same on every host.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from renaissance.core.exact_math import exp2

BUCKETS = 4096
"""The first 12 bits of a word choose the bucket, the other 20 are compared within it."""
REST_BITS = 20
STEP_SHIFT = 21  # an entry: 21 bits threshold within the bucket, 9 bits step, and in the top bit "search"
STEP_MASK = 511
BIAS = 256
"""Added to the step of an entry, so that it is not negative."""
SEARCH = 1 << 31
"""Flag of a bucket with two or more thresholds in it (far out in the tails)."""
FIRST_STEP, THRESHOLDS = BUCKETS, BUCKETS + 1
"""Behind the entries: the step (as the bits of an int32) below the first threshold, then the thresholds."""
FARTHEST = 8.0
"""Standard deviations beyond which the probability rounds to nothing at 2**-32."""


def normal_cdf(x: float) -> float:
    """Phi(x), absolute error below 1e-14: 1/2 + phi(x) (x + x^3/3 + x^5/(3*5) + ...), in a fixed order."""
    a = abs(x)
    if a > FARTHEST:
        return 1.0 if x > 0 else 0.0
    term = total = a
    k = 3.0
    while term > total * 1e-18:
        term = term * (a * a) / k
        total += term
        k += 2.0
    density = float(exp2(-(a * a) * 0.7213475204444817)) * 0.3989422804014327
    upper = 0.5 + density * total
    return upper if x > 0 else 1.0 - upper


def thresholds(mean: float, sigma: float, first: int, last: int) -> npt.NDArray[np.uint32]:
    """floor(2^32 Phi((n + 1/2 - mean) / sigma) + 1/2) for n = first to last, without those that are 2^32 (rising)."""
    found = []
    for n in range(first, last + 1):
        distance = n + 0.5 - mean
        share = normal_cdf(distance / sigma) if sigma > 0 else float(distance > 0)
        threshold = math.floor(4294967296.0 * share + 0.5)
        if threshold >= 1 << 32:
            break
        found.append(threshold)
    return np.array(found, np.uint32)


def normal_steps(mean: float, sigma: float, clip: bool) -> npt.NDArray[np.uint32]:
    """The table for ``apply_pixel_op``: BUCKETS entries, the first step, the thresholds.

    With ``clip`` steps end at -256 and 255, which is as far as they can move a pixel; without it an entry's step is
    modulo 256.
    """
    if clip:
        first, last = -256, 254
    else:
        first, last = math.floor(mean - FARTHEST * sigma) - 1, math.ceil(mean + FARTHEST * sigma) + 1
    limits = thresholds(mean, sigma, first, last)
    starts = np.arange(BUCKETS, dtype=np.int64) << REST_BITS
    below = np.searchsorted(limits, starts, side="right")  # thresholds that no word of the bucket is below
    until = np.searchsorted(limits, starts + (1 << REST_BITS) - 1, side="right")
    step = first + below
    entry = (step + BIAS if clip else step & 255).astype(np.uint32) << np.uint32(STEP_SHIFT)
    inside = np.full(BUCKETS, 1 << REST_BITS, np.int64)
    one = until - below == 1
    inside[one] = limits[below[one]] - starts[one]
    entry |= inside.astype(np.uint32)
    entry[until - below > 1] |= np.uint32(SEARCH)
    return np.concatenate([entry, np.array([first], np.int32).view(np.uint32), limits])
