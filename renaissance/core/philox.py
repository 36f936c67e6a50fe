"""Philox4x32-10: counter-based random numbers without state (Salmon et al., "Parallel random numbers", SC 2011).

A draw is a pure function of (seed, counter). The 64-bit seed is the key; the counter is four 32-bit words:

    c0  draw block: one block serves four 32-bit draws, draw d is lane d % 4 of block d // 4
    c1  purpose: ``domain`` in the top byte, domain-specific bits below (op index of a recipe, tensor id, ...)
    c2  stable index: the sample id for augmentation, an element block for initialisation
    c3  epoch, with bit 31 set for the validation set

docs/random-numbers.md states the rules; this file follows them. ``philox`` (scalar Python), ``philox_array``
(NumPy) and ``philox_numba`` (compiled) return the same words.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from numba import njit

U32 = npt.NDArray[np.uint32]

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
MASK32 = 0xFFFFFFFF
VALIDATION_BIT = 1 << 31
UNIT_24 = 2.0**-24
"""Scale that turns the upper 24 bits of a word into a float in [0, 1)."""


class Domain(IntEnum):
    """Top byte of c1. No two consumers share a domain, so no two consumers share a counter."""

    AUGMENTATION = 1
    ORDER = 2
    WEIGHT_INIT = 3
    DROPOUT = 4
    NOISE = 5
    EXPORT_ORDER = 6
    TENSOR_FILL = 7
    SUBSTITUTE = 8


def purpose(domain: Domain, low: int = 0) -> int:
    """The c1 word: ``domain`` in the top byte, ``low`` (24 bits) below it."""
    if not 0 <= low < 1 << 24:
        raise ValueError(f"philox purpose: low bits are {low}; expected 0 to {(1 << 24) - 1}")
    return (int(domain) << 24) | low


def philox(seed: int, c0: int, c1: int, c2: int, c3: int) -> tuple[int, int, int, int]:
    """One block of four 32-bit words, in plain Python integers."""
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def philox_array(
    seed: int, c0: npt.ArrayLike, c1: npt.ArrayLike, c2: npt.ArrayLike, c3: npt.ArrayLike
) -> tuple[U32, U32, U32, U32]:
    """Blocks for broadcast arrays of counters; each result has the broadcast shape, dtype uint32."""
    words = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) for c in (c0, c1, c2, c3)))
    x0, x1, x2, x3 = (w.copy() for w in words)
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    mask, shift = np.uint64(MASK32), np.uint64(32)
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(MULTIPLIER_0) * x0, np.uint64(MULTIPLIER_1) * x2
        x0, x1, x2, x3 = (p1 >> shift) ^ x1 ^ np.uint64(k0), p1 & mask, (p0 >> shift) ^ x3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return x0.astype(np.uint32), x1.astype(np.uint32), x2.astype(np.uint32), x3.astype(np.uint32)


@njit(cache=True, inline="always")
def philox_numba(k0, k1, c0, c1, c2, c3):  # type: ignore[no-untyped-def]  # compiled: all arguments and results are uint32
    """One block from inside compiled code; ``k0``/``k1`` are the low and high words of the seed."""
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * np.uint64(c0)
        p1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
        c0 = np.uint32(p1 >> np.uint64(32)) ^ np.uint32(c1) ^ np.uint32(k0)
        c1 = np.uint32(p1)
        c2 = np.uint32(p0 >> np.uint64(32)) ^ np.uint32(c3) ^ np.uint32(k1)
        c3 = np.uint32(p0)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@njit(cache=True, inline="always")
def unit_float(word):  # type: ignore[no-untyped-def]  # uint32 -> float32 in [0, 1), 24 bits
    """Uniform float32 in [0, 1) from one 32-bit word."""
    return np.float32(word >> np.uint32(8)) * np.float32(5.9604644775390625e-08)


@njit(cache=True, inline="always")
def bounded(word, n):  # type: ignore[no-untyped-def]  # uint32, n > 0 -> integer in [0, n)
    """Integer in [0, n) by the high word of word * n (no modulo)."""
    return np.int64((np.uint64(word) * np.uint64(n)) >> np.uint64(32))


def dropout_threshold(p: float) -> int:
    """The least word that keeps an element when elements are dropped with probability ``p``: p * 2^32, rounded up.

    Exact, so every backend keeps the same elements. Raises ValueError unless 0 <= p < 1.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability is {p}; expected 0 <= p < 1")
    return min(math.ceil(p * 2.0**32), MASK32)


def seed_words(seed: int) -> tuple[np.uint32, np.uint32]:
    """The two key words of a 64-bit seed, low first."""
    return np.uint32(seed & MASK32), np.uint32((seed >> 32) & MASK32)


def epoch_word(epoch: int, validation: bool) -> int:
    """The c3 word: the epoch number, bit 31 set for the validation set. Raises ValueError outside 0..2**31-1."""
    if not 0 <= epoch < VALIDATION_BIT:
        raise ValueError(f"epoch is {epoch}; expected 0 to {VALIDATION_BIT - 1}")
    return epoch | (VALIDATION_BIT if validation else 0)
