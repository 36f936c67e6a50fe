"""Full and scaled decoding: the bytes are Pillow's, damage is named, and no pixel of an earlier picture is seen."""

from __future__ import annotations

import io
import struct

import jpeg_pictures as pictures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renaissance.core.errors import CorruptSample, ValueRejected
from renaissance.data.formats.imagenet_encode import Making, make_picture
from renaissance.data.jpeg import Decoder, decoder_identity, read_header
from renaissance.data.jpeg.decoder import SCRATCH_KEPT, uses_turbo

ARITHMETIC = bytes.fromhex(  # 13 x 11, 4:2:0, made with cjpeg -arithmetic -quality 30: no wheel writes such files
    "ffd8ffe000104a46494600010100000100010000ffdb0043001b12141714111b1716171e1c1b2028422b28252528513a3d30426055"
    "65645f555d5b6a7899816a7190735b5d85b586909ea3abadab6780bcc9baa6c799a8aba4ffdb0043011c1e1e2823284e2b2b4ea46e"
    "5d6ea4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4a4ff"
    "c9001108000b000d03012200021101031101ffcc000a0010100501101105ffda000c03010002110311003f00ad31f0893b340b6647"
    "d44857a8bc416fa48dfde0593f8e4674d65377ae5c4354ddbada17ffd9"
)


def decoded(stored: pictures.Bytes, denominator: int = 1, fast: bool = False) -> pictures.Bytes:
    return Decoder().decode(stored, read_header(stored), None, denominator, fast).pixels


def drafted(stored: pictures.Bytes, denominator: int) -> pictures.Bytes:
    with Image.open(io.BytesIO(stored.tobytes())) as picture:
        picture.draft(None, (picture.width // denominator, picture.height // denominator))
        return np.asarray(picture.convert("RGB"))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True, "quality": 97}, {"quality": 5}])
@pytest.mark.parametrize("sampling", pictures.SAMPLINGS)
def test_jpeg_bytes_are_pillows_at_every_scale(sampling: str, options: dict[str, int]) -> None:
    stored = pictures.jpeg(83, 61, sampling, **options)
    assert uses_turbo(read_header(stored))
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))
    for denominator in (2, 4, 8):
        pixels = decoded(stored, denominator)
        assert pixels.shape == (-(-61 // denominator), -(-83 // denominator), 3)
        assert np.array_equal(pixels, drafted(stored, denominator))


@pytest.mark.parametrize("transform", [0, 2])
def test_cmyk_and_ycck_follow_pillows_rule(transform: int) -> None:
    stored = pictures.cmyk(45, 33, transform)
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))
    assert np.array_equal(decoded(stored, 2), drafted(stored, 2))


def test_arithmetic_coding_is_decoded() -> None:
    stored = np.frombuffer(ARITHMETIC, np.uint8)
    assert read_header(stored).arithmetic
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))


def test_a_sampling_that_turbojpeg_refuses_is_decoded_by_pillow() -> None:
    stored = pictures.jpeg(40, 24, "4:2:2")
    frame = pictures.frame_offset(stored)
    odd = pictures.patched(stored, frame + 14, b"\x21")  # the first chroma component as wide as the luminance
    odd = pictures.patched(odd, frame + 5, b"\0\x08\0\x10")  # fewer pixels, so that the data are enough
    assert not uses_turbo(read_header(odd))
    assert decoded(odd).shape == (8, 16, 3)


def test_rgb_jpeg_is_not_converted() -> None:
    stored = pictures.jpeg(40, 30, "4:4:4", keep_rgb=True)
    assert read_header(stored).color == "rgb"
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))


def test_grey_is_replicated() -> None:
    pixels = decoded(pictures.jpeg(30, 20, "gray"))
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 1])
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 2])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png_in_disguise_is_pillows_rgb(mode: str) -> None:
    stored = pictures.encoded(pictures.scene(31, 17), "PNG", mode)
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))
    assert decoded(stored, 4).shape == (5, 8, 3)


@pytest.mark.parametrize(("mode", "key"), [("P", b"\0\x80\xff"), ("P", 3), ("RGB", (1, 2, 3)), ("L", 7)])
def test_transparency_is_dropped_without_a_warning(mode: str, key: object) -> None:
    plain = pictures.encoded(pictures.scene(31, 17), "PNG", mode)
    keyed = pictures.encoded(pictures.scene(31, 17), "PNG", mode, transparency=key)
    assert np.array_equal(decoded(keyed), decoded(plain))


def test_alpha_is_dropped_not_composited() -> None:
    rgba = np.dstack([pictures.scene(20, 20), np.zeros((20, 20), np.uint8)])
    assert np.array_equal(decoded(pictures.encoded(rgba, "PNG")), rgba[:, :, :3])


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    pixels = decoded(pictures.encoded(values, "PNG"))
    assert np.array_equal(pixels, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, 2))


def test_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = pictures.jpeg(40, 20, exif=exif.tobytes())
    assert read_header(stored).orientation == 6
    assert np.array_equal(decoded(stored), decoded(pictures.jpeg(40, 20)))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 2), (7, 7), (1, 9), (5000, 1), (1, 5000), (17, 2)])
@pytest.mark.parametrize("sampling", ["4:2:0", "4:2:2", "gray"])
def test_tiny_and_very_long_pictures(width: int, height: int, sampling: str) -> None:
    stored = pictures.jpeg(width, height, sampling)
    assert np.array_equal(decoded(stored), pictures.by_pillow(stored))
    for denominator in (2, 4, 8):
        assert decoded(stored, denominator).shape == (-(-height // denominator), -(-width // denominator), 3)


def test_fast_mode_is_another_decode_and_close() -> None:
    stored = pictures.jpeg(120, 90, "4:2:0", quality=90)
    exact, fast = decoded(stored).astype(int), decoded(stored, 1, True).astype(int)
    assert not np.array_equal(exact, fast)
    assert np.abs(exact - fast).mean() < 8


@pytest.mark.parametrize("denominator", [0, 3, 16])
def test_other_denominators_are_refused(denominator: int) -> None:
    with pytest.raises(ValueRejected, match="denominator"):
        decoded(pictures.jpeg(20, 20), denominator)


@pytest.mark.parametrize(("width", "height", "denominator"), [(3, 40, 4), (40, 7, 8), (1, 1, 2), (5, 5, 8)])
def test_a_cmyk_picture_narrower_than_the_denominator_is_averaged(width: int, height: int, denominator: int) -> None:
    stored = pictures.cmyk(width, height, 0)
    with Image.open(io.BytesIO(stored.tobytes())) as picture:
        expected = np.asarray(picture.convert("RGB").reduce(denominator))
    assert np.array_equal(decoded(stored, denominator), expected)


def test_damaged_metadata_of_a_good_picture_are_no_warning() -> None:
    good = pictures.cmyk(24, 16, 0).tobytes()
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"  # a directory of five entries that ends amid the first
    stored = good[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + good[2:]
    with pytest.warns(UserWarning, match="Corrupt EXIF"), Image.open(io.BytesIO(stored)):
        pass
    pixels = decoded(np.frombuffer(stored, np.uint8))  # warnings are errors here
    assert np.array_equal(pixels, decoded(np.frombuffer(good, np.uint8)))
    assert make_picture(stored, Making(1)).stored == make_picture(good, Making(1)).stored


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "cmyk", "png"])
def test_a_truncated_picture_is_named_and_shows_nothing_of_the_one_before(kind: str) -> None:
    first = pictures.jpeg(90, 70, seed=5)
    second = {
        "jpeg": lambda: pictures.jpeg(90, 70, quality=90),
        "progressive": lambda: pictures.jpeg(90, 70, progressive=True),
        "cmyk": lambda: pictures.cmyk(90, 70, 0),
        "png": lambda: pictures.encoded(pictures.scene(90, 70), "PNG"),
    }[kind]()
    header = read_header(second)
    decoder = Decoder()
    for share in (0.3, 0.6, 0.9):
        decoder.decode(first, read_header(first))
        cut = second[: int(len(second) * share)].copy()
        with pytest.raises(CorruptSample):
            decoder.decode(cut, header)
    assert np.array_equal(decoder.decode(second, header).pixels, pictures.by_pillow(second))


def test_damaged_entropy_data_are_named() -> None:
    stored = pictures.jpeg(90, 70)
    start = read_header(stored).scan_start
    with pytest.raises(CorruptSample, match="damaged"):
        decoded(pictures.patched(stored, start + 300, b"\xff\xd3"))
    with pytest.raises(CorruptSample, match="damaged"):
        decoded(pictures.inserted(stored, len(stored) - 2, b"\x12\x34" * 20))


def test_scratch_grows_to_the_largest_picture_and_not_beyond_its_bound() -> None:
    decoder = Decoder()
    stored = pictures.encoded(np.zeros((2000, 3000, 3), np.uint8))
    decoder.decode(stored, read_header(stored))
    assert 18_000_000 <= decoder.scratch_bytes <= SCRATCH_KEPT
    kept = decoder.scratch_bytes
    small = pictures.jpeg(90, 70)
    decoder.decode(small, read_header(small))
    assert decoder.scratch_bytes == kept
    huge = pictures.encoded(np.zeros((4000, 4000), np.uint8))
    assert decoder.decode(huge, read_header(huge)).pixels.nbytes > SCRATCH_KEPT
    assert decoder.scratch_bytes == kept


def test_identity_names_both_decoders_and_their_versions() -> None:
    assert decoder_identity().startswith("simplejpeg ")
    assert "Pillow " in decoder_identity()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_fuzzed_pictures_are_decoded_or_named(data: st.DataObject) -> None:
    kind = data.draw(st.integers(0, 3))
    stored = [
        pictures.jpeg(40, 30, restart_marker_blocks=2),
        pictures.jpeg(40, 30, progressive=True),
        pictures.cmyk(24, 16, 2),
        pictures.encoded(pictures.scene(24, 16), "PNG", "P"),
    ][kind].copy()
    for _ in range(data.draw(st.integers(1, 8))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stored = stored[: data.draw(st.integers(len(stored) // 2, len(stored)))]
    denominator = data.draw(st.sampled_from([1, 2, 8]))
    try:
        header = read_header(stored, 1 << 20)
        window = (header.width // 3, header.height // 3, header.width // 3 + 1, header.height // 3 + 1)
        part = Decoder().decode(stored, header, data.draw(st.sampled_from([None, window])), denominator)
    except CorruptSample:
        return
    assert part.pixels.dtype == np.uint8
    assert part.pixels.shape[2] == 3
