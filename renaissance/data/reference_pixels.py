"""What the pixel ops mean, in plain NumPy: written from docs/recipes.md ("Pixel ops"), not from the kernels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from renaissance.data.reference_draws import Draws
from renaissance.data.transforms import (
    ColorJitter,
    GaussianBlur,
    GaussianNoise,
    RandomAutocontrast,
    RandomGrayscale,
    Transform,
)

Image = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def pixel_op(transform: Transform, image: Image, draws: Draws) -> Image:
    """uint8 [h,w,C] to uint8 [h,w,C]."""
    if isinstance(transform, ColorJitter):
        return jitter(transform, image, draws)
    if isinstance(transform, RandomGrayscale):
        return grey(image) if draws.unit(0) < transform.p else image
    if isinstance(transform, RandomAutocontrast):
        return autocontrast(image) if draws.unit(0) < transform.p else image
    if isinstance(transform, GaussianBlur):
        return blur(image, draws.uniform(0, transform.sigma_min, transform.sigma_max))
    assert isinstance(transform, GaussianNoise)
    return noise(transform, image, draws.noise_words(image.size))


def jitter(transform: ColorJitter, image: Image, draws: Draws) -> Image:
    factors = {name: getattr(transform, name) for name in ("brightness", "contrast", "saturation", "hue")}
    order = [name for name, factor in factors.items() if factor > 0]
    for i in range(len(order) - 1, 0, -1):
        j = draws.below(i, i + 1)
        order[i], order[j] = order[j], order[i]
    names = list(factors)
    for name in order:
        draw, argument = 4 + names.index(name), factors[name]
        if name == "hue":
            image = turn_hue(image, math.trunc(255 * draws.uniform(draw, -argument, argument)))
        else:
            image = adjust(name, image, np.float32(draws.uniform(draw, max(0.0, 1.0 - argument), 1.0 + argument)))
    return image


def adjust(name: str, image: Image, factor: np.float32) -> Image:
    """Brightness, contrast or saturation."""
    if name == "brightness":
        return blend(np.zeros(1, np.int64), image, factor)
    light = luma(image)
    if name == "contrast":
        mean = (2 * int(light.sum()) + light.size) // (2 * light.size)
        return blend(np.full(1, mean), image, factor)
    return blend(light[..., None], image, factor)


def luma(image: Image) -> Ints:
    r, g, b = np.moveaxis(image.astype(np.int64), -1, 0)
    light: Ints = (19595 * r + 38470 * g + 7471 * b + 32768) >> 16
    return light


def blend(base: Ints, image: Image, factor: np.float32) -> Image:
    difference = (image.astype(np.int64) - base).astype(np.float32)
    values = base.astype(np.float32) + factor * difference
    assert values.dtype == np.float32
    clipped: Image = np.trunc(np.clip(values, 0, 255)).astype(np.uint8)
    return clipped


def turn_hue(image: Image, shift: int) -> Image:
    h, s, v = hsv_from_rgb(image)
    return rgb_from_hsv((h + shift) % 256, s, v)


def hsv_from_rgb(image: Image) -> tuple[Ints, Ints, Ints]:
    r, g, b = np.moveaxis(image.astype(np.int64), -1, 0)
    most, least = image.max(axis=-1).astype(np.int64), image.min(axis=-1).astype(np.int64)
    spread = most - least
    some = np.maximum(spread, 1).astype(np.float32)
    rc, gc, bc = (((most - c).astype(np.float32) / some).astype(np.float64) for c in (r, g, b))
    sixths = np.where(r == most, bc - gc, np.where(g == most, 2 + rc - bc, 4 + gc - rc)).astype(np.float32)
    turn = sixths / np.float32(6)
    turn = np.where(turn < 0, turn + np.float32(1), turn)
    hue = np.trunc(turn * np.float32(255)).astype(np.int64)
    saturation = 255 * spread // np.maximum(most, 1)
    return np.where(spread == 0, 0, hue), saturation, most


def rgb_from_hsv(h: Ints, s: Ints, v: Ints) -> Image:
    i, f = 6 * h // 255, 6 * h % 255
    p = nearest(v * (255 - s), 255)
    q = nearest(v * (65025 - s * f), 65025)
    u = nearest(v * (65025 - s * (255 - f)), 65025)
    sectors = [(v, u, p), (q, v, p), (p, v, u), (p, q, v), (u, p, v), (v, p, q)]
    channels = [np.choose(i % 6, [sector[c] for sector in sectors]) for c in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def nearest(numerator: Ints, divisor: int) -> Ints:
    return (2 * numerator + divisor) // (2 * divisor)


def grey(image: Image) -> Image:
    return np.repeat(luma(image)[..., None], 3, axis=-1).astype(np.uint8)


def autocontrast(image: Image) -> Image:
    out = image.copy()
    for c in range(image.shape[2]):
        channel = image[..., c].astype(np.int64)
        least, spread = int(channel.min()), int(channel.max() - channel.min())
        if spread:
            out[..., c] = (510 * (channel - least) + spread) // (2 * spread)
    return out


def blur(image: Image, sigma: float) -> Image:
    radius = math.floor(2.628260884878466 * sigma)
    if radius == 0:
        return image
    bell = [math.exp(-(i * i) / (2 * sigma * sigma)) for i in range(radius + 1)]
    total = 1 + 2 * sum(bell[1:])
    weights = [math.floor(65536 * g / total + 0.5) for g in bell]
    weights[0] = 65536 - 2 * sum(weights[1:])
    height, width = image.shape[:2]

    def around(values: Ints, axis: int, size: int) -> Ints:
        padding = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        padded = np.pad(values, padding, mode="edge")
        shifted = (np.take(padded, range(radius + i, radius + i + size), axis) for i in range(-radius, radius + 1))
        return sum(weights[abs(i)] * v for i, v in zip(range(-radius, radius + 1), shifted, strict=True))  # type: ignore[return-value]

    columns = (around(image.astype(np.int64), 0, height) + 128) >> 8
    return ((around(columns, 1, width) + 8388608) >> 24).astype(np.uint8)


def noise(transform: GaussianNoise, image: Image, words: npt.NDArray[np.uint32]) -> Image:
    mean, sigma = transform.mean, transform.sigma
    if sigma == 0:
        steps = np.full(image.size, math.floor(mean + 0.5))
    else:
        lowest, highest = math.floor(mean - 9 * sigma) - 1, math.ceil(mean + 9 * sigma) + 1
        shares = [0.5 * math.erfc(-(n + 0.5 - mean) / (sigma * math.sqrt(2))) for n in range(lowest, highest)]
        limits = np.array([math.floor(2**32 * share + 0.5) for share in shares], np.int64)
        steps = lowest + np.searchsorted(limits, words.astype(np.int64), side="right")
    values: Ints = image.astype(np.int64) + steps.reshape(image.shape)
    return np.asarray(np.clip(values, 0, 255) if transform.clip else values % 256, np.uint8)
