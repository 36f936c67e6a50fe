"""What every backend's launchers refuse before they build a call, by name."""

from __future__ import annotations

import pytest
from backend_kernels_harness import node

from renaissance.backend.checks import convolution_of, expect, window_of
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, RenaissanceError, ShapeError, ValueRejected
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor import DTensor


def tensor(name: str, *dims: int) -> DTensor:
    return DTensor.make(0, name, Shape(*dims), DType.FP32, Region.T_TEMP_FP32)


CONV = {"stride": 1, "pad": 0, "groups": 1, "activation": "none"}
IMAGE, KERNEL, RESULT = tensor("x", 2, 5, 3, 4), tensor("w", 8, 4, 2, 4), tensor("y", 2, 2, 2, 8)


def test_a_kernel_that_is_higher_than_the_image_is_wide_fits() -> None:
    assert convolution_of(node("CONV_FWD", (0, 1), (2,), **CONV), IMAGE, KERNEL, RESULT) == (1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "w", "y", "error", "words"),
    [
        ({"groups": 2}, KERNEL, RESULT, ShapeError, r"'w' .* expected \[K,R,S,C/2\]"),
        ({}, tensor("w", 8, 6, 1, 4), RESULT, ShapeError, "no larger than the padded image"),
        ({}, tensor("w", 8, 1, 4, 4), RESULT, ShapeError, "no larger than the padded image"),
        ({"pad": 1}, KERNEL, RESULT, ShapeError, r"'y' is .*; expected \[2,4,4,8\] \(stride 1, pad 1\)"),
        ({"stride": 0}, KERNEL, RESULT, ValueRejected, "stride 0; expected an integer of at least 1"),
        ({"pad": -1}, KERNEL, RESULT, ValueRejected, "pad -1; expected an integer of at least 0"),
    ],
)
def test_a_convolution_that_does_not_fit_is_named(
    changes: dict[str, int], w: DTensor, y: DTensor, error: type[RenaissanceError], words: str
) -> None:
    with pytest.raises(error, match=f"CONV_FWD #7: .*{words}"):
        convolution_of(node("CONV_FWD", (0, 1), (2,), **{**CONV, **changes}), IMAGE, w, y)


def test_a_window_that_does_not_fit_is_named() -> None:
    image, small = tensor("x", 1, 5, 4, 2), tensor("y", 1, 2, 2, 2)
    assert window_of(node("AVGPOOL_FWD", (0,), (1,), kernel=3, stride=2, pad=1), image, tensor("y", 1, 3, 2, 2))
    assert window_of(node("GAP_FWD", (0,), (1,)), image, tensor("y", 1, 1, 1, 2)) == (5, 4, 1, 0)
    for attrs, words in (
        ({"kernel": 5, "stride": 1, "pad": 0}, "a window that fits the padded image"),
        ({"kernel": 2, "stride": 1, "pad": 2}, "0 <= pad < kernel"),
        ({"kernel": 2, "stride": 1, "pad": 0}, r"'y' is .*; expected \[1, 4, 3, 2\]"),
    ):
        with pytest.raises(ShapeError, match=f"MAXPOOL_FWD #7: .*{words}"):
            window_of(node("MAXPOOL_FWD", (0,), (1,), **attrs), image, small)


def test_a_tensor_of_another_type_or_size_is_named() -> None:
    one = node("ADD_FWD", (0, 1), (2,))
    assert expect(one, IMAGE, DType.FP32, 120) is IMAGE
    with pytest.raises(DTypeError, match="ADD_FWD #7: tensor 'x' is FP32; expected INT32"):
        expect(one, IMAGE, DType.INT32)
    with pytest.raises(ShapeError, match=r"ADD_FWD #7: tensor 'x' is .*; expected 119 elements"):
        expect(one, IMAGE, DType.FP32, 119)
