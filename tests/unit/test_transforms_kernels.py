"""Each transform, and every chain of them, gives the bytes of the NumPy reference."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from recipe_cases import MNIST_CHAIN, SEED, expected, pictures, pixels_of, random_recipe, rows

from renaissance.core.digest import xxh64
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import ValueRejected
from renaissance.data import reference
from renaissance.data.compile import compile_recipe, pixel_table
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.transforms import (
    PAD_MODES,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
    Transform,
)

IDS = list(range(12))

SINGLE: list[tuple[list[Transform], int]] = [
    ([], 13),
    ([Pad(3, 9)], 19),
    ([RandomCrop(9)], 9),
    ([RandomCrop(17)], 17),
    ([RandomRotation(180)], 13),
    ([RandomRotation(45, 200)], 13),
    ([RandomScale(0.5, 2.0)], 13),
    ([RandomHorizontalFlip(0.5)], 13),
    ([RandomErasing(1.0)], 13),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("transforms", "resolution"), SINGLE, ids=lambda v: repr(v) if isinstance(v, list) else None)
def test_each_transform_equals_the_reference(transforms: list[Transform], resolution: int, channels: int) -> None:
    images = pictures(12, 13, 13, channels)
    recipe = pixels_of(transforms, resolution, channels)
    np.testing.assert_array_equal(rows(recipe, images, IDS)[0], expected(recipe, images, IDS))


def test_a_fill_may_differ_per_channel() -> None:
    images = pictures(12, 13, 13, 3)
    for chain in ([Pad(3, (1, 2, 3))], [Pad(2), RandomRotation(90, (9, 8, 7)), Pad(1, (4, 5, 6))]):
        recipe = pixels_of(chain, 19, 3)
        np.testing.assert_array_equal(rows(recipe, images, IDS)[0], expected(recipe, images, IDS))


@pytest.mark.parametrize("mode", PAD_MODES)
def test_pad_has_the_semantics_of_numpy_in_every_mode(mode: str) -> None:
    images = pictures(2, 7, 7, 3)
    got = rows(pixels_of([Pad(4, mode=mode)], 15, 3), images, [0, 1])[0]
    want = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode=mode)  # type: ignore[call-overload]
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("case", range(40))
def test_any_chain_equals_the_reference_in_any_dtype(case: int) -> None:
    rng = random.Random(case)
    channels = rng.choice([1, 3])
    images = pictures(3, rng.randrange(1, 24), rng.randrange(1, 24), channels)
    dtype = rng.choice([DType.FP32, DType.FP16, DType.BF16, DType.UINT8])
    recipe = random_recipe(rng, channels, rng.randrange(2, 24), dtype is not DType.UINT8)
    padded = channels + rng.randrange(4)
    got, _ = rows(recipe, images, [2, 0, 1], dtype=dtype, padded=padded)
    np.testing.assert_array_equal(got, expected(recipe, images, [2, 0, 1], dtype, padded), err_msg=repr(recipe))


@pytest.mark.parametrize("border", [0, 6, 14])
def test_short_cuts_for_empty_pixels_change_nothing(border: int) -> None:
    images = pictures(8, 28, 28, 1, border=border)
    recipe = Recipe.build(MNIST_CHAIN, NormMode.MNIST, 28, 1)
    ids = list(range(8))
    np.testing.assert_array_equal(
        rows(recipe, images, ids, dtype=DType.FP32)[0], expected(recipe, images, ids, DType.FP32)
    )


def test_geometry_before_resampling_equals_one_transform_after_the_other() -> None:
    images = pictures(6, 12, 12, 1)
    fused = pixels_of([Pad(2, 7), RandomCrop(13), RandomRotation(33)], 13, 1)
    alone = pixels_of([Pad(0), Pad(0), RandomRotation(33)], 13, 1)
    got = rows(fused, images, list(range(6)))[0]
    for i in range(6):
        draws = reference.Draws(SEED, 1, i, 3)
        left, top = draws.below(0, 4), draws.below(1, 4)
        window = np.pad(images[i], ((2, 2), (2, 2), (0, 0)), constant_values=7)[top : top + 13, left : left + 13]
        np.testing.assert_array_equal(got[i], reference.row(alone, window, i, SEED, 3, DType.UINT8))


def test_a_later_scale_does_not_bring_back_what_a_rotation_turned_out() -> None:
    white = np.full((6, 21, 21, 1), 255, np.uint8)
    got = rows(pixels_of([RandomRotation(0), RandomScale(0.5, 0.5)], 21, 1), white, IDS[:6])[0].reshape(6, 21, 21)
    assert (got[:, 6:15, 6:15] == 255).all()
    assert (got[:, :4] == 0).all()
    assert (got[:, :, :4] == 0).all()
    turned = rows(pixels_of([RandomRotation(360), RandomScale(0.5, 0.5)], 21, 1), white, IDS[:6])[0].reshape(6, 21, 21)
    assert (turned[:, :4] == 0).all(), "corners turned out of the canvas must stay out of the scaled picture"


def test_positive_angles_turn_counter_clockwise() -> None:
    image = np.zeros((9, 9, 1), np.uint8)
    image[4, 8] = 255  # east of the centre
    base = reference.resample(image, [_rotation(90.0)], (9, 9))
    assert base[0, 4, 0] == 255
    assert int(base.sum()) == 255


def _rotation(degrees: float) -> reference.Stage:
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    linear = np.array([[cosine, -sine], [sine, cosine]])
    shift = np.array([4.0, 4.0]) - linear @ np.array([4.0, 4.0])
    return reference.Stage(np.column_stack([linear, shift]), (9, 9), (9, 9), np.zeros(1, np.uint8))


def test_zero_rotation_and_unit_scale_leave_every_pixel() -> None:
    images = pictures(4, 16, 16, 3)
    got = rows(pixels_of([RandomRotation(0), RandomScale(1, 1)], 16, 3), images, [0, 1, 2, 3])[0]
    np.testing.assert_array_equal(got.reshape(images.shape), images)


def test_channel_padding_is_zero_and_moves_nothing() -> None:
    images = pictures(3, 28, 28, 3)
    recipe = Recipe.build([RandomRotation(9), RandomErasing(1.0)], NormMode.CIFAR, 28, 3)
    plain = rows(recipe, images, [0, 1, 2], dtype=DType.FP32)[0].view(np.float32).reshape(3, 28, 28, 3)
    padded = rows(recipe, images, [0, 1, 2], dtype=DType.FP32, padded=8)[0].view(np.float32).reshape(3, 28, 28, 8)
    np.testing.assert_array_equal(padded[..., :3], plain)
    assert not padded[..., 3:].any()


def test_empty_rows_are_zero_and_row_hashes_are_xxh64_of_the_bytes() -> None:
    images = pictures(3, 28, 28, 1)
    out, hashes = rows(Recipe.build(MNIST_CHAIN, NormMode.MNIST, 28, 1), images, [1, -1, 2], dtype=DType.BF16)
    assert not out[1].any()
    assert out[0].any()
    assert [int(h) for h in hashes] == [int(xxh64(row)) for row in out]


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_half_tables_round_the_fp32_values_to_nearest_even(dtype: DType) -> None:
    norm = Normalization.preset(NormMode.IMAGENET, 3)
    exact = pixel_table(norm, DType.FP32).view(np.float32).astype(np.float64)
    bits = pixel_table(norm, dtype)
    as_float = _bf16 if dtype is DType.BF16 else (lambda b: b.view(np.float16).astype(np.float64))
    error = np.abs(as_float(bits) - exact)
    for neighbour in (bits + np.uint16(1), bits - np.uint16(1)):
        other = np.abs(as_float(neighbour) - exact)
        assert (error <= other).all()
        assert ((bits & 1) == 0)[error == other].all()


def _bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_fp32_table_is_the_formula() -> None:
    got = pixel_table(Normalization.preset(NormMode.MNIST, 1), DType.FP32).view(np.float32)[0]
    np.testing.assert_array_equal(got, ((np.arange(256) / 255 - 0.1307) / 0.3081).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [(DType.FP16, 0.0, 1e-5), (DType.BF16, 3.4e38, 1.0), (DType.FP32, 1e40, 1.0), (DType.FP32, 1e308, 1e-6)],
)
def test_a_normalisation_that_would_deliver_infinities_is_refused(dtype: DType, mean: float, std: float) -> None:
    with pytest.raises(ValueRejected, match=f"gives values beyond {dtype.name.lower()}"):
        pixel_table(Normalization((mean,), (std,)), dtype)


def test_compiled_recipe_says_what_it_delivers() -> None:
    compiled = compile_recipe(Recipe.build(MNIST_CHAIN, NormMode.MNIST, 28, 1), 28, 28, 1, DType.BF16, 8)
    assert compiled.sample_shape == (28, 28, 8)
    assert compiled.row_bytes == 28 * 28 * 8 * 2
