"""The order in which pictures are exported, and which of them share a block.

Orders are permutations of the tree's order (class folders by name, then files by name). Packing "streaming" fills block
after block in that order; "greedy" chooses the blocks from the sizes, which wastes less of them (spec/data 1.6).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import ValueRejected
from renaissance.core.philox import Domain, epoch_word, philox_array, purpose
from renaissance.data.order import OrderLevel

ORDERS = ("philox", "python42", "file")
PACKINGS = ("streaming", "greedy")
LEGACY_SEED = 42
"""Seed of the order that existing files have."""
GREEDY_ROUNDS = 32
GREEDY_SHARE = 0.993
"""The greedy packing starts with this share of the blocks that full ones would need."""

I64 = npt.NDArray[np.int64]
Shuffle = Callable[[I64], I64]


def export_order(order: str, seed: int, names: Sequence[bytes], split: str) -> I64:
    """Indices into ``names`` (file names without folders, in the tree's order) in the order of export, int64[n].

    "philox": Fisher-Yates by the draws of ``seed`` in domain EXPORT_ORDER (docs/random-numbers.md). "python42": what
    existing files have, Python's shuffle with seed 42 of the list sorted by file name. "file": the order of the tree.
    """
    identity = np.arange(len(names), dtype=np.int64)
    if order == "philox":
        return philox_shuffle(identity, seed, split)
    if order == "python42":
        return python_shuffle(np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64))
    if order == "file":
        return identity
    raise ValueRejected(f"unknown export order {order!r}; expected one of: {', '.join(ORDERS)}")


def philox_shuffle(items: I64, seed: int, split: str, round: int = 0) -> I64:
    """A permutation of ``items``; ``round`` (c2 of the draws) tells several of one file apart."""
    shuffled = items.tolist()
    steps = np.arange(len(shuffled), dtype=np.uint64)
    c1, c3 = purpose(Domain.EXPORT_ORDER, OrderLevel.GLOBAL), epoch_word(0, split == "val")
    words = philox_array(seed, steps, c1, round, c3)[0].astype(np.uint64)
    chosen = ((words * (steps + np.uint64(1))) >> np.uint64(32)).tolist()
    for i in range(len(shuffled) - 1, 0, -1):
        j = chosen[i]
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    return np.array(shuffled, dtype=np.int64)


def python_shuffle(items: I64) -> I64:
    """CPython's ``random.seed(42); random.shuffle(items)``."""
    shuffled = items.tolist()
    random.Random(LEGACY_SEED).shuffle(shuffled)
    return np.array(shuffled, dtype=np.int64)


class _Bins:
    """Blocks being filled: items, room left in bytes, and the limit on pictures."""

    def __init__(self, count: int, capacity: int, cap: int) -> None:
        self.items: list[list[int]] = [[] for _ in range(count)]
        self.room = [capacity] * count
        self.capacity, self.cap = capacity, cap

    def fits(self, block: int, size: int) -> bool:
        return size <= self.room[block] and len(self.items[block]) < self.cap

    def put(self, block: int, item: int, size: int) -> None:
        self.items[block].append(item)
        self.room[block] -= size

    def open(self) -> int:
        self.items.append([])
        self.room.append(self.capacity)
        return len(self.items) - 1

    def tightest_first(self) -> None:
        order = sorted(range(len(self.items)), key=lambda block: (self.room[block], block))
        self.items = [self.items[block] for block in order]
        self.room = [self.room[block] for block in order]


def greedy_blocks(sizes: I64, order: I64, shuffles: tuple[Shuffle, Shuffle], capacity: int, cap: int) -> list[I64]:
    """The blocks of the greedy packing, each a list of indices into ``sizes``; none is empty.

    ``sizes`` int64[n] are aligned bytes, none above ``capacity``; ``order`` is the export order, which breaks ties of
    size. Five steps: (1) open nearly as many blocks as needed; (2) a large picture into each; (3) fill them one after
    the other from a shuffled list; (4) 32 times, walk the blocks from the fullest and put the smallest picture left
    into each where it fits; (5) put the rest, shuffled, into the last block and new ones. Any step that runs out of
    pictures is the last.
    """
    size_of = sizes.tolist()
    left = sorted(order.tolist(), key=lambda item: -size_of[item])
    bins = _Bins(max(1, int(GREEDY_SHARE * sum(size_of[item] for item in left) / capacity)), capacity, cap)
    large, left = left[: len(bins.items)], left[len(bins.items) :]
    for block, item in enumerate(large):
        bins.put(block, item, size_of[item])
    left = shuffles[0](np.array(left, dtype=np.int64)).tolist()
    for block in range(len(bins.items)):
        while left and bins.fits(block, size_of[left[-1]]):
            item = left.pop()
            bins.put(block, item, size_of[item])
    rank = {item: place for place, item in enumerate(order.tolist())}
    left.sort(key=lambda item: (-size_of[item], rank[item]))
    for _ in range(GREEDY_ROUNDS if left else 0):
        bins.tightest_first()
        for block in range(len(bins.items)):
            if left and bins.fits(block, size_of[left[-1]]):
                item = left.pop()
                bins.put(block, item, size_of[item])
    block = len(bins.items) - 1
    for item in shuffles[1](np.array(left, dtype=np.int64)).tolist():
        if not bins.fits(block, size_of[item]):
            block = bins.open()
        bins.put(block, item, size_of[item])
    return [np.array(items, dtype=np.int64) for items in bins.items if items]
