"""Digest files: what was written is read back, and whatever is wrong with one is named with its line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from renaissance.core.errors import DigestMismatch, FormatError, MissingFileError, RenaissanceError
from renaissance.data.digest_file import DigestHeader, read_digests, write_digests

HEADER = DigestHeader(
    dataset="mnist",
    split="train",
    num_samples=250,
    stored_format="",
    encoding="pixels",
    level="",
    recipe="{}",
    recipe_fingerprint="00ff",
    decoder="",
    seed=2**64 - 1,
    shuffle=True,
    order="global",
    batch_size=100,
    dtype="fp32",
    height=28,
    width=28,
    channels=1,
    padded_channels=1,
    rank=0,
    world_size=1,
    batches_per_epoch=3,
    on_corrupt="fail",
    epoch=7,
)
BATCHES = [bytes([n]) * 16 for n in (1, 2, 3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / HEADER.file_name()
    write_digests(path, HEADER, BATCHES)
    return path


def test_round_trip(path: Path) -> None:
    found = read_digests(path)
    assert found.header == HEADER
    assert found.batches == tuple(BATCHES)
    assert found.digest == hashlib.blake2b(b"".join(BATCHES), digest_size=16).digest()


def test_the_format_is_the_documented_one(path: Path) -> None:
    """As docs/digests.md gives it, parsed without our reader."""
    lines = path.read_text().split("\n")
    header = json.loads(lines[0])
    assert (header["format"], header["version"], header["epoch"]) == ("renaissance-digests", 1, 7)
    assert lines[1:4] == [f"{i} {bytes([i + 1]).hex() * 16}" for i in range(3)]
    assert lines[4] == f"epoch {hashlib.blake2b(b''.join(BATCHES), digest_size=16).hexdigest()}"
    assert lines[5:] == [""]


def test_identity_names_everything_but_the_epoch() -> None:
    assert replace(HEADER, epoch=8).identity() == HEADER.identity()
    for name in HEADER.__dataclass_fields__:
        if name != "epoch":
            value = getattr(HEADER, name)
            changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + "x"
            assert replace(HEADER, **{name: changed}).identity() != HEADER.identity(), name
    assert HEADER.file_name() == f"mnist-train-{HEADER.identity()[:16]}-e000007.digests"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("\n1 0202", "\n1 0203", DigestMismatch, "the last line says"),
        ("\n1 0202", "\n2 0202", FormatError, "line 3: expected `1 DIGEST`"),
        ("\n1 0202", "\n1 zz02", FormatError, "line 3"),
        ("\n2 " + "03" * 16, "", FormatError, "2 batches, the header says 3"),
        ("\nepoch", "", FormatError, "2 batches, the header says 3"),
        ('"seed": ', '"seed": "x", "sead": ', FormatError, "unknown keys 'sead'"),
        ('"seed": 18446744073709551615', '"seed": true', FormatError, "seed is True; expected int"),
        ('"epoch": 7', '"epoch": -7', FormatError, "epoch is -7"),
        ('"order": "global", ', "", FormatError, "misses order"),
        ('"version": 1', '"version": 2', FormatError, "version is 2"),
        ('{"format"', '{"formula"', FormatError, "expected the key format"),
        ('{"format"', "[", FormatError, "line 1: is not JSON"),
    ],
)
def test_damage_is_named(path: Path, old: str, new: str, error: type[Exception], message: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(error, match=message):
        read_digests(path)


@pytest.mark.parametrize("content", [b"", b"x", b"{}\n", b"\xff\xfe\n\n\n", b"[" * 100000 + b"\n\n\n"])
def test_what_is_no_digest_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=str(path)):
        read_digests(path)


def test_every_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(RenaissanceError):
            read_digests(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_digests(tmp_path / "none")
    with pytest.raises(RenaissanceError, match="cannot be written"):
        write_digests(tmp_path / "none" / "file", HEADER, BATCHES)
