"""TSR files: bytes as the page says, exact round trips, and one clear error for every kind of damage."""

import os
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.core.shape import Shape
from renaissance.tensor import Tensor, load_first_tsr, load_one_tsr, load_tsr, save_tsr
from renaissance.tensor.tsr import load_tsr as load_tsr_of_module

A = Tensor.from_numpy(np.array([1.0, -2.5, 2.0**-149], np.float32))
B = Tensor.from_numpy(np.arange(-3, 3, dtype=np.int8).reshape(1, 2, 3, 1))


def saved(folder: Path, *tensors: Tensor, compress: bool = False) -> Path:
    path = folder / "t.tsr"
    save_tsr(path, tensors, compress)
    return path


def golden() -> bytes:
    """A and B in raw mode, field by field from docs/tsr.md, without the code under test."""
    head = bytearray(128)
    head[0x00:0x04] = b"TSR4"
    head[0x04:0x06] = (4).to_bytes(2, "little")
    head[0x06:0x08] = (20).to_bytes(2, "little")
    for at, value in ((0x08, 128), (0x0C, 0), (0x10, 2), (0x14, 64)):
        head[at : at + 4] = value.to_bytes(4, "little")
    for at, value in ((0x18, 128), (0x20, 256)):
        head[at : at + 8] = value.to_bytes(8, "little")
    head[0x28:0x2C] = zlib.crc32(bytes(head)).to_bytes(4, "little")
    a, b = bytes.fromhex("0000803f000020c001000000"), bytes.fromhex("fdfeff000102")
    directory = b""
    for code, dims, elements, row, payload, at in ((0, (1, 1, 1, 3), 3, 12, a, 256), (2, (1, 2, 3, 1), 6, 3, b, 512)):
        entry = bytes([code, 0, 0, 0]) + b"".join(d.to_bytes(4, "little") for d in dims)
        for value in (elements, row, len(payload), at, len(payload)):
            entry += value.to_bytes(8, "little")
        directory += entry + zlib.crc32(payload).to_bytes(4, "little")
    return bytes(head) + directory + a + bytes(512 - 256 - len(a)) + b


def test_raw_file_has_exactly_the_bytes_of_the_page(tmp_path: Path) -> None:
    assert saved(tmp_path, A, B).read_bytes() == golden()


def test_file_built_from_the_page_is_read(tmp_path: Path) -> None:
    path = tmp_path / "golden.tsr"
    path.write_bytes(golden())
    a, b = load_tsr(path)
    assert a.is_close(A, 0.0)
    assert b.is_close(B, 0.0)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: DType, compress: bool) -> None:
    bits = np.random.default_rng(int(dtype)).integers(0, 256, 3 * 5 * 7 * 2 * dtype.itemsize, dtype=np.uint8)
    tensor = Tensor.from_numpy(bits.view(dtype.numpy).reshape(3, 5, 7, 2), dtype)  # NaN patterns included
    back = load_one_tsr(saved(tmp_path, tensor, compress=compress))
    assert (back.shape, back.dtype) == (tensor.shape, dtype)
    assert back.numpy().tobytes() == tensor.numpy().tobytes()
    assert back.address % 256 == 0


def test_dtype_codes_of_the_extension(tmp_path: Path) -> None:
    data = saved(tmp_path, Tensor(Shape.of(1), DType.BF16), Tensor(Shape.of(1), DType.UINT8)).read_bytes()
    assert (data[128], data[192]) == (4, 5)


def test_zlib_mode_is_packed_and_each_block_is_one_stream(tmp_path: Path) -> None:
    data = saved(tmp_path, A, B, compress=True).read_bytes()
    assert struct.unpack_from("<I", data, 0x0C) == (1,)
    assert struct.unpack_from("<Q", data, 0x20) == (256,)  # 128 + 2 * 64
    position = 256
    for entry, tensor in ((128, A), (192, B)):
        offset, stored = struct.unpack_from("<2Q", data, entry + 0x2C)
        assert offset == position
        assert zlib.decompress(data[offset : offset + stored]) == tensor.numpy().tobytes()
        position += stored
    assert position == len(data)


def test_single_and_first_loaders(tmp_path: Path) -> None:
    path = saved(tmp_path, A, B)
    assert load_first_tsr(path).is_close(A, 0.0)
    with pytest.raises(ValueRejected, match="holds 2 tensors; expected exactly one"):
        load_one_tsr(path)
    save_tsr(path, A)
    assert load_one_tsr(path).is_close(A, 0.0)


def test_nothing_to_save_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueRejected, match="0 tensors to save"):
        save_tsr(tmp_path / "t.tsr", [])
    with pytest.raises(ValueRejected, match="hold no names"):
        save_tsr(tmp_path / "t.tsr", {"w": A})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, A)
    before = path.read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RenaissanceError, match=r"t\.tsr: cannot be written: No space left"):
        save_tsr(path, B)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"absent\.tsr: no such TSR file"):
        load_tsr(tmp_path / "absent.tsr")
    with pytest.raises(FormatError, match="is a folder"):
        load_tsr(tmp_path)


def damaged(folder: Path, at: int, new: bytes, *, header_crc: bool = True, compress: bool = False) -> Path:
    """A file of A and B with bytes replaced; the header CRC is made right again unless it is what is tested."""
    path = saved(folder, A, B, compress=compress)
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    if header_crc:
        data[0x28:0x2C] = bytes(4)
        data[0x28:0x2C] = struct.pack("<I", zlib.crc32(data[:128]))
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0x00, b"TSR3", r"offset 0x0: magic is b'TSR3'; expected b'TSR4'"),
        (0x04, b"\x05\x00", r"offset 0x4: version is \(5, 20\)"),
        (0x06, b"\x15\x00", r"version is \(4, 21\)"),
        (0x08, b"\x00\x01", r"offset 0x8: header size is 256"),
        (0x0C, b"\x02", r"offset 0xc: mode is 2"),
        (0x10, b"\x00", r"offset 0x10: tensor count is 0"),
        (0x10, b"\xff\xff\xff\xff", r"tensor count is 4294967295; the file has room for"),
        (0x14, b"\x20", r"directory entry size is 32"),
        (0x18, b"\xc0", r"directory offset is 192"),
        (0x20, b"\x00\x02", r"offset 0x20: data offset is 512; expected 256"),
        (0x2C, b"\x01", r"reserved word is 1"),
        (0x7F, b"\x01", r"offset 0x30: reserved bytes"),
        (0x80, b"\x06", r"offset 0x80: tensor 0: dtype is 6; expected one of: 0 FP32"),
        (0x81, b"\x01", r"offset 0x81: tensor 0: reserved bytes"),
        (0x84, b"\x00", r"offset 0x84: tensor 0: .*axis N is 0"),
        (0x84, b"\xff\xff\xff\xff", r"axis N is -1"),
        (0x84, b"\x02", r"offset 0x94: tensor 0: element count is 3; expected 6"),
        (0x9C, b"\x0d", r"offset 0x9c: tensor 0: row stride is 13; expected 12"),
        (0xA4, b"\x0d", r"offset 0xa4: tensor 0: bytes is 13; expected 12"),
        (0xAC, b"\x00\x02", r"offset 0xac: tensor 0: payload offset is 512; expected 256"),
        (0xB4, b"\x0d", r"offset 0xb4: tensor 0: stored bytes is 13; expected 12"),
        (0xBC, b"\x00", r"offset 0x100: tensor 0: data CRC-32 is"),
        (0x101, b"\x01", r"offset 0x100: tensor 0: data CRC-32 is .*damaged"),
        (0x110, b"\x01", r"offset 0x10c: bytes before tensor 1 are not zero"),
    ],
)
def test_each_kind_of_damage_is_named_with_its_offset(tmp_path: Path, at: int, new: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=rf"t\.tsr: .*{message}"):
        load_tsr(damaged(tmp_path, at, new))


def test_header_checksum_covers_the_header(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="header CRC-32 is"):
        load_tsr(damaged(tmp_path, 0x40, b"\x01", header_crc=False))


@pytest.mark.parametrize("compress", [False, True])
def test_every_truncation_and_any_tail_is_refused(tmp_path: Path, compress: bool) -> None:
    path = saved(tmp_path, A, B, compress=compress)
    data = path.read_bytes()
    for length in (0, 1, 127, 128, 191, 192, 255, 256, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            load_tsr(path)
    path.write_bytes(data + b"\x00")
    with pytest.raises(FormatError, match="1 bytes follow the last tensor"):
        load_tsr(path)


def test_zlib_block_that_is_too_long_too_short_or_not_zlib_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, A, compress=True)
    good = path.read_bytes()
    for payload in (zlib.compress(bytes(13)), zlib.compress(bytes(11)), b"no zlib data", zlib.compress(bytes(12))[:-4]):
        data = bytearray(good[:192] + payload)
        data[128 + 0x34 : 128 + 0x3C] = struct.pack("<Q", len(payload))
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"tensor 0: zlib data"):
            load_tsr(path)


def test_impossible_expansion_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path, A, compress=True)
    data = bytearray(path.read_bytes())
    side = 2**12
    struct.pack_into("<4i3Q", data, 128 + 4, 1, 1, side, 2**16, 2**28, 2**30, 2**30)  # 1 GiB of FP32
    path.write_bytes(data)
    with pytest.raises(FormatError, match="zlib bytes cannot hold 1073741824 bytes"):
        load_tsr(path)


def test_zlib_data_area_may_also_start_aligned(tmp_path: Path) -> None:
    path = saved(tmp_path, A, compress=True)
    data = bytearray(path.read_bytes())
    data[192:192] = bytes(64)
    struct.pack_into("<Q", data, 0x20, 256)
    struct.pack_into("<Q", data, 128 + 0x2C, 256)
    data[0x28:0x2C] = bytes(4)
    data[0x28:0x2C] = struct.pack("<I", zlib.crc32(data[:128]))
    path.write_bytes(data)
    assert load_one_tsr(path).is_close(A, 0.0)


@cache
def encoded(path: str, compress: bool) -> bytes:
    """The bytes of a file of A and B; saved once, because every save waits for the disk."""
    save_tsr(path, [A, B], compress)
    return Path(path).read_bytes()


@settings(deadline=None, max_examples=300)
@given(
    compress=st.booleans(),
    fix_crc=st.booleans(),
    edits=st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=0, max_size=9), st.integers(0, 9)), max_size=4),
)
def test_whatever_is_in_the_file_the_only_error_is_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, compress: bool, fix_crc: bool, edits: list[tuple[int, bytes, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.tsr"
    good = encoded(str(path), compress)
    data = bytearray(good)
    for at, new, removed in edits:
        data[at : at + removed] = new
    if fix_crc and len(data) >= 128:
        data[0x28:0x2C] = bytes(4)
        data[0x28:0x2C] = struct.pack("<I", zlib.crc32(data[:128]))
    path.write_bytes(data)
    try:
        loaded = load_tsr_of_module(path)
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - raising is allowed, not required
    else:
        assert data == good or [t.numpy().tobytes() for t in loaded]


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), compress=st.booleans())
def test_a_single_flipped_bit_is_found_or_changes_no_value(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, compress: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "flip.tsr"
    data = bytearray(encoded(str(path), compress))
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        loaded = load_tsr(path)
    except FormatError:
        return
    # A deflate stream has bits without a meaning (padding, one of two equal codes); raw files have none.
    assert compress
    assert [t.numpy().tobytes() for t in loaded] == [A.numpy().tobytes(), B.numpy().tobytes()]


def test_only_tensors_are_saved_and_nothing_else_leaves_a_file(tmp_path: Path) -> None:
    with pytest.raises(DTypeError, match=r"a ndarray to save; expected Tensors"):
        save_tsr(tmp_path / "x.tsr", [A, np.zeros(3)])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
