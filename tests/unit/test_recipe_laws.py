"""Law 1 for samples: bytes are a function of (stored bytes, recipe, seed, epoch, sample id), and of nothing else."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from recipe_cases import MNIST_CHAIN, SEED, expected, pictures, pixels_of, rows

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data import reference
from renaissance.data.compile import compile_recipe
from renaissance.data.recipe import Recipe
from renaissance.data.transforms import (
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
)

MNIST_FILE = Path(__file__).parents[2] / "data" / "mnist" / "t10k-images-idx3-ubyte.gz"
RECIPE = Recipe.build([*MNIST_CHAIN, RandomHorizontalFlip()], NormMode.MNIST, 28, 1)
IMAGES = pictures(40, 28, 28, 1, border=3)
ALL = list(range(40))


def test_bytes_do_not_depend_on_the_split_or_the_order_of_calls() -> None:
    whole, hashes = rows(RECIPE, IMAGES, ALL, dtype=DType.BF16)
    for workers in (2, 3, 7):
        for worker in reversed(range(workers)):
            share = ALL[worker::workers][::-1]
            got, got_hashes = rows(RECIPE, IMAGES, share, dtype=DType.BF16)
            np.testing.assert_array_equal(got, whole[share])
            np.testing.assert_array_equal(got_hashes, hashes[share])


def test_threads_may_share_a_compiled_recipe() -> None:
    compiled = compile_recipe(RECIPE, 28, 28, 1)
    whole, _ = rows(RECIPE, IMAGES, ALL, dtype=DType.FP32)
    out, hashes = np.zeros_like(whole), np.zeros(40, np.uint64)

    def share(worker: int) -> None:
        at = np.arange(worker, 40, 4)
        for _ in range(10):
            compiled.process(IMAGES, at, at, SEED, 3, False, out, at, hashes)

    threads = [Thread(target=share, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(out, whole)


def test_a_picture_from_elsewhere_is_made_with_the_draws_of_the_sample() -> None:
    compiled = compile_recipe(RECIPE, 28, 28, 1)
    out, hashes, row = np.zeros((1, compiled.row_bytes), np.uint8), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    compiled.process(IMAGES[17:18].copy(), np.array([0]), np.array([17]), SEED, 3, False, out, row, hashes)
    np.testing.assert_array_equal(out, rows(RECIPE, IMAGES, [17], dtype=DType.FP32)[0])
    compiled.process(IMAGES, np.array([-1]), np.array([17]), SEED, 3, False, out, row, hashes)
    assert not out.any()


def test_read_only_images_give_the_same_bytes() -> None:
    frozen = IMAGES.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(
        rows(RECIPE, frozen, ALL, dtype=DType.FP32)[0], rows(RECIPE, IMAGES, ALL, dtype=DType.FP32)[0]
    )


def test_another_seed_epoch_or_id_gives_other_bytes() -> None:
    same = pictures(1, 28, 28, 1).repeat(3, axis=0)
    base = rows(RECIPE, same, [0, 1, 2], dtype=DType.FP32)[0]
    assert len({row.tobytes() for row in base}) == 3
    for change in ({"seed": SEED + 1}, {"seed": SEED ^ (1 << 40)}, {"epoch": 4}):
        assert (rows(RECIPE, same, [0, 1, 2], dtype=DType.FP32, **change)[0] != base).any(axis=1).all()


def test_draws_of_a_transform_do_not_depend_on_the_other_transforms() -> None:
    images = pictures(8, 16, 16, 1)
    ids = list(range(8))
    alone = rows(pixels_of([RandomCrop(16), RandomRotation(40)], 16, 1), images, ids)[0]
    erasing_off = rows(pixels_of([RandomCrop(16), RandomRotation(40), RandomErasing(0.0)], 16, 1), images, ids)[0]
    other_kind = rows(pixels_of([Pad(0), RandomRotation(40), RandomScale(1, 1)], 16, 1), images, ids)[0]
    np.testing.assert_array_equal(alone, erasing_off)
    np.testing.assert_array_equal(alone, other_kind)
    moved = rows(pixels_of([RandomRotation(40)], 16, 1), images, ids)[0]
    assert (moved != alone).any(), "the op index is part of the counter"


def test_the_place_of_a_record_only_transform_moves_only_its_own_draws() -> None:
    images = np.full((64, 12, 12, 1), 255, np.uint8)
    ids = list(range(64))
    first = rows(pixels_of([RandomErasing(0.5), RandomCrop(12)], 12, 1), images, ids)[0]
    last = rows(pixels_of([RandomCrop(12), RandomErasing(0.5)], 12, 1), images, ids)[0]
    assert (first != last).any()
    assert 10 < int((first == 0).any(axis=1).sum()) < 54
    assert 10 < int((last == 0).any(axis=1).sum()) < 54


@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 0, 0), (0.25, 200, 300), (0.5, 440, 560), (1.0, 1000, 1000)])
def test_flip_and_erase_act_by_their_probability(p: float, low: int, high: int) -> None:
    images = np.zeros((1000, 4, 4, 1), np.uint8)
    images[:, :, 0] = 255
    ids = list(range(1000))
    flipped = rows(pixels_of([RandomHorizontalFlip(p)], 4, 1), images, ids)[0].reshape(1000, 4, 4)
    assert low <= int((flipped[:, 0, 3] == 255).sum()) <= high
    images = np.full((1000, 12, 12, 1), 255, np.uint8)
    erased = rows(pixels_of([RandomErasing(p)], 12, 1), images, ids)[0]
    assert low <= int((erased == 0).any(axis=1).sum()) <= high


def test_crops_reach_every_place_about_equally_often() -> None:
    images = np.arange(36, dtype=np.uint8).reshape(1, 6, 6, 1).repeat(3600, axis=0)
    got = rows(pixels_of([RandomCrop(3)], 3, 1), images, list(range(3600)))[0]
    counts = np.bincount(got[:, 0], minlength=36).reshape(6, 6)
    assert (counts[4:] == 0).all()
    assert (counts[:, 4:] == 0).all()
    assert counts[:4, :4].min() > 160
    assert counts[:4, :4].max() < 290


def test_angles_and_ratios_cover_their_range_evenly() -> None:
    draws = [reference.Draws(SEED, 2, sample, 5) for sample in range(4000)]
    angles = np.array([d.uniform(0, -20, 20) for d in draws])
    assert angles.min() < -19.9
    assert angles.max() > 19.9
    assert abs(angles.mean()) < 0.6
    rx, ry = (np.array([d.uniform(k, 0.8, 1.2) for d in draws]) for k in (0, 1))
    assert abs(np.corrcoef(rx, ry)[0, 1]) < 0.05
    counts, _ = np.histogram(rx, bins=10, range=(0.8, 1.2))
    assert counts.min() > 320


def test_erased_rectangles_follow_area_and_ratio() -> None:
    images = np.full((400, 28, 28, 1), 255, np.uint8)
    got = rows(pixels_of([RandomErasing(1.0)], 28, 1), images, list(range(400)))[0].reshape(400, 28, 28) == 0
    heights, widths = got.any(axis=2).sum(axis=1), got.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(got.sum(axis=(1, 2)), heights * widths)
    assert heights.min() >= 1
    assert max(heights.max(), widths.max()) < 28
    share = heights * widths / 784
    assert 0.01 < share.min() < 0.05
    assert 0.28 < share.max() < 0.36
    assert 0.4 < (heights > widths).mean() < 0.6


def test_golden_samples_of_mnist_are_the_same_on_every_machine() -> None:
    raw = gzip.decompress(MNIST_FILE.read_bytes())
    images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28, 1)
    got = {}
    for dtype in (DType.FP32, DType.FP16, DType.BF16):
        out, hashes = rows(RECIPE, images, list(range(1000)), seed=123, epoch=7, dtype=dtype)
        got[dtype.name] = hashlib.sha256(out.tobytes()).hexdigest()[:32], f"{int(hashes[0]):016x}"
        np.testing.assert_array_equal(hashes[:2], rows(RECIPE, images, [0, 1], seed=123, epoch=7, dtype=dtype)[1])
    assert got == GOLDEN
    np.testing.assert_array_equal(
        rows(RECIPE, images, ALL, dtype=DType.FP32)[0], expected(RECIPE, images, ALL, DType.FP32)
    )


GOLDEN = {
    "FP32": ("f4d061441101ca2566f18edfe6bc5a4d", "6410b140959d84ff"),
    "FP16": ("a85db65450e24be1deb0f2a81f3e3687", "6a18d321e2a2defc"),
    "BF16": ("5f4d808fe4510db244c23ba1efd0d826", "3bc88a8d8f66340f"),
}
"""SHA-256 (first half) of the rows of test samples 0 to 999 with seed 123, epoch 7; XXH64 of the first row."""
