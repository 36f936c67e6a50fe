"""Cross-entropy with label smoothing: closed forms, masked rows, gradient by differences (spec/framework 4.1)."""

import math

import numpy as np
import pytest

from renaissance.algo import CrossEntropyLoss, LossConfig
from renaissance.algo.loss import reference_cross_entropy
from renaissance.core.errors import ShapeError, ValueRejected


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.2, 0.5, 0.999])
def test_smoothing_below_one_is_accepted(epsilon: float) -> None:
    assert CrossEntropyLoss().label_smoothing(epsilon).config() == LossConfig(epsilon)


@pytest.mark.parametrize("epsilon", [-0.001, 1.0, 2.0, math.nan, math.inf])
def test_smoothing_outside_zero_to_one_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueRejected, match="label_smoothing is"):
        CrossEntropyLoss().label_smoothing(epsilon)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_equal_logits_lose_the_log_of_the_classes(epsilon: float) -> None:
    loss, grad = reference_cross_entropy(np.zeros((4, 10)), [0, 3, 5, 9], epsilon)
    assert loss == pytest.approx(math.log(10), rel=1e-15)
    expected = (0.1 - epsilon / 10 - (1 - epsilon)) / 4
    assert grad[1, 3] == pytest.approx(expected, rel=1e-14)
    assert grad[1, 0] == pytest.approx((0.1 - epsilon / 10) / 4, rel=1e-14)


def test_two_classes_by_hand() -> None:
    loss, grad = reference_cross_entropy([[math.log(3.0), 0.0]], [0], 0.2)  # p = (0.75, 0.25)
    assert loss == pytest.approx(-(0.8 * math.log(0.75) + 0.1 * (math.log(0.75) + math.log(0.25))), rel=1e-14)
    assert grad[0] == pytest.approx([0.75 - 0.9, 0.25 - 0.1], rel=1e-14)


def test_gradient_equals_differences() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(3, 5)), [4, -1, 2]
    _, grad = reference_cross_entropy(z, y, 0.1)
    for i, c in np.ndindex(z.shape):
        up, down = z.copy(), z.copy()
        up[i, c] += 1e-6
        down[i, c] -= 1e-6
        difference = (reference_cross_entropy(up, y, 0.1)[0] - reference_cross_entropy(down, y, 0.1)[0]) / 2e-6
        assert grad[i, c] == pytest.approx(difference, abs=1e-9)
    assert grad.sum(axis=1) == pytest.approx(np.zeros(3), abs=1e-15)


def test_masked_rows_change_nothing() -> None:
    z = np.random.default_rng(1).normal(size=(3, 4))
    loss, grad = reference_cross_entropy(z, [1, 2, 3], 0.1)
    padded_loss, padded = reference_cross_entropy(np.vstack([z, np.full((2, 4), 7.0)]), [1, 2, 3, -1, -1], 0.1)
    assert padded_loss == loss
    assert np.array_equal(padded[:3], grad)
    assert not padded[3:].any()
    assert reference_cross_entropy(z, [-1, -1, -1])[0] == 0.0


def test_large_logits_do_not_overflow_and_are_not_bounded() -> None:
    loss, grad = reference_cross_entropy([[1000.0, 0.0]], [1])
    assert loss == 1000.0  # a 1e-8 guard inside the logarithm would stop at 18.4
    assert grad[0] == pytest.approx([1.0, -1.0])


def test_shapes_and_labels_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\) and labels \(3,\)"):
        reference_cross_entropy(np.zeros((2, 3)), [0, 1, 2])
    with pytest.raises(ValueRejected, match="labels span 0 to 3; expected -1 to 2"):
        reference_cross_entropy(np.zeros((2, 3)), [0, 3])
