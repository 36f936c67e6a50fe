"""Pictures of any size: the resize is Pillow's, what is written is the table's, and nothing but the sample decides."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from renaissance.core.digest import xxh64
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.core.errors import CorruptSample, DTypeError, ShapeError, ValueRejected
from renaissance.data import reference
from renaissance.data.compile import compile_recipe, pixel_table
from renaissance.data.finish import STREAMED, TABLE, line_constants, write_values
from renaissance.data.jpeg import Decoder, read_header
from renaissance.data.pictures import PictureRecipe, compile_pictures
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.sources.spec import Encoding
from renaissance.data.steps import Cut, Scratch, frozen, plain_style, resample
from renaissance.data.transforms import (
    CenterCrop,
    ColorJitter,
    FastRandomResizedCrop,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
)

Bytes = npt.NDArray[np.uint8]
SEED = 77
RRC = (RandomResizedCrop(40), RandomHorizontalFlip())


def picture(height: int, width: int, channels: int = 3, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def photo(height: int, width: int) -> Bytes:
    """Smooth, as photographs are, so that JPEG does something sensible with it."""
    y, x = np.mgrid[0:height, 0:width] / 17.0
    waves = [np.sin(x + y * k) + np.cos(y - x * k / 2) for k in (0.3, 0.7, 1.1)]
    return (np.stack(waves, 2) * 60 + 128).astype(np.uint8)


def raw(image: Bytes) -> Bytes:
    return np.frombuffer(struct.pack("<II", image.shape[1], image.shape[0]) + image.tobytes(), np.uint8)


def jpeg(image: Bytes, **options: object) -> Bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=92, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def made(compiled: PictureRecipe, stored: Bytes, encoding: Encoding, sample: int = 5, epoch: int = 2) -> Bytes:
    row = np.full(compiled.row_bytes, 0xA5, np.uint8)
    digest = compiled.make(stored, encoding, sample, SEED, epoch, False, row)
    assert digest == int(xxh64(row))
    return row


def pillow(image: Bytes, box: tuple[float, float, float, float], size: int) -> Bytes:
    """Pillow's two passes, columns first, whatever order a version of Pillow prefers."""
    height = image.shape[0]
    whole = Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])
    columns = whole.resize((size, height), Image.Resampling.BILINEAR, (box[0], 0, box[2], height))
    both = columns.resize((size, size), Image.Resampling.BILINEAR, (0, box[1], size, box[3]))
    return np.asarray(both).reshape(size, size, -1)


@pytest.mark.parametrize("vectors", [True, False])
def test_resize_is_pillows_bit_for_bit_with_vectors_and_without(vectors: bool) -> None:
    rng = random.Random(4)
    scratch = Scratch()
    for _ in range(60):
        h, w, c = rng.randrange(1, 300), rng.randrange(1, 300), rng.choice([1, 3])
        size = rng.choice([1, 3, 16, 33, 96])
        image = picture(h, w, c, seed=h)
        box = (0.0, 0.0, float(w), float(h))
        if rng.random() < 0.5:  # fractions of an eighth, as scaled decoding makes them
            box = (rng.randrange(w * 4) / 8, rng.randrange(h * 4) / 8, w - rng.randrange(8) / 16, float(h))
        out = np.zeros(size * size * c, np.uint8)
        high = w * c if vectors else min(w * c, 63)  # fewer bytes than a window sees: the plain loops are taken
        cut = Cut(frozen(image), 0, w * c, w, h, 0, high)
        window = 0, 0, size, size
        digest = resample(cut, box, size, window, plain_style(c), (out, out), scratch)
        assert digest == int(xxh64(out))
        np.testing.assert_array_equal(out.reshape(size, size, c), pillow(image, box, size), err_msg=f"{h} {w} {box}")


def test_a_window_of_a_resize_is_the_same_part_of_all_of_it() -> None:
    image = picture(90, 130)
    cut = Cut(frozen(image), 0, 390, 130, 90, 0, 390)
    whole = pillow(image, (0, 0, 130, 90), 64)
    for window in ((0, 0, 64, 64), (7, 9, 33, 20), (63, 63, 1, 1)):
        x, y, w, h = window
        out = np.zeros(w * h * 3, np.uint8)
        resample(cut, (0.0, 0.0, 130.0, 90.0), 64, window, plain_style(3), (out, out), Scratch())
        np.testing.assert_array_equal(out.reshape(h, w, 3), whole[y : y + h, x : x + w])


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_arithmetic_gives_the_very_bits_of_the_table(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    norms = [Normalization.preset(mode, 3) for mode in NormMode if mode is not NormMode.MNIST]
    norms += [Normalization(tuple(rng.uniform(-0.2, 1, 3)), tuple(rng.uniform(0.01, 1.5, 3))) for _ in range(12)]
    pixels = np.arange(256, dtype=np.uint8).repeat(3)
    for norm in norms:
        table = pixel_table(norm, dtype)
        kind, constants = line_constants(norm.mean, norm.std, table, dtype, 3)
        assert kind != TABLE, f"{norm} falls back to the table"
        for n in (768, 24):  # whole vectors, and a last one that overlaps
            got = np.zeros(n, table.dtype)
            write_values(pixels, 0, n, constants, kind, table, 3, 3, got, 0)
            np.testing.assert_array_equal(got.reshape(-1, 3), table.T[: n // 3])


def test_a_normalization_that_arithmetic_cannot_match_is_looked_up() -> None:
    norm = Normalization((0.1, 0.5, 1e30), (0.2, 0.5, 1.0))
    table = pixel_table(norm, DType.FP32)
    assert line_constants(norm.mean, norm.std, table, DType.FP32, 5)[0] == TABLE, "5 channels have no period"
    recipe = Recipe.build([RandomResizedCrop(8)], norm, 8, 3)
    image = picture(20, 30)
    for padded in (3, 5):
        got = made(compile_pictures(recipe, DType.FP32, padded), raw(image), Encoding.RAW)
        np.testing.assert_array_equal(got, reference.row(recipe, image, 5, SEED, 2, DType.FP32, padded))


@pytest.mark.parametrize(("dtype", "size"), [(DType.FP32, 160), (DType.BF16, 224), (DType.FP16, 224)])
def test_rows_written_past_the_caches_have_the_same_bytes_and_hash(dtype: DType, size: int) -> None:
    chain = [RandomResizedCrop(size), RandomErasing(1.0), RandomHorizontalFlip(1.0)]
    recipe = Recipe.build(chain, NormMode.CIFAR, size)
    compiled = compile_pictures(recipe, dtype)
    assert compiled.row_bytes >= STREAMED
    memory = np.zeros(compiled.row_bytes + 128, np.uint8)
    aligned = -memory.ctypes.data % 64
    for sample, image in enumerate((picture(250, 300), picture(700, 900), picture(100, 90))):
        want = reference.row(recipe, image, sample, SEED, 2, dtype)
        for begin in (aligned, aligned + 4):
            row = memory[begin : begin + compiled.row_bytes]
            row[:] = 0xA5
            digest = compiled.make(raw(image), Encoding.RAW, sample, SEED, 2, False, row)
            np.testing.assert_array_equal(row, want)
            assert digest == int(xxh64(want))


@pytest.mark.parametrize("mode", ["exact", "scaled", "fast"])
def test_every_decode_mode_gives_the_bytes_of_a_whole_decode_at_its_scale(mode: str) -> None:
    image = photo(300, 420)
    stored = jpeg(image, subsampling=2)
    header = read_header(stored)

    def decoded(f: int, fast: bool = mode == "fast") -> Bytes:
        return Decoder().decode(stored, header, None, f, fast).pixels

    wide = RandomResizedCrop(40, (0.5, 1.0))
    for first, *crops in (
        [wide],
        [RandomResizedCrop(100)],
        [RandomCrop(90)],
        [Resize(36), CenterCrop(20)],  # what lies outside the crop's window need not be decoded
        [wide, RandomCrop(31), RandomCrop(7)],
        [RandomResizedCrop(400, (0.1, 0.2)), CenterCrop(5)],
    ):
        chain = [first, *crops, RandomHorizontalFlip()]
        recipe = Recipe.build(chain, NormMode.NO_NORM, chain[-2].size, 3, decode=mode)  # type: ignore[union-attr]
        compiled = compile_pictures(recipe, DType.UINT8)
        for sample in range(4):
            want = reference.row(recipe, decoded(1), sample, SEED, 2, DType.UINT8, scaled=decoded)
            np.testing.assert_array_equal(made(compiled, stored, Encoding.PICTURES, sample), want, err_msg=str(first))


def test_fast_crops_decode_as_in_mode_fast_and_raw_pixels_need_no_decoding() -> None:
    image = photo(120, 150)
    stored = jpeg(image)
    fast = compile_pictures(Recipe.build([FastRandomResizedCrop(30)], NormMode.NO_NORM, 30), DType.UINT8)
    slow = compile_pictures(Recipe.build([RandomResizedCrop(30)], NormMode.NO_NORM, 30, decode="fast"), DType.UINT8)
    np.testing.assert_array_equal(made(fast, stored, Encoding.PICTURES), made(slow, stored, Encoding.PICTURES))
    np.testing.assert_array_equal(made(fast, raw(image), Encoding.RAW), made(slow, raw(image), Encoding.RAW))


def test_grey_and_cmyk_pictures_are_delivered_as_pillow_converts_them() -> None:
    recipe = Recipe.build([CenterCrop(70)], NormMode.NO_NORM, 70, 3)
    compiled = compile_pictures(recipe, DType.UINT8, 4)
    for mode in ("L", "CMYK"):
        file = io.BytesIO()
        Image.fromarray(photo(50, 90)).convert(mode).save(file, "JPEG")
        whole = np.asarray(Image.open(file).convert("RGB"))
        got = made(compiled, np.frombuffer(file.getvalue(), np.uint8), Encoding.PICTURES)
        np.testing.assert_array_equal(got, reference.row(recipe, whole, 5, SEED, 2, DType.UINT8, 4))


def test_bytes_do_not_depend_on_what_was_made_before() -> None:
    chain = [RandomResizedCrop(40), ColorJitter(0.4, 0.4, 0.4, 0.1), Pad(2), RandomRotation(10), RandomCrop(40)]
    recipe = Recipe.build(chain, NormMode.IMAGENET, 40, 3)
    images = [picture(h, w, seed=h) for h, w in ((30, 400), (500, 20), (1, 1), (64, 64), (600, 700))]
    alone = [made(compile_pictures(recipe, DType.BF16), raw(image), Encoding.RAW, k) for k, image in enumerate(images)]
    one = compile_pictures(recipe, DType.BF16)
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (2, 2, 1, 4, 0)):
        for k in order:
            np.testing.assert_array_equal(made(one, raw(images[k]), Encoding.RAW, k), alone[k])


def test_scratch_stops_growing() -> None:
    compiled = compile_pictures(Recipe.build(RRC, NormMode.IMAGENET, 40, 3))
    stored = [raw(picture(h, w, seed=h)) for h, w in ((300, 200), (200, 300), (50, 60))]
    sizes = []
    for round_ in range(6):
        for sample in range(30):
            made(compiled, stored[sample % 3], Encoding.RAW, sample, epoch=round_)
        sizes.append(compiled.scratch_bytes)
    assert sizes[-1] == sizes[2]
    assert sizes[-1] < 4 << 20


@pytest.mark.parametrize(
    ("stored", "encoding", "says"),
    [
        (np.zeros(5, np.uint8), Encoding.RAW, "5 bytes; expected at least 8"),
        (raw(picture(2, 3))[:-1], Encoding.RAW, "25 bytes for 3x2 pixels; expected 26"),
        (np.frombuffer(struct.pack("<II", 0, 4), np.uint8), Encoding.RAW, "0x4 pixels at offset 0"),
        (np.frombuffer(struct.pack("<II", 1 << 31, 1 << 31), np.uint8), Encoding.RAW, "at most"),
        (jpeg(photo(40, 40))[:300], Encoding.PICTURES, "JPEG|stream"),
        (np.zeros(100, np.uint8), Encoding.PICTURES, "not a picture"),
    ],
)
def test_a_damaged_sample_is_refused_as_such(stored: Bytes, encoding: Encoding, says: str) -> None:
    compiled = compile_pictures(Recipe.build(RRC, NormMode.IMAGENET, 40, 3))
    with pytest.raises(CorruptSample, match=says):
        made(compiled, stored, encoding)
    np.testing.assert_array_equal(  # and the next one is not affected
        made(compiled, raw(picture(50, 50)), Encoding.RAW),
        made(compile_pictures(compiled.recipe), raw(picture(50, 50)), Encoding.RAW),
    )


def test_arguments_that_do_not_fit_are_refused_and_not_blamed_on_the_sample() -> None:
    compiled = compile_pictures(Recipe.build(RRC, NormMode.IMAGENET, 40, 3))
    row, good = np.zeros(compiled.row_bytes, np.uint8), raw(picture(50, 50))
    for stored, out, sample, seed, validation, error, says in (
        (good, row[1:], 0, 1, False, ShapeError, "out_row"),
        (good.view(np.int8), row, 0, 1, False, DTypeError, "stored is int8"),
        (good, row, -1, 1, False, ValueRejected, "sample_id is -1"),
        (good, row, 0, 1 << 64, False, ValueRejected, "seed is"),
        (good, row, 0, 1, True, ValueRejected, "draws random numbers"),
    ):
        with pytest.raises(error, match=says):
            compiled.make(stored, Encoding.RAW, sample, seed, 0, validation, out)  # type: ignore[arg-type]
    with pytest.raises(ValueRejected, match="encoding is"):
        compiled.make(good, Encoding.PIXELS, 0, 1, 0, False, row)
    with pytest.raises(ShapeError, match="pictures have 3 channels, the recipe 1"):
        compile_pictures(Recipe.build([Resize(8)], NormMode.MNIST, 8, 1))
    with pytest.raises(ShapeError, match="padded_channels is 2"):
        compile_pictures(Recipe.build([Resize(8)], NormMode.CIFAR, 8, 3), DType.FP32, 2)
    with pytest.raises(ValueRejected, match="comes first"):
        compile_pictures(Recipe.build([Pad(2), RandomCrop(8)], NormMode.CIFAR, 8, 3))


def test_a_chain_of_steps_checks_positions_and_blanks_rows_like_a_fused_one() -> None:
    recipe = Recipe.build([Resize(12), ColorJitter(0.3)], NormMode.CIFAR, 12, 3)
    compiled = compile_recipe(recipe, 16, 16, 3)
    images = np.stack([picture(16, 16, seed=k) for k in range(3)])
    out, hashes = np.full((3, compiled.row_bytes), 7, np.uint8), np.zeros(3, np.uint64)
    at, rows = np.array([2, -1]), np.array([0, 2])
    with pytest.raises(ValueRejected, match="position 0 asks for picture 3 of 3"):
        compiled.process(images, at + 1, at + 4, SEED, 2, False, out, rows, hashes)
    assert (out == 7).all(), "nothing may be written when a position is out of range"
    compiled.process(images, at, np.array([9, 9]), SEED, 2, False, out, rows, hashes)
    np.testing.assert_array_equal(out[0], reference.row(recipe, images[2], 9, SEED, 2))
    assert (out[1] == 7).all()
    assert not out[2].any()
    assert [int(h) for h in hashes] == [int(xxh64(out[0])), 0, int(xxh64(out[2]))]
