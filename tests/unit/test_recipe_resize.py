"""Resizes: the oracle equals Pillow bit for bit, boxes are drawn as they say, and crops are where they say."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from recipe_cases import SEED, pictures, pixels_of

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data import reference
from renaissance.data.recipe import Recipe
from renaissance.data.reference_draws import Draws
from renaissance.data.reference_resize import coefficients, crop_box, denominator, random_box, resize_box
from renaissance.data.transforms import (
    CenterCrop,
    FastRandomResizedCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    Transform,
)

Picture = npt.NDArray[np.uint8]
BILINEAR = Image.Resampling.BILINEAR


def by_pillow(cut: Picture, size: int, across: tuple[float, float], down: tuple[float, float]) -> Picture:
    """One pass after the other, because Pillow's own order of the passes depends on its version and the sizes."""
    height, _, channels = cut.shape
    image = Image.fromarray(cut[..., 0] if channels == 1 else cut)
    image = image.resize((size, height), BILINEAR, box=(across[0], 0, across[1], height))
    image = image.resize((size, size), BILINEAR, box=(0, down[0], size, down[1]))
    return np.asarray(image).reshape(size, size, channels)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    corner=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    far=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    size=st.integers(1, 60),
    channels=st.sampled_from([1, 3]),
)
def test_a_resized_box_is_that_of_pillow(
    height: int, width: int, corner: tuple[float, float], far: tuple[float, float], size: int, channels: int
) -> None:
    image = pictures(1, height, width, channels)[0]
    x0, y0 = int(corner[0] * width), int(corner[1] * height)
    x1, y1 = x0 + 1 + int(far[0] * (width - x0 - 1)), y0 + 1 + int(far[1] * (height - y0 - 1))
    cut = np.ascontiguousarray(image[y0:y1, x0:x1])
    want = by_pillow(cut, size, (0, x1 - x0), (0, y1 - y0))
    np.testing.assert_array_equal(resize_box(image, (x0, y0, x1, y1), size), want)


@pytest.mark.parametrize(("height", "width"), [(30, 50), (50, 50), (31, 97)])
def test_one_call_of_pillow_does_the_same_for_wide_pictures(height: int, width: int) -> None:
    for channels in (1, 3):
        image = pictures(1, height, width, channels)[0]
        for size in (1, 7, 32, 50, 90):
            pil = Image.fromarray(image[..., 0] if channels == 1 else image).resize((size, size), BILINEAR)
            want = np.asarray(pil).reshape(size, size, channels)
            np.testing.assert_array_equal(resize_box(image, (0, 0, width, height), size), want)


def test_resized_crop_is_that_of_torchvision() -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    image = pictures(1, 60, 90, 3)[0]
    for x0, y0, x1, y1 in ((0, 0, 90, 60), (11, 7, 71, 47), (5, 50, 90, 60)):
        want = functional.resized_crop(
            Image.fromarray(image), y0, x0, y1 - y0, x1 - x0, [24, 24], functional.InterpolationMode.BILINEAR
        )
        np.testing.assert_array_equal(resize_box(image, (x0, y0, x1, y1), 24), np.asarray(want))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    corner=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
    size=st.integers(1, 30),
    f=st.sampled_from([2, 4, 8]),
)
def test_a_box_of_a_scaled_picture_is_pillows_box_inside_the_cut(
    width: int, height: int, corner: tuple[float, float], size: int, f: int
) -> None:
    scaled = pictures(1, -(-height // f), -(-width // f), 3)[0]
    x0, y0 = int(corner[0] * width), int(corner[1] * height)
    x1, y1 = width, y0 + max(1, (height - y0) // 2)
    left, top = x0 // f, y0 // f
    cut = np.ascontiguousarray(scaled[top : math.ceil(y1 / f), left : math.ceil(x1 / f)])
    across, down = (x0 / f - left, x1 / f - left), (y0 / f - top, y1 / f - top)
    want = by_pillow(cut, size, across, down)
    np.testing.assert_array_equal(resize_box(scaled, (x0, y0, x1, y1), size, f), want)


def test_weights_sum_to_one_and_never_leave_the_axis() -> None:
    for n, size in ((1, 1), (1, 50), (50, 1), (7, 3), (3, 7), (500, 224), (224, 224), (8192, 3)):
        for i in range(min(size, 20)):
            first, weights = coefficients(n, size, (0, n), i)
            assert 0 <= first < first + len(weights) <= n
            assert abs(sum(weights) - (1 << 22)) <= len(weights)
            assert min(weights) >= 0
    assert [coefficients(5, 5, (0, 5), i)[1][0] for i in range(5)] == [1 << 22] * 5, "same size, same pixels"


# ---- which part of the picture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(375, 500, (62, 0, 437, 375)), (500, 375, (0, 62, 375, 437)), (9, 9, (0, 0, 9, 9)), (1, 4, (1, 0, 2, 1))],
)
def test_resize_takes_the_centred_square(height: int, width: int, box: tuple[int, ...]) -> None:
    assert crop_box(Resize(8), height, width, Draws(SEED, 0, 0, 0)) == box


def boxes(transform: RandomResizedCrop, height: int, width: int, count: int) -> npt.NDArray[np.int64]:
    return np.array([random_box(transform, height, width, Draws(SEED, 1, s, 4)) for s in range(count)])


def test_boxes_follow_area_and_ratio_and_are_placed_uniformly() -> None:
    width = height = 400
    drawn = boxes(RandomResizedCrop(8, (0.1, 0.6)), height, width, 4000)
    w, h = drawn[:, 2] - drawn[:, 0], drawn[:, 3] - drawn[:, 1]
    assert drawn.min() >= 0
    assert drawn.max() <= 400
    area = w * h / (width * height)
    counts, _ = np.histogram(area, bins=10, range=(0.1, 0.6))
    assert 320 < counts.min() <= counts.max() < 480, "the area is uniform, not log-uniform"
    ratio = np.log(w / h) / math.log(4 / 3)
    counts, _ = np.histogram(ratio, bins=10, range=(-1, 1))
    assert 320 < counts.min() <= counts.max() < 480, "the ratio is log-uniform"
    for corner, room in ((drawn[:, 0], width - w), (drawn[:, 1], height - h)):
        counts, _ = np.histogram((corner + 0.5) / (room + 1), bins=8, range=(0, 1))
        assert 400 < counts.min() <= counts.max() < 600
    assert abs(np.corrcoef(drawn[:, 0] / (width - w + 1), drawn[:, 1] / (height - h + 1))[0, 1]) < 0.05


def test_fast_random_resized_crop_draws_the_same_boxes() -> None:
    args = (8, (0.08, 1.0), (3 / 4, 4 / 3))
    np.testing.assert_array_equal(
        boxes(RandomResizedCrop(*args), 300, 200, 50), boxes(FastRandomResizedCrop(*args), 300, 200, 50)
    )


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (100, 1000, (433, 0, 566, 100)),  # too wide: 133 = half up of 100 * 4/3
        (1000, 100, (0, 433, 100, 566)),  # too tall: 133 = half up of 100 / (3/4)
        (1, 8192, (4095, 0, 4096, 1)),
    ],
)
def test_pictures_in_which_no_attempt_fits_give_the_centre(height: int, width: int, box: tuple[int, ...]) -> None:
    assert set(map(tuple, boxes(RandomResizedCrop(8, (0.9, 1.0)), height, width, 20).tolist())) == {box}


def test_a_retry_costs_the_other_draws_nothing() -> None:
    transform = RandomResizedCrop(8, (0.3, 1.0))
    retried = 0
    for sample in range(40):
        draws = Draws(SEED, 1, sample, 4)
        attempts = []
        for k in range(10):
            area, ratio = draws.uniform(4 * k, 0.3, 1.0) * 320 * 200, draws.log_uniform(4 * k + 1, 3 / 4, 4 / 3)
            attempts.append((math.floor(math.sqrt(area * ratio) + 0.5), math.floor(math.sqrt(area / ratio) + 0.5)))
        k, (w, h) = next((k, (w, h)) for k, (w, h) in enumerate(attempts) if w <= 320 and h <= 200)
        x, y = draws.below(4 * k + 2, 320 - w + 1), draws.below(4 * k + 3, 200 - h + 1)
        assert random_box(transform, 200, 320, draws) == (x, y, x + w, y + h)
        retried += k > 0
    assert retried > 10


def test_the_scale_of_decoding_is_the_smallest_that_leaves_the_target_its_pixels() -> None:
    for side, f in ((223, 1), (224, 1), (447, 1), (448, 2), (895, 2), (896, 4), (1791, 4), (1792, 8), (9000, 8)):
        box = (0, 0, side, side)
        assert denominator(Resize(224), box, "scaled") == denominator(RandomResizedCrop(224), box, "fast") == f
        assert denominator(Resize(224), box, "exact") == 1
        assert denominator(FastRandomResizedCrop(224), box, "exact") == f
    assert denominator(Resize(224), (0, 0, 5000, 500), "scaled") == 2, "the shorter side decides"


def test_a_scaled_picture_is_asked_for_once_at_the_scale_of_the_box() -> None:
    asked = []

    def scaled(f: int) -> Picture:
        asked.append(f)
        return np.full((-(-100 // f), -(-130 // f), 3), 9, np.uint8)

    chain = [RandomCrop(64), Resize(8)], [Resize(24), Resize(2)], [FastRandomResizedCrop(12, (1.0, 1.0), (1.0, 1.0))]
    for transforms, f in zip(chain, (None, 4, 8), strict=True):
        asked.clear()
        recipe = Recipe.build(transforms, NormMode.NO_NORM, transforms[-1].size)  # type: ignore[attr-defined]
        reference.row(recipe, np.zeros((100, 130, 3), np.uint8), 1, SEED, 0, DType.UINT8, scaled=scaled)
        assert asked == ([] if f is None else [f])


# ---- centre crop -----------------------------------------------------------------------------------------------------


def row(transforms: list[Transform], image: Picture, size: int) -> Picture:
    recipe = pixels_of(transforms, size, image.shape[2])
    return reference.row(recipe, image, 5, SEED, 3, DType.UINT8).reshape(size, size, -1)


def test_a_centre_crop_cuts_and_pads_by_floor_halves() -> None:
    image = pictures(1, 9, 4, 3)[0]
    got = row([CenterCrop(6)], image, 6)
    np.testing.assert_array_equal(got[:, 1:5], image[1:7])
    assert not got[:, 0].any()
    assert not got[:, 5].any()
    np.testing.assert_array_equal(row([CenterCrop(3)], image, 3), image[3:6, 0:3])


@pytest.mark.parametrize("size", [5, 12, 13, 20])
def test_a_centre_crop_is_the_same_before_and_inside_a_resampling_pass(size: int) -> None:
    image = pictures(1, 13, 13, 1)[0]
    still = row([RandomRotation(0), CenterCrop(size)], image, size)
    np.testing.assert_array_equal(still, row([CenterCrop(size)], image, size))
    np.testing.assert_array_equal(row([CenterCrop(size), RandomRotation(0)], image, size), still)


def test_a_crop_as_first_stage_equals_being_the_first_of_its_segment() -> None:
    image = pictures(1, 40, 31, 3)[0]
    whole = pixels_of([RandomCrop(16), RandomRotation(30, 9), Pad(2)], 20, 3)
    got = reference.sample(whole, image, 5, SEED, 3)
    draws = Draws(SEED, 0, 5, 3)
    left, top = draws.below(0, 31 - 16 + 1), draws.below(1, 40 - 16 + 1)
    cut = image[top : top + 16, left : left + 16]
    rest = pixels_of([Pad(0), RandomRotation(30, 9), Pad(2)], 20, 3)
    np.testing.assert_array_equal(got, reference.sample(rest, cut, 5, SEED, 3))
