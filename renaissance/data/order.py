"""The order of samples in an epoch, as a pure function of (seed, epoch, number of samples, mode and blocks).

Nothing here has state: every permutation starts from identity, so epoch 90 costs what epoch 0 costs and a run that
resumes there sees the same order. The draw of step ``i`` of a shuffle is Philox word 0 at the counter
(c0 = i, c1 = domain ORDER and the level, c2 = the group at level 3 and else 0, c3 = epoch with bit 31 for validation).

Mode "global" permutes all samples (level 4). Mode "blocks" keeps the disk reading forwards: it permutes the blocks of
the file (level 2), takes them ``group`` at a time, and permutes the samples of each group (level 3). Pictures were
shuffled into their blocks when the file was written, so a group is a fair sample of the set. The folders of a tree
would not be: each holds one class.

Rank ``r`` of ``W`` gets the positions r, r + W, r + 2W, ... of the epoch's order. All ranks have ceil(n / W)
positions; the ones past the end hold the sample id -1 and are delivered as empty rows.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from numba import njit

from renaissance.core.errors import ValueRejected
from renaissance.core.philox import VALIDATION_BIT, Domain, bounded, epoch_word, philox_numba, purpose, seed_words

SampleIds = npt.NDArray[np.int32]

EMPTY = -1
"""Sample id of a position past the end of the epoch."""

MAX_SAMPLES = 2**31 - 1

MODES = ("global", "blocks")
GROUP = 8
"""Blocks mixed together in mode "blocks"; 8 of 16 MiB are about a thousand pictures, and 128 MiB to read ahead."""


class OrderLevel(IntEnum):
    """Low bits of c1 in the ORDER domain: what is being permuted."""

    BLOCKS = 2
    SAMPLES_OF_BUFFER = 3
    GLOBAL = 4


@njit(cache=True, nogil=True)
def _fisher_yates(order, k0, k1, c1, c2, c3):  # type: ignore[no-untyped-def]  # int32[n], uint32 x 5; in place
    for i in range(order.size - 1, 0, -1):
        word = philox_numba(k0, k1, np.uint32(i), c1, c2, c3)[0]
        j = bounded(word, i + 1)
        order[i], order[j] = order[j], order[i]


@njit(cache=True, nogil=True)
def _fill_by_blocks(order, blocks, starts, group, k0, k1, c1, c3):  # type: ignore[no-untyped-def]
    """Fill int32[n] from int32[K] permuted blocks and int64[K+1] starts, permuting each ``group`` of blocks."""
    at = 0
    for first in range(0, blocks.size, group):
        begin = at
        for k in range(first, min(first + group, blocks.size)):
            for sample in range(starts[blocks[k]], starts[blocks[k] + 1]):
                order[at] = sample
                at += 1
        _fisher_yates(order[begin:at], k0, k1, c1, np.uint32(first // group), c3)


def epoch_order(
    seed: int,
    epoch: int,
    n: int,
    *,
    shuffle: bool,
    validation: bool = False,
    mode: str = "global",
    block_starts: npt.NDArray[np.int64] | None = None,
    group: int = GROUP,
) -> SampleIds:
    """Sample ids of one epoch in the order they are delivered, int32[n].

    ``shuffle=False`` is file order (identity) in every mode, the rule for validation sets. ``validation`` only
    separates the draws of the validation set from those of the training set; it does not switch shuffling off.
    ``mode`` "blocks" needs ``block_starts``, int64[K+1]: the first sample of each block, then n; the epoch is then a
    sequence of groups of ``group`` whole blocks. Raises ValueRejected when a value is out of range, for an unknown
    mode, and when blocks are missing or do not cover the n samples.
    """
    if not 0 <= n <= MAX_SAMPLES:
        raise ValueRejected(f"epoch order: number of samples is {n}; expected 0 to {MAX_SAMPLES}")
    if not 0 <= seed < 1 << 64:
        raise ValueRejected(f"epoch order: seed is {seed}; expected 0 to 2**64 - 1")
    if not 0 <= epoch < VALIDATION_BIT:
        raise ValueRejected(f"epoch order: epoch is {epoch}; expected 0 to {VALIDATION_BIT - 1}")
    starts = _checked_blocks(mode, block_starts, n, group)
    order = np.arange(n, dtype=np.int32)
    if not shuffle:
        return order
    k0, k1 = seed_words(seed)
    c3 = np.uint32(epoch_word(epoch, validation))
    if starts is None:
        _fisher_yates(order, k0, k1, _level(OrderLevel.GLOBAL), np.uint32(0), c3)
    else:
        blocks = np.arange(starts.size - 1, dtype=np.int32)
        _fisher_yates(blocks, k0, k1, _level(OrderLevel.BLOCKS), np.uint32(0), c3)
        _fill_by_blocks(order, blocks, starts, group, k0, k1, _level(OrderLevel.SAMPLES_OF_BUFFER), c3)
    return order


def _level(level: OrderLevel) -> np.uint32:
    return np.uint32(purpose(Domain.ORDER, level))


def _checked_blocks(
    mode: str, block_starts: npt.NDArray[np.int64] | None, n: int, group: int
) -> npt.NDArray[np.int64] | None:
    """The block starts as the kernel needs them, or None in mode "global"."""
    if mode not in MODES:
        raise ValueRejected(f"epoch order: mode is {mode!r}; expected one of: {', '.join(MODES)}")
    if mode == "global":
        return None
    if block_starts is None:
        raise ValueRejected('epoch order: mode "blocks" needs a set stored in blocks; use mode "global" for this one')
    if group < 1:
        raise ValueRejected(f"epoch order: group is {group} blocks; expected at least 1")
    starts = np.ascontiguousarray(block_starts, np.int64)
    if starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or starts[-1] != n or (np.diff(starts) < 0).any():
        raise ValueRejected(
            f"epoch order: block starts do not ascend from 0 to the number of samples, {n}; they must be those of the "
            "set that is ordered"
        )
    return starts.copy() if not starts.flags.writeable else starts  # the kernel is compiled for writable arrays


def share_size(n: int, world_size: int = 1) -> int:
    """Positions of every rank in an epoch, ceil(n / world_size); the last one may be empty on some ranks."""
    _check_world(n, 0, world_size)
    return -(-n // world_size)


def rank_share(order: SampleIds, rank: int, world_size: int) -> SampleIds:
    """The sample ids of one rank, int32[share_size(n, world_size)], padded with -1."""
    _check_world(order.size, rank, world_size)
    share = np.full(share_size(order.size, world_size), EMPTY, dtype=np.int32)
    own = order[rank::world_size]
    share[: own.size] = own
    return share


def batches_per_epoch(n: int, batch_size: int, world_size: int = 1, drop_last: bool = False) -> int:
    """Batches that every rank sees in an epoch.

    With ``drop_last`` only batches that are full on every rank count; without, the last one may be partly empty.
    """
    _check_batch(batch_size)
    _check_world(n, 0, world_size)
    if drop_last:
        return n // (world_size * batch_size)
    return -(-n // (world_size * batch_size))


def batch_samples(order: SampleIds, index: int, batch_size: int, rank: int = 0, world_size: int = 1) -> SampleIds:
    """Sample ids of batch ``index`` of one rank, int32[batch_size], padded with -1.

    Row ``p`` of the batch holds position ``rank + world_size * (index * batch_size + p)`` of the epoch.
    Raises ValueRejected when the epoch has no such batch.
    """
    _check_world(order.size, rank, world_size)
    total = batches_per_epoch(order.size, batch_size, world_size)
    if not 0 <= index < total:
        raise ValueRejected(f"batch index is {index}; expected 0 to {total - 1} ({order.size} samples an epoch)")
    batch = np.full(batch_size, EMPTY, dtype=np.int32)
    own = order[rank + world_size * index * batch_size :: world_size][:batch_size]
    batch[: own.size] = own
    return batch


def _check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueRejected(f"batch size is {batch_size}; expected at least 1")


def _check_world(n: int, rank: int, world_size: int) -> None:
    if n < 0:
        raise ValueRejected(f"number of samples is {n}; expected at least 0")
    if world_size < 1:
        raise ValueRejected(f"world size is {world_size}; expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueRejected(f"rank is {rank}; expected 0 to {world_size - 1} (world size {world_size})")
