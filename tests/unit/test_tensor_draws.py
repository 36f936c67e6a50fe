"""Host-independent logarithm, sine and cosine, and the values drawn with them."""

import math

import numpy as np
import pytest

from renaissance.tensor.draws import log, normal_draws, sin_cos_turns, truncated_draws, uniform_draws, words

GOLDEN = ["-0x1.4264bb8490166p+0", "0x1.7bad2f21fb488p-1", "-0x1.0ec6799d17c20p-2", "-0x1.398580d6dd555p-4"]
GRID = np.concatenate([np.arange(1, 4097), np.arange(1, 2**24, 997), 2**24 - np.arange(1, 4097)]) * 2.0**-24


def test_logarithm_is_accurate_over_everything_a_draw_can_give() -> None:
    exact = np.array([math.log(x) for x in GRID])
    assert np.abs(log(GRID) - exact).max() <= 2e-15
    assert (np.abs(log(GRID) / exact - 1) <= 1e-15).all()


def test_sine_and_cosine_are_accurate_and_exact_at_quarters() -> None:
    sine, cosine = sin_cos_turns(GRID)
    angles = 2.0 * math.pi * GRID
    assert np.abs(sine - np.sin(angles)).max() <= 1e-15
    assert np.abs(cosine - np.cos(angles)).max() <= 1e-15
    sine, cosine = sin_cos_turns(np.array([0.0, 0.25, 0.5, 0.75]))
    assert sine.tolist() == [0.0, 1.0, 0.0, -1.0]
    assert cosine.tolist() == [1.0, 0.0, -1.0, 0.0]


def test_normal_values_have_these_bits_on_every_host() -> None:
    # Recorded once; a change of these bits changes the weights of every run that starts from a normal law.
    assert [v.hex() for v in normal_draws(123, 7, 4).tolist()] == GOLDEN


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1001])
def test_a_longer_fill_begins_with_the_shorter_one(count: int) -> None:
    for draw in (words, uniform_draws, normal_draws):
        assert np.array_equal(draw(5, 9, 1002)[:count], draw(5, 9, count))
    assert np.array_equal(truncated_draws(5, 9, 1002, 1.0)[:count], truncated_draws(5, 9, count, 1.0))


def test_redrawing_touches_only_values_outside_the_bound() -> None:
    first, kept = normal_draws(1, 2, 5000), truncated_draws(1, 2, 5000, 1.5)
    inside = np.abs(first) <= 1.5
    assert np.array_equal(first[inside], kept[inside])
    assert np.array_equal(kept[~inside][:1], normal_draws(1, 2, 5000, attempt=1)[~inside][:1])
