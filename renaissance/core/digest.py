"""Digests of delivered samples and of weights.

A delivered row is hashed with XXH64 (seed 0) over its bytes, by the worker that wrote it, while it is in cache. The
batch digest is BLAKE2b-128 over the header (epoch, batch index, valid count, each little-endian u64), the labels of
the valid rows (i32) and their row hashes (u64), in position order: so it does not depend on who computed which row.
An epoch digest is BLAKE2b-128 over its batch digests in order; a run digest over its epoch digests in order.
docs/shared-memory.md is the definition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

DIGEST_BYTES = 16

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


@njit(cache=True, inline="always")
def _rotl(x, r):  # type: ignore[no-untyped-def]
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@njit(cache=True, inline="always")
def _round(acc, lane):  # type: ignore[no-untyped-def]
    return _rotl(acc + lane * _P2, 31) * _P1


XXH64_START = (np.uint64(0x60EA27EEADC0B5D6), _P2, np.uint64(0), np.uint64(0x61C8864E7A143579))
"""State before the first stripe, for ``xxh64_stripes``."""
STRIPE = 32
"""Bytes of one step of the hash."""


LANES = 4
"""Accumulators of the hash, which fit one vector."""


@intrinsic
def _multiplies_vectors(typing_context):  # type: ignore[no-untyped-def]
    """Whether 64-bit products of a vector beat four scalar ones on the processor the code is made for.

    A constant when compiled. So far only on Zen 4 and 5: elsewhere VPMULLQ is three instructions of long latency.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, name, features = context.codegen().magic_tuple()
        fast = name in ("znver4", "znver5") and {"+avx512dq", "+avx512vl"} <= set(features.split(","))
        return context.get_constant(types.boolean, fast)

    return types.boolean(), generate


@intrinsic
def _vector_stripes(typing_context, words, begin, end, state):  # type: ignore[no-untyped-def]
    """``xxh64_stripes`` with the four accumulators in one vector: the same integers."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, first, last, start = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        vector = ir.VectorType(ir.IntType(64), LANES)
        places = [ir.Constant(ir.IntType(32), lane) for lane in range(LANES)]
        accumulators = ir.Constant(vector, [0] * LANES)
        for lane, value in zip(places, cgutils.unpack_tuple(builder, start, LANES), strict=True):
            accumulators = builder.insert_element(accumulators, value, lane)
        kept = cgutils.alloca_once_value(builder, accumulators)
        stripes = builder.bitcast(data, vector.as_pointer())
        p1, p2, turn = (ir.Constant(vector, [int(n)] * LANES) for n in (_P1, _P2, 31))
        rotate = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fshl.v{LANES}i64"
        )
        with cgutils.for_range_slice(builder, first, last, ir.Constant(ir.IntType(64), 1)) as (index, _):
            stripe = builder.load(builder.gep(stripes, [index]))
            stripe.align = 1
            total = builder.add(builder.load(kept), builder.mul(stripe, p2))
            builder.store(builder.mul(builder.call(rotate, [total, total, turn]), p1), kept)
        accumulators = builder.load(kept)
        parts = [builder.extract_element(accumulators, lane) for lane in places]
        return context.make_tuple(builder, signature.return_type, parts)

    return state(words, types.int64, types.int64, state), generate


@njit(cache=True, inline="always")
def xxh64_stripes(words, begin, end, state):  # type: ignore[no-untyped-def]  # uint64[n], stripes -> state
    """State after the stripes ``begin`` to ``end`` of the data, seen as uint64 words; for data made piece by piece."""
    if _multiplies_vectors():
        return _vector_stripes(words, begin, end, state)
    a, b, c, d = state
    for i in range(begin * 4, end * 4, 4):
        a = _round(a, words[np.uint64(i)])
        b = _round(b, words[np.uint64(i + 1)])
        c = _round(c, words[np.uint64(i + 2)])
        d = _round(d, words[np.uint64(i + 3)])
    return a, b, c, d


@njit(cache=True, _nrt=False)
def xxh64_end(data, state):  # type: ignore[no-untyped-def]  # contiguous uint8[n], state -> uint64
    """The hash of ``data``, from the state after all its whole stripes."""
    n = data.size
    at = n // STRIPE * STRIPE
    if n >= STRIPE:
        a, b, c, d = state
        h = _rotl(a, 1) + _rotl(b, 7) + _rotl(c, 12) + _rotl(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        h = _P5
    h += np.uint64(n)
    words = data[: n // 8 * 8].view(np.uint64)
    while at + 8 <= n:
        h = _rotl(h ^ _round(np.uint64(0), words[at // 8]), 27) * _P1 + _P4
        at += 8
    if at + 4 <= n:
        four = np.uint64(0)
        for j in range(4):
            four |= np.uint64(data[at + j]) << np.uint64(8 * j)
        h = _rotl(h ^ (four * _P1), 23) * _P2 + _P3
        at += 4
    while at < n:
        h = _rotl(h ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


@njit(cache=True, _nrt=False)
def xxh64(data):  # type: ignore[no-untyped-def]  # contiguous uint8[n] -> uint64
    """XXH64 with seed 0 of a contiguous uint8 array (the published algorithm, little-endian hosts)."""
    words = data[: data.size // 8 * 8].view(np.uint64)
    return xxh64_end(data, xxh64_stripes(words, 0, data.size // STRIPE, XXH64_START))


def batch_digest(epoch: int, index: int, labels: npt.NDArray[np.int32], row_hashes: npt.NDArray[np.uint64]) -> bytes:
    """Digest (16 bytes) of one batch from the labels and row hashes of its valid rows, in position order."""
    if labels.shape != row_hashes.shape:
        raise ValueError(f"batch digest: {labels.shape} labels but {row_hashes.shape} row hashes")
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    h.update(np.array([epoch, index, labels.size], dtype="<u8").tobytes())
    h.update(np.ascontiguousarray(labels, dtype="<i4").tobytes())
    h.update(np.ascontiguousarray(row_hashes, dtype="<u8").tobytes())
    return h.digest()


def chain_digest(parts: Iterable[bytes]) -> bytes:
    """Digest (16 bytes) of digests in order: batches to an epoch, epochs to a run."""
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        h.update(part)
    return h.digest()
