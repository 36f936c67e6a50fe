"""Values drawn from Philox words, the same on every host."""

import numpy as np
import pytest

from renaissance.tensor.draws import normal_draws, truncated_draws, uniform_draws, words

GOLDEN = ["-0x1.4264bb8490166p+0", "0x1.7bad2f21fb488p-1", "-0x1.0ec6799d17c20p-2", "-0x1.398580d6dd555p-4"]


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
