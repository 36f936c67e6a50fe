"""Pixel ops: kernels equal the oracle, the oracle equals Pillow where it does the same, draws are what they say."""

from __future__ import annotations

import math
import zlib
from threading import Thread

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from renaissance.core.philox import seed_words
from renaissance.data import reference_pixels as oracle
from renaissance.data.normal_steps import BUCKETS, FIRST_STEP, SEARCH, THRESHOLDS, normal_cdf, normal_steps
from renaissance.data.pixel_ops import _not_above, _turn_hue, apply_pixel_op, pixel_op_tables, scratch_bytes
from renaissance.data.reference_draws import Draws
from renaissance.data.transforms import (
    ColorJitter,
    GaussianBlur,
    GaussianNoise,
    RandomAutocontrast,
    RandomGrayscale,
    Resize,
    Transform,
)

Picture = npt.NDArray[np.uint8]
SEED = 0xFEDCBA9876543210
EPOCH = 6

OPS: list[Transform] = [
    ColorJitter(0.4),
    ColorJitter(contrast=0.9),
    ColorJitter(saturation=4.0),
    ColorJitter(hue=0.5),
    ColorJitter(0.4, 0.4, 0.4, 0.2),
    ColorJitter(),
    RandomGrayscale(0.5),
    RandomAutocontrast(0.5),
    GaussianBlur(),
    GaussianBlur(3, 64),
    GaussianNoise(),
    GaussianNoise(3.25, 40, clip=False),
    GaussianNoise(-200, 255, clip=False),
    GaussianNoise(-4, 0.3),
    GaussianNoise(0.5, 0),
]


def picture(height: int, width: int, channels: int, seed: int = 0) -> Picture:
    """Noise, but every third one of few colours: constant channels and equal neighbours are special cases."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return image if seed % 3 else image[:1, :1].repeat(height, axis=0).repeat(width, axis=1)


def kernel(transform: Transform, image: Picture, sample: int, op: int = 4, epoch: int = EPOCH) -> Picture:
    kind, params, table = pixel_op_tables(transform)
    height, width, channels = image.shape
    scratch = np.full(scratch_bytes(height, width, channels), 0xA5, np.uint8)
    guarded = np.concatenate([image.reshape(-1), np.full(64, 0x5A, np.uint8)])
    k0, k1 = seed_words(SEED)
    apply_pixel_op(kind, params, table, guarded, scratch, height, width, channels, k0, k1, op, sample, np.uint32(epoch))
    assert (guarded[image.size :] == 0x5A).all(), "written past the picture"
    return guarded[: image.size].reshape(image.shape)


def needs_colour(transform: Transform) -> bool:
    return isinstance(transform, ColorJitter | RandomGrayscale)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    transform=st.sampled_from(OPS),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    colour=st.booleans(),
    sample=st.integers(0, 2**31),
    op=st.integers(0, 255),
)
def test_kernels_equal_the_oracle(
    transform: Transform, height: int, width: int, colour: bool, sample: int, op: int
) -> None:
    image = picture(height, width, 3 if colour or needs_colour(transform) else 1, sample)
    want = oracle.pixel_op(transform, image, Draws(SEED, op, sample, EPOCH))
    np.testing.assert_array_equal(kernel(transform, image, sample, op), want)


def test_threads_may_share_an_op() -> None:
    image, transform = picture(64, 64, 3, 1), ColorJitter(0.4, 0.4, 0.4, 0.2)
    want = [kernel(transform, image, sample) for sample in range(8)]
    got: list[Picture | None] = [None] * 8

    def work(sample: int) -> None:
        got[sample] = kernel(transform, image, sample)

    threads = [Thread(target=work, args=(sample,)) for sample in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(got, want)


def test_only_pixel_ops_have_tables() -> None:
    with pytest.raises(TypeError, match="Resize is no pixel op"):
        pixel_op_tables(Resize(8))


# ---- Pillow ----------------------------------------------------------------------------------------------------------

ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


@pytest.mark.parametrize("name", ENHANCERS)
def test_brightness_contrast_and_saturation_are_those_of_pillow(name: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(12):
        image = picture(37, 23, 3, seed)
        for factor in (0.0, 0.3, 1.0, 1.7, 3.1, float(rng.uniform(0, 2))):
            want = np.asarray(ENHANCERS[name](Image.fromarray(image)).enhance(factor))
            np.testing.assert_array_equal(oracle.adjust(name, image, np.float32(factor)), want)


def test_luma_is_that_of_pillow_for_every_colour() -> None:
    colours = all_colours(range(1, 256, 14))
    want = np.asarray(Image.fromarray(colours).convert("L"))
    np.testing.assert_array_equal(oracle.luma(colours), want)
    np.testing.assert_array_equal(oracle.grey(colours), want[..., None].repeat(3, axis=-1))


@pytest.mark.parametrize(("red", "shift"), [(range(0, 256, 17), 0), (range(3, 256, 17), 25), (range(8, 256, 17), -128)])
def test_a_turn_of_hue_is_that_of_pillows_hsv(red: range, shift: int) -> None:
    colours = all_colours(red)
    hsv = np.array(Image.fromarray(colours).convert("HSV"))
    np.testing.assert_array_equal(np.stack(oracle.hsv_from_rgb(colours), axis=-1), hsv)
    hsv[..., 0] += np.uint8(shift % 256)
    planes = [Image.fromarray(np.ascontiguousarray(hsv[..., c])) for c in range(3)]
    want = np.asarray(Image.merge("HSV", planes).convert("RGB"))
    np.testing.assert_array_equal(oracle.turn_hue(colours, shift), want)
    flat = colours.reshape(-1).copy()
    _turn_hue(flat, flat.size // 3, np.int32(shift))
    np.testing.assert_array_equal(flat, want.reshape(-1))


def all_colours(red: range) -> Picture:
    """Every green and blue with the given reds, [len(red) * 256, 256, 3]."""
    grid = np.meshgrid(np.array(red), np.arange(256), np.arange(256), indexing="ij")
    return np.stack(grid, axis=-1).astype(np.uint8).reshape(-1, 256, 3)


def test_color_adjustments_are_those_of_torchvision() -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    for seed in range(6):
        image = picture(31, 29, 3, seed)
        pil = Image.fromarray(image)
        for name in ENHANCERS:
            want = getattr(functional, f"adjust_{name}")(pil, 0.7 + 0.2 * seed)
            np.testing.assert_array_equal(oracle.adjust(name, image, np.float32(0.7 + 0.2 * seed)), np.asarray(want))
        for turn in (-0.5, -0.11, 0.0, 0.2, 0.5):
            want = functional.adjust_hue(pil, turn)
            np.testing.assert_array_equal(oracle.turn_hue(image, math.trunc(turn * 255)), np.asarray(want))


# ---- what the draws do -----------------------------------------------------------------------------------------------


def test_jitter_uses_every_order_about_equally_often() -> None:
    counts: dict[tuple[str, ...], int] = {}
    for sample in range(2400):
        draws = Draws(SEED, 2, sample, EPOCH)
        order = ["b", "c", "s", "h"]
        for i in (3, 2, 1):
            j = draws.below(i, i + 1)
            order[i], order[j] = order[j], order[i]
        counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 24
    assert 60 < min(counts.values()) <= max(counts.values()) < 145


def test_the_order_of_a_jitter_shows_in_the_bytes() -> None:
    image, transform = picture(16, 16, 3, 1), ColorJitter(brightness=0.8, contrast=0.8)
    orders = set()
    for sample in range(12):
        draws = Draws(SEED, 4, sample, EPOCH)
        factors = [np.float32(draws.uniform(d, 0.2, 1.8)) for d in (4, 5)]
        one = oracle.adjust("contrast", oracle.adjust("brightness", image, factors[0]), factors[1])
        other = oracle.adjust("brightness", oracle.adjust("contrast", image, factors[1]), factors[0])
        got = kernel(transform, image, sample)
        assert (got == one).all() or (got == other).all()
        orders.add(bool((got == one).all()))
    assert orders == {True, False}


@pytest.mark.parametrize("transform", [RandomGrayscale, RandomAutocontrast])
@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_grayscale_and_autocontrast_act_by_their_probability(transform: type, p: float, low: int, high: int) -> None:
    image = np.array([[[10, 60, 90], [40, 200, 30]]], np.uint8)
    acted = sum(bool((kernel(transform(p), image, sample) != image).any()) for sample in range(1000))
    assert low <= acted <= high


def test_autocontrast_reaches_black_and_white_and_leaves_a_channel_of_one_value() -> None:
    image = picture(9, 9, 3, 1) // 4 + 30
    image[..., 1] = 77
    got = kernel(RandomAutocontrast(1.0), image, 0)
    assert got.min(axis=(0, 1)).tolist() == [0, 77, 0]
    assert got.max(axis=(0, 1)).tolist() == [255, 77, 255]
    exact = (image[..., 0].astype(float) - image[..., 0].min()) * 255 / np.ptp(image[..., 0])
    assert np.abs(got[..., 0] - exact).max() <= 0.5 + 1e-9


def test_autocontrast_rounds_every_value_of_every_range_to_nearest() -> None:
    for spread in range(1, 256):
        image = np.arange(256 - spread - 1, 256, dtype=np.uint8).reshape(1, -1, 1)
        exact = [math.floor((510 * v + spread) / (2 * spread)) for v in range(spread + 1)]
        assert kernel(RandomAutocontrast(1.0), image, 0).reshape(-1).tolist() == exact


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.3, 6.0, 64.0])
def test_blur_is_a_gaussian_with_repeated_edges(sigma: float) -> None:
    image = picture(30, 41, 3, 2)
    got = kernel(GaussianBlur(sigma, sigma), image, 3)
    radius = math.floor(math.sqrt(-math.log(0.001)) * sigma)
    if radius == 0:
        np.testing.assert_array_equal(got, image)
        return
    bell = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma * sigma))
    bell /= bell.sum()
    exact = image.astype(float)
    for axis in (0, 1):
        around = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        exact = np.apply_along_axis(np.convolve, axis, np.pad(exact, around, mode="edge"), bell, mode="valid")
    assert np.abs(got - exact).max() < (0.52 if sigma < 10 else 1.0)  # half a grey step, and the rounded weights


def test_blur_and_jitter_leave_grey_and_white_pictures_alone() -> None:
    for value in (0, 1, 128, 255):
        image = np.full((20, 20, 3), value, np.uint8)
        np.testing.assert_array_equal(kernel(GaussianBlur(0.4, 40), image, value), image)
        np.testing.assert_array_equal(kernel(ColorJitter(hue=0.5, saturation=2.0), image, value), image)


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 25.5), (7.3, 2.0), (-3.0, 0.4)])
def test_noise_is_normal(mean: float, sigma: float) -> None:
    grey = np.full((200, 200, 3), 128, np.uint8)
    noise = kernel(GaussianNoise(mean, sigma), grey, 5).astype(int) - 128
    steps = np.arange(-110, 111)
    shares = np.diff([0.5 * math.erfc((mean - n - 0.5) / (sigma * math.sqrt(2))) for n in range(-111, 111)])
    expected = shares * noise.size
    seen = np.array([(noise == n).sum() for n in steps])
    often = expected > 20
    chi2 = ((seen - expected)[often] ** 2 / expected[often]).sum()
    assert chi2 < often.sum() + 5 * math.sqrt(2 * often.sum())
    assert abs(noise.mean() - mean) < 5 * sigma / math.sqrt(noise.size) + 1e-3


def test_no_two_values_samples_epochs_or_ops_share_their_noise() -> None:
    grey = np.full((64, 64, 3), 128, np.uint8)
    fields = [
        kernel(GaussianNoise(), grey, sample, op, epoch).astype(float).reshape(-1) - 128
        for sample, op, epoch in ((0, 4, 6), (1, 4, 6), (0, 5, 6), (0, 4, 7), (0, 4, 6 | 1 << 31))
    ]
    correlation = np.corrcoef(fields)
    assert np.abs(correlation - np.eye(5)).max() < 0.05
    one = fields[0]
    assert max(abs(np.corrcoef(one[:-lag], one[lag:])[0, 1]) for lag in (1, 2, 3, 4, 192, 2048)) < 0.05


def test_noise_without_clipping_wraps() -> None:
    white = np.full((50, 50, 1), 250, np.uint8)
    clipped, wrapped = kernel(GaussianNoise(0, 20), white, 1), kernel(GaussianNoise(0, 20, clip=False), white, 1)
    over = clipped == 255
    np.testing.assert_array_equal(clipped[~over], wrapped[~over])
    assert 0.3 < over.mean() < 0.6
    assert (wrapped[over] < 120).mean() > 0.9


def test_the_normal_distribution_is_computed_to_a_few_units_in_the_last_place() -> None:
    for x in np.linspace(-9, 9, 721):
        assert abs(normal_cdf(float(x)) - 0.5 * math.erfc(-x / math.sqrt(2))) < 1e-14


@pytest.mark.parametrize(
    ("mean", "sigma", "clip"), [(0, 25.5, True), (9.5, 1.0, True), (-20, 255, False), (3, 0, True)]
)
def test_look_up_gives_the_number_of_thresholds_not_above_the_word(mean: float, sigma: float, clip: bool) -> None:
    table = normal_steps(mean, sigma, clip)
    limits, first = table[THRESHOLDS:].astype(np.int64), int(table[FIRST_STEP].astype(np.int32))
    words = np.concatenate([limits, limits - 1, [0, 2**32 - 1], np.arange(0, 2**32, 999_983)])
    words = words[(words >= 0) & (words < 2**32)]
    entry = table[words >> 20].astype(np.int64)
    quick = (entry >> 21 & 511) + ((words & 0xFFFFF) >= (entry & 0x1FFFFF))
    exact = first + np.searchsorted(limits, words, side="right")
    easy = (entry & SEARCH) == 0
    assert easy.mean() > 0.5
    modulus = 1 << 32 if clip else 256
    np.testing.assert_array_equal((quick - exact - (256 if clip else 0))[easy] % modulus, 0)
    assert (table[:BUCKETS] & np.uint32(SEARCH) != 0).sum() < BUCKETS // 20
    searched = [_not_above(table[THRESHOLDS:], np.uint32(word)) for word in words[:400]]
    np.testing.assert_array_equal(searched, (exact - first)[:400])


def test_golden_bytes_of_every_op_are_the_same_on_every_machine() -> None:
    image = (np.arange(24 * 32 * 3, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8).reshape(24, 32, 3)
    assert [f"{zlib.crc32(kernel(op, image, 11).tobytes()):08x}" for op in OPS] == GOLDEN


GOLDEN = [
    "ab2395b2",
    "733bc317",
    "0b9b43a3",
    "34a0dab2",
    "0dc391ac",
    "1f02532a",
    "22dc47cc",
    "1f02532a",
    "0b42a319",
    "aefb81d7",
    "b446baa7",
    "757f6ade",
    "6e89a3ce",
    "0383ca7e",
    "7f26409e",
]
"""CRC-32 of what each of OPS makes of the picture."""
