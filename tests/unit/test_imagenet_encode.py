"""The levels: sizes, cuts, quality and modes of spec/data 1.7, against Pillow called as the specification says."""

import errno
import io
import os
import struct

import numpy as np
import pytest
from picture_trees import encoded, picture
from PIL import Image

from renaissance.core.errors import CorruptSample, RenaissanceError
from renaissance.data.formats import imagenet_encode
from renaissance.data.formats.imagenet_encode import Making, Refused, make_chunk, make_from_file, make_picture
from renaissance.data.jpeg import read_header

# (width, height) -> the size that level 1 and level 2 store
SIZES = {
    (100, 80): ((100, 80), (100, 80)),  # nothing is enlarged
    (400, 300): ((400, 300), (400, 300)),
    (700, 400): ((700, 400), (600, 400)),  # only cut, by level 2
    (400, 700): ((400, 700), (400, 600)),
    (401, 500): ((400, 498), (400, 500)),  # level 1 scales above 400, level 2 above 440; 498 is a truncation
    (440, 440): ((400, 400), (400, 440)),  # scaled by level 1, cut by level 2; a square is cut like a portrait
    (500, 440): ((454, 400), (500, 400)),
    (441, 441): ((400, 400), (400, 400)),
    (500, 441): ((453, 400), (453, 400)),
    (900, 450): ((800, 400), (600, 400)),
    (539, 600): ((399, 445), (399, 445)),  # the short sides that double precision makes 399
    (578, 578): ((399, 399), (399, 399)),
    (800, 607): ((527, 399), (527, 399)),
    (610, 700): ((399, 459), (399, 459)),
    (644, 1300): ((399, 807), (399, 600)),
}


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """Grey pixels that every test cuts its picture out of."""
    return np.random.default_rng(1).integers(0, 256, (1400, 1000), dtype=np.uint8)


@pytest.mark.parametrize("size", list(SIZES))
def test_sizes_follow_the_rules(noise, size):
    source = encoded(Image.fromarray(noise[: size[1], : size[0]]), quality=50)
    for level, expected in zip((1, 2, 3), (*SIZES[size], SIZES[size][1]), strict=True):
        made = make_picture(source, Making(level))
        stored = Image.open(io.BytesIO(made.stored))
        assert stored.size == (made.width, made.height) == expected
        assert (stored.format, stored.mode) == ("JPEG", "L")


def by_pillow(source: bytes, level: int) -> bytes:
    """Spec/data 1.7 for a picture of any size, written out without our code."""
    image = Image.open(io.BytesIO(source))
    w, h = image.size
    if min(w, h) > (400 if level == 1 else 440):
        scale = 400 / min(w, h)
        w, h = int(w * scale), int(h * scale)
        image = image.resize((w, h), Image.LANCZOS)
    if level > 1 and not (max(w, h) <= 600 and min(w, h) <= 400):
        right, bottom = (min(w, 600), min(h, 400)) if w > h else (min(w, 400), min(h, 600))
        x, y = (w - right) // 2, (h - bottom) // 2
        image = image.crop((x, y, x + right, y + bottom))
    if image.mode in ("RGBA", "LA", "P"):
        image = image.convert("RGB")
    return encoded(image, quality=80 if level == 3 else 90)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("size", [(90, 60), (455, 463), (701, 423)])
def test_bytes_are_pillows(level, size):
    source = encoded(picture(*size), quality=97, subsampling=0)
    assert make_picture(source, Making(level)).stored == by_pillow(source, level)


@pytest.mark.parametrize(
    ("mode", "kind", "stored"),
    [
        ("L", "JPEG", "L"),
        ("CMYK", "JPEG", "CMYK"),
        ("RGB", "PNG", "RGB"),
        ("RGBA", "PNG", "RGB"),
        ("LA", "PNG", "RGB"),
        ("P", "PNG", "RGB"),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
def test_modes_stay_or_become_rgb_as_specified(level, mode, kind, stored):
    source = encoded(picture(450, 445).convert(mode), kind)
    made = make_picture(source, Making(level)).stored
    assert Image.open(io.BytesIO(made)).mode == stored
    assert made == by_pillow(source, level)


def test_sixteen_bits_keep_the_high_byte():
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    made = make_picture(encoded(Image.fromarray(values), "PNG"), Making(1)).stored
    expected = encoded(Image.fromarray((values >> 8).astype(np.uint8)), quality=90)
    assert made == expected
    raw = make_picture(encoded(Image.fromarray(values), "PNG"), Making("RAW", 100)).stored
    assert np.array_equal(np.frombuffer(raw, np.uint8)[8:].reshape(64, 64, 3)[:, :, 2], values >> 8)


def test_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    source = encoded(picture(30, 20), exif=exif)
    assert (make_picture(source, Making(1)).width, make_picture(source, Making("RAW", 9)).width) == (30, 13)


def test_level_0_keeps_every_byte():
    source = encoded(picture(33, 20), progressive=True) + b"bytes after the end"
    assert make_picture(source, Making(0)).stored == source


def test_raw_level_converts_to_rgb():
    for mode in ("L", "CMYK"):
        source = encoded(picture(40, 30).convert(mode))
        made = make_picture(source, Making("RAW", 400)).stored
        assert struct.unpack_from("<II", made) == (40, 30)
        assert made[8:] == Image.open(io.BytesIO(source)).convert("RGB").tobytes()


def test_long_picture_keeps_its_short_side():
    made = make_picture(encoded(picture(2000, 3)), Making("RAW", 2))
    assert (made.width, made.height) == (1333, 2)


def test_damage_is_reported_and_never_raised_beyond_the_file(tmp_path, monkeypatch):
    good = encoded(picture(200, 150), quality=95)
    for name, data in {"good": good, "cut": good[:-2000], "long": good + bytes(100)}.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(imagenet_encode, "MAX_PICTURE_BYTES", len(good) + 50)
    paths = [str(tmp_path / name) for name in ("good", "cut", "long", "gone")]
    outcomes = make_chunk((paths, Making(1)))
    assert not isinstance(outcomes[0][0], Refused)
    reasons = [outcome.reason for outcome, _ in outcomes[1:] if isinstance(outcome, Refused)]
    assert "is damaged" in reasons[0]
    assert f"is {len(good) + 100} bytes long" in reasons[1]
    assert "cannot be read: No such file" in reasons[2]
    assert [state[0] for _, state in outcomes] == [len(good), len(good) - 2000, len(good) + 100, -1]
    assert make_from_file(paths[0], Making(0))[0].stored == good


def test_a_shortage_of_the_system_is_not_a_bad_picture(tmp_path, monkeypatch):
    path = tmp_path / "a.JPEG"
    path.write_bytes(encoded(picture(20, 20)))

    def refuse(*arguments: object) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RenaissanceError, match=r"a\.JPEG: cannot be read now: Too many open files"):
        make_from_file(str(path), Making(0))


def test_scan_data_that_ends_early_is_damage_at_every_level_that_decodes():
    source = encoded(picture(200, 150), quality=95)[:-3000]
    for making in (Making(1), Making(3), Making("RAW", 50)):
        with pytest.raises(CorruptSample, match="damaged"):
            make_picture(source, making)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("making", [Making(1), Making(2), Making("RAW", 50)])
def test_damage_that_pillow_overlooks_is_not_encoded_as_a_picture(making, mode):
    good = encoded(picture(90, 70, mode), quality=95)
    damaged = good[:-2] + bytes(20) + b"\xff\xd9"  # data after the last block: libjpeg warns, and Pillow does not
    Image.open(io.BytesIO(damaged)).load()
    with pytest.raises(CorruptSample, match="extraneous bytes"):
        make_picture(damaged, making)


def test_metadata_that_pillow_hands_on_stay_where_pixels_are_not_pillows():
    source = encoded(picture(500, 450), quality=95, comment=b"made here")
    with Image.open(io.BytesIO(source)) as opened, io.BytesIO() as file:
        opened.resize((444, 400), Image.Resampling.LANCZOS).save(file, "JPEG", quality=90)
        assert make_picture(source, Making(1)).stored == file.getvalue()
        assert b"made here" in file.getvalue()


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_restart_windows_keep_every_pixel(level, mode):
    source = encoded(picture(500, 375, mode), quality=95)
    plain, marked = (make_picture(source, Making(level, 0, windows)).stored for windows in (False, True))
    assert read_header(np.frombuffer(plain, np.uint8)).restart_interval == 0
    header = read_header(np.frombuffer(marked, np.uint8))
    assert header.restart_interval > 0
    assert header.mcu_columns % header.restart_interval == 0
    assert Image.open(io.BytesIO(marked)).tobytes() == Image.open(io.BytesIO(plain)).tobytes()
    assert len(marked) < 1.05 * len(plain)


def test_restart_windows_leave_alone_what_cannot_have_them():
    for source in (encoded(picture(90, 60), "PNG"), encoded(picture(90, 60), progressive=True)):
        assert make_picture(source, Making(0, 0, True)).stored == source
