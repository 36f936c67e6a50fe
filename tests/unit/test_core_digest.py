"""Digests: XXH64 equals the xxhash library's; batch, epoch and run digests are what docs/shared-memory.md defines."""

import hashlib
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.digest import DIGEST_BYTES, batch_digest, chain_digest, xxh64


def ours(data: bytes) -> int:
    return int(xxh64(np.frombuffer(data, dtype=np.uint8)))


def test_xxh64_equals_the_library_for_every_short_length():
    data = np.random.default_rng(1).integers(0, 256, 200, dtype=np.uint8).tobytes()
    for length in range(len(data) + 1):
        assert ours(data[:length]) == xxhash.xxh64_intdigest(data[:length]), length


@given(st.binary(max_size=5000))
@settings(deadline=None, max_examples=100)
def test_xxh64_equals_the_library(data):
    assert ours(data) == xxhash.xxh64_intdigest(data)


def test_xxh64_of_an_image_sized_row():
    row = np.random.default_rng(2).integers(0, 256, 224 * 224 * 3 * 4, dtype=np.uint8)
    assert int(xxh64(row)) == xxhash.xxh64_intdigest(row.tobytes())


def test_batch_digest_is_the_documented_blake2b():
    labels = np.array([3, -1, 9], dtype=np.int32)
    hashes = np.array([1, 2**64 - 1, 77], dtype=np.uint64)
    expected = hashlib.blake2b(digest_size=16)
    expected.update(struct.pack("<3Q", 5, 12, 3) + struct.pack("<3i", 3, -1, 9) + struct.pack("<3Q", 1, 2**64 - 1, 77))
    assert batch_digest(5, 12, labels, hashes) == expected.digest()
    assert len(expected.digest()) == DIGEST_BYTES


def test_batch_digest_depends_on_every_part():
    labels, hashes = np.array([1, 2], dtype=np.int32), np.array([10, 20], dtype=np.uint64)
    digests = {
        batch_digest(0, 0, labels, hashes),
        batch_digest(1, 0, labels, hashes),
        batch_digest(0, 1, labels, hashes),
        batch_digest(0, 0, labels[::-1], hashes),
        batch_digest(0, 0, labels, hashes[::-1]),
        batch_digest(0, 0, labels[:1], hashes[:1]),
    }
    assert len(digests) == 6


def test_batch_digest_refuses_parts_that_do_not_belong_together():
    with pytest.raises(ValueError, match="row hashes"):
        batch_digest(0, 0, np.zeros(2, dtype=np.int32), np.zeros(3, dtype=np.uint64))


def test_chain_digest_is_the_digest_of_the_digests_in_order():
    parts = [bytes([i]) * DIGEST_BYTES for i in range(3)]
    assert chain_digest(parts) == hashlib.blake2b(b"".join(parts), digest_size=16).digest()
    assert chain_digest(parts) != chain_digest(parts[::-1])
