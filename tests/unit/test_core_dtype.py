"""Element types and the reference bfloat16 conversions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DTypeError


def test_codes_sizes_and_storage() -> None:
    assert [(d.name, int(d), d.itemsize) for d in DType] == [
        ("FP32", 0, 4),
        ("FP16", 1, 2),
        ("INT8", 2, 1),
        ("INT32", 3, 4),
        ("BF16", 4, 2),
        ("UINT8", 5, 1),
    ]
    assert all(d.numpy.itemsize == d.itemsize for d in DType)
    assert [d for d in DType if d.is_half] == [DType.FP16, DType.BF16]


def test_names_parse_in_any_case_and_unknown_ones_list_the_allowed() -> None:
    assert DType.parse("bf16") is DType.parse("BF16") is DType.BF16
    with pytest.raises(DTypeError, match="unknown dtype 'float32'; expected one of: fp32, fp16"):
        DType.parse("float32")


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),  # halfway: to even, down
        (1 + 3 * 2**-8, 0x3F82),  # halfway: to even, up
        (1 + 2**-8 + 2**-20, 0x3F81),
        (3.3895314e38, 0x7F7F),  # the largest bfloat16
        (3.4e38, 0x7F80),  # rounds up to infinity
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
        (2.0**-133, 0x0001),  # the smallest subnormal
        (2.0**-134, 0x0000),  # halfway below it: to even
    ],
)
def test_rounding_to_bfloat16(value: float, bits: int) -> None:
    assert bf16_from_fp32(np.array([value], np.float32))[0] == bits


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_keeps_its_sign_and_stays_a_quiet_nan(bits: int) -> None:
    out = int(bf16_from_fp32(np.array([bits], np.uint32).view(np.float32))[0])
    assert out & 0x7FC0 == 0x7FC0
    assert out >> 15 == bits >> 31


def test_widening_every_pattern_and_rounding_back_is_the_identity_except_for_signalling_nan() -> None:
    every = np.arange(65536, dtype=np.uint16)
    back = bf16_from_fp32(fp32_from_bf16(every))
    nan = (every & 0x7FFF) > 0x7F80
    assert np.array_equal(back[~nan], every[~nan])
    assert np.array_equal(back[nan], every[nan] | 0x40)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_is_to_the_nearest(value: float) -> None:
    got = float(fp32_from_bf16(bf16_from_fp32(np.array([value], np.float32)))[0])
    if np.isfinite(got):
        spacing = max(2.0**-133, abs(value) * 2.0**-7)
        assert abs(got - value) <= spacing / 2


def test_shapes_survive_conversion() -> None:
    a = np.ones((2, 3, 4), np.float32)[:, ::2]
    assert fp32_from_bf16(bf16_from_fp32(a)).shape == (2, 2, 4)
