"""Shapes: right alignment, limits, text (spec/framework 1.1; zero and a fifth size are errors here)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renaissance.core.errors import ShapeError
from renaissance.core.shape import INT32_MAX, Shape


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [((), (1, 1, 1, 1)), ((3,), (1, 1, 1, 3)), ((2, 3), (1, 1, 2, 3)), ((4, 2, 3), (1, 4, 2, 3)), ((5, 4, 2, 3),) * 2],
)
def test_fewer_sizes_are_right_aligned(sizes: tuple[int, ...], dims: tuple[int, ...]) -> None:
    assert Shape.of(*sizes).dims == dims


def test_default_is_a_scalar() -> None:
    assert Shape() == Shape.of() == Shape(1, 1, 1, 1)
    assert Shape().numel == 1


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("size", [0, -1, INT32_MAX + 1])
def test_sizes_outside_int32_are_refused_with_the_axis(axis: int, size: int) -> None:
    sizes = [2, 2, 2, 2]
    sizes[axis] = size
    with pytest.raises(ShapeError, match=f"axis {'NHWC'[axis]} is {size}"):
        Shape(*sizes)


def test_a_fifth_size_is_refused() -> None:
    with pytest.raises(ShapeError, match="has 5 sizes; expected at most 4"):
        Shape.of(1, 2, 3, 4, 5)


def test_shapes_are_values() -> None:
    a = Shape(2, 3, 4, 5)
    assert a == Shape(2, 3, 4, 5)
    assert hash(a) == hash(Shape(2, 3, 4, 5))
    assert a != a.with_n(3)
    assert a.with_n(7).dims == (7, 3, 4, 5)
    assert str(a) == "[2,3,4,5]"
    with pytest.raises(AttributeError):
        a.n = 3  # type: ignore[misc]


@given(st.lists(st.integers(1, INT32_MAX), min_size=4, max_size=4))
def test_element_count_never_wraps(sizes: list[int]) -> None:
    n, h, w, c = sizes
    assert Shape(*sizes).numel == n * h * w * c
