"""The functions that replace the C library's: accurate, and exact where the exact value is a number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from renaissance.core.exact_math import exp2, log, log2, sin_cos_degrees

UNIT = np.concatenate([np.arange(1, 4097), np.arange(1, 2**24, 997), 2**24 - np.arange(1, 4097)]) * 2.0**-24


def test_logarithm_is_accurate_over_everything_a_draw_can_give() -> None:
    for x in UNIT.tolist():
        assert log(x) == pytest.approx(math.log(x), rel=1e-15, abs=0)


def test_sine_and_cosine_are_accurate_and_exact_at_quarters() -> None:
    for turns in [*UNIT.tolist(), -0.3, 1.7, 12.25]:
        sine, cosine = sin_cos_degrees(turns * 360.0)
        assert abs(sine - math.sin(2 * math.pi * turns)) <= 1e-15 * max(1.0, 8 * abs(turns))
        assert abs(cosine - math.cos(2 * math.pi * turns)) <= 1e-15 * max(1.0, 8 * abs(turns))
    assert sin_cos_degrees(90.0) == (1.0, 0.0)
    assert sin_cos_degrees(-180.0) == (0.0, -1.0)
    assert sin_cos_degrees(720.0) == (0.0, 1.0)


def test_powers_and_binary_logarithms_invert_each_other() -> None:
    for x in np.linspace(-20.0, 20.0, 401).tolist():
        assert exp2(x) == pytest.approx(2.0**x, rel=1e-15)
        assert log2(2.0**x) == pytest.approx(x, rel=1e-15, abs=1e-15)
    assert [log2(2.0**k) for k in range(-30, 31)] == list(range(-30, 31))
