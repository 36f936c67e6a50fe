"""Host tensors: memory, fills, comparison, text (spec/framework 2.1)."""

import math

import numpy as np
import pytest

from renaissance.core.dtype import DType, fp32_from_bf16
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.core.philox import Domain, philox, purpose
from renaissance.core.shape import Shape
from renaissance.tensor import Tensor

SHAPE = Shape(2, 3, 5, 7)
FLOATS = (DType.FP32, DType.FP16, DType.BF16)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [Shape(), Shape.of(3), SHAPE, Shape.of(1000)])
def test_new_tensors_are_zero_compact_and_aligned(dtype: DType, shape: Shape) -> None:
    t = Tensor(shape, dtype)
    assert t.address % 256 == 0
    assert not t.numpy().any()
    assert t.numpy().shape == shape.dims
    assert t.numpy().flags.c_contiguous
    assert (t.numel, t.nbytes) == (shape.numel, shape.numel * dtype.itemsize)
    assert t.row_stride == shape.w * shape.c * dtype.itemsize


def test_numpy_is_a_view_and_clone_is_not() -> None:
    t = Tensor(SHAPE)
    copy = t.clone()
    t.numpy()[1, 2, 3, 4] = 5.0
    assert t.numpy()[1, 2, 3, 4] == 5.0
    assert not copy.numpy().any()


def test_arrays_come_in_right_aligned_and_with_their_own_type() -> None:
    t = Tensor.from_numpy(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert (t.shape, t.dtype) == (Shape(1, 1, 2, 3), DType.INT32)
    assert Tensor.from_numpy(np.zeros(4, np.uint16), DType.BF16).dtype is DType.BF16
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert np.array_equal(Tensor.from_numpy(transposed).numpy()[0, 0], transposed)


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(DTypeError, match="no element type for NumPy uint16"):
        Tensor.from_numpy(np.zeros(4, np.uint16))
    with pytest.raises(DTypeError, match="float64"):
        Tensor.from_numpy(np.zeros(4))
    with pytest.raises(DTypeError, match="array is float32, but INT32"):
        Tensor.from_numpy(np.zeros(4, np.float32), DType.INT32)
    with pytest.raises(ShapeError, match="5 sizes"):
        Tensor.from_numpy(np.zeros((1,) * 5, np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_fill_rounds_to_nearest_even(dtype: DType) -> None:
    ulp = {DType.FP32: 2.0**-23, DType.FP16: 2.0**-10, DType.BF16: 2.0**-7}[dtype]
    for value, rounded in ((1 + ulp / 2, 1.0), (1 + 1.5 * ulp, 1 + 2 * ulp), (1 + 0.6 * ulp, 1 + ulp)):
        assert Tensor.full(Shape.of(3), value, dtype).to_float32()[0, 0, 0, 0] == np.float32(rounded)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(DType.INT8, -128, 127), (DType.UINT8, 0, 255), (DType.INT32, -(2**31), 2**31 - 1)]
)
def test_integer_fill_takes_whole_numbers_in_range(dtype: DType, low: int, high: int) -> None:
    for value in (low, high):
        assert (Tensor.full(Shape.of(5), value, dtype).numpy() == value).all()
    for bad in (low - 1, high + 1, 0.5, math.nan, math.inf):
        with pytest.raises(ValueRejected, match=f"does not fit {dtype.name}"):
            Tensor.full(Shape.of(5), bad, dtype)


def test_zero_clears() -> None:
    assert not Tensor.full(SHAPE, 3.0).zero().numpy().any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_fill_stays_in_its_interval(dtype: DType) -> None:
    values = Tensor.uniform(Shape.of(20_000), -2.0, 6.0, seed=5, dtype=dtype).to_float32()
    assert values.min() >= -2.0
    assert values.max() <= 6.0  # rounding to 16 bit may reach the open end
    assert values.mean() == pytest.approx(2.0, abs=0.06)


def test_random_value_is_the_documented_function_of_its_counter() -> None:
    t = Tensor.uniform(Shape.of(11), 0.0, 1.0, seed=9, stream=4)
    word = philox(9, 2, purpose(Domain.TENSOR_FILL, 4), 0, 0)[1]
    assert t.numpy()[0, 0, 0, 9] == np.float32((word >> 8) * 2.0**-24)
    i = Tensor.uniform_int(Shape.of(11), 0, 100, seed=9, stream=4)
    assert i.numpy()[0, 0, 0, 9] == word * 100 >> 32


def test_seed_and_stream_decide_the_values() -> None:
    a = Tensor.randn(SHAPE, seed=1)
    assert np.array_equal(a.numpy(), Tensor.randn(SHAPE, seed=1).numpy())
    assert not np.array_equal(a.numpy(), Tensor.randn(SHAPE, seed=2).numpy())
    assert not np.array_equal(a.numpy(), Tensor.randn(SHAPE, seed=1, stream=1).numpy())


def test_normal_and_truncated_fills_have_their_moments() -> None:
    n = Tensor.normal(Shape.of(20_001), 3.0, 0.5, seed=1).numpy()
    assert n.mean() == pytest.approx(3.0, abs=0.02)
    assert n.std() == pytest.approx(0.5, rel=0.03)
    t = Tensor.truncated_normal(Shape.of(20_001), 3.0, 0.5, seed=1, bound=1.0).numpy()
    assert np.abs(t - 3.0).max() <= 0.5
    assert t.std() == pytest.approx(0.5 * 0.5396, rel=0.03)  # std of a unit normal cut at +-1


def test_byte_integers_include_both_ends_and_int32_excludes_the_upper() -> None:
    for dtype in (DType.INT8, DType.UINT8):
        assert set(Tensor.uniform_int(Shape.of(999), 1, 3, 0, dtype=dtype).numpy().flat) == {1, 2, 3}
    assert set(Tensor.uniform_int(Shape.of(999), -1, 2, 0).numpy().flat) == {-1, 0, 1}
    full = Tensor.uniform_int(Shape.of(999), -(2**31), 2**31 - 1, 0).numpy()
    assert full.min() < -(2**30)
    assert full.max() > 2**30


def test_fills_of_the_wrong_kind_are_type_errors() -> None:
    t = Tensor(SHAPE, DType.INT32)
    with pytest.raises(DTypeError, match="INT32; expected FP32, FP16 or BF16"):
        t.fill_uniform(0.0, 1.0, 0)
    with pytest.raises(DTypeError, match="fill_normal"):
        t.fill_normal(0.0, 1.0, 0)
    with pytest.raises(DTypeError, match="fill_truncated_normal"):
        t.fill_truncated_normal(0.0, 1.0, 0)
    with pytest.raises(DTypeError, match="FP32; expected INT32, INT8 or UINT8"):
        Tensor(SHAPE).fill_uniform_int(0, 1, 0)


def test_bad_ranges_are_refused() -> None:
    t, i, b = Tensor(SHAPE), Tensor(SHAPE, DType.INT32), Tensor(SHAPE, DType.INT8)
    for low, high in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueRejected, match="fill_uniform: bounds"):
            t.fill_uniform(low, high, 0)
    with pytest.raises(ValueRejected, match="std -1"):
        t.fill_normal(0.0, -1.0, 0)
    for bound in (0.0, 0.4, math.nan):
        with pytest.raises(ValueRejected, match="bound is"):
            t.fill_truncated_normal(0.0, 1.0, 0, bound=bound)
    with pytest.raises(ValueRejected, match="low < high"):
        i.fill_uniform_int(4, 4, 0)
    with pytest.raises(ValueRejected, match=r"values in -128\.\.127"):
        b.fill_uniform_int(0, 128, 0)
    with pytest.raises(ValueRejected, match="low <= high"):
        b.fill_uniform_int(1, 0, 0)


def test_is_close_compares_shape_dtype_and_values() -> None:
    a = Tensor.full(SHAPE, 1.0)
    assert a.is_close(Tensor.full(SHAPE, 1.0009))
    assert not a.is_close(Tensor.full(SHAPE, 1.002))
    assert not a.is_close(Tensor.full(Shape(3, 2, 5, 7), 1.0))
    assert not a.is_close(Tensor.full(SHAPE, 1.0, DType.FP16))
    i = Tensor.full(SHAPE, 5, DType.INT8)
    assert i.is_close(i.clone(), tolerance=0.0)
    assert not i.is_close(Tensor.full(SHAPE, 6, DType.INT8), tolerance=10.0)


def test_bf16_values_are_bit_patterns_to_numpy() -> None:
    t = Tensor.full(Shape.of(2), 1.0, DType.BF16)
    assert t.numpy()[0, 0, 0, 0] == 0x3F80
    assert fp32_from_bf16(t.numpy())[0, 0, 0, 0] == 1.0


def test_text_shows_sixteen_elements_and_the_rest_as_a_number() -> None:
    assert Tensor.full(Shape.of(2), 0.1).to_string("w", precision=3) == "w [1,1,1,2] FP32 8 bytes: [0.1, 0.1]"
    assert Tensor.full(Shape.of(20), 7, DType.INT32).to_string().endswith("7, ... 4 more]")
    assert repr(Tensor(SHAPE, DType.FP16)) == "<tensor [2,3,5,7] FP16 420 bytes>"
