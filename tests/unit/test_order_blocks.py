"""Order by blocks (law 1): a stateless permutation that reads the file forwards, a group of whole blocks at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import ValueRejected
from renaissance.core.philox import philox
from renaissance.data.order import EMPTY, GROUP, MODES, epoch_order, rank_share

SEED = st.integers(0, 2**64 - 1)
EPOCH = st.integers(0, 2**31 - 1)
COUNTS = st.lists(st.integers(0, 12), max_size=30)
"""Pictures in each block; an empty block is legal."""
GROUPS = st.integers(1, 9)


def starts_of(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts], dtype=np.int64)


def shuffled(items: list[int], seed: int, level: int, buffer: int, epoch_word: int) -> list[int]:
    items = list(items)
    for i in range(len(items) - 1, 0, -1):
        word = philox(seed, i, 0x02000000 | level, buffer, epoch_word)[0]
        j = word * (i + 1) >> 32
        items[i], items[j] = items[j], items[i]
    return items


def reference(seed: int, epoch: int, counts: list[int], group: int, validation: bool) -> list[int]:
    """Spec/data 3.3 (levels 2 and 3) with the stateless draws of 4.6, in plain integers."""
    word, starts = epoch + (0x80000000 if validation else 0), starts_of(counts).tolist()
    blocks, order = shuffled(list(range(len(counts))), seed, 2, 0, word), []
    for number in range(-(-len(blocks) // group)):
        members = blocks[number * group : (number + 1) * group]
        samples = [sample for block in members for sample in range(starts[block], starts[block + 1])]
        order += shuffled(samples, seed, 3, number, word)
    return order


def by_blocks(seed, epoch, counts, group=GROUP, **options):
    n = sum(counts)
    return epoch_order(
        seed, epoch, n, shuffle=True, mode="blocks", block_starts=starts_of(counts), group=group, **options
    )


@given(seed=SEED, epoch=EPOCH, counts=COUNTS, group=GROUPS, validation=st.booleans())
@settings(deadline=None, max_examples=60)
def test_order_by_blocks_equals_the_reference_and_is_a_permutation(seed, epoch, counts, group, validation):
    order = by_blocks(seed, epoch, counts, group, validation=validation)
    assert order.dtype == np.int32
    assert order.tolist() == reference(seed, epoch, counts, group, validation)
    assert sorted(order.tolist()) == list(range(sum(counts)))


@pytest.mark.parametrize("block", [1, 3, 7])
def test_every_number_of_samples_is_permuted(block):
    for n in range(40):
        counts = [block] * (n // block) + [n % block] * (n % block > 0)
        assert sorted(by_blocks(5, 2, counts).tolist()) == list(range(n))


@given(seed=SEED, counts=COUNTS, group=GROUPS)
@settings(deadline=None, max_examples=40)
def test_a_group_is_left_only_when_all_its_blocks_are_done(seed, counts, group):
    order, starts = by_blocks(seed, 1, counts, group), starts_of(counts)
    block_of = np.searchsorted(starts, order, side="right") - 1
    filled = [block for block, count in enumerate(counts) if count]
    first = {block: int(np.flatnonzero(block_of == block)[0]) for block in filled}
    last = {block: int(np.flatnonzero(block_of == block)[-1]) for block in filled}
    for position in range(order.size):
        open_blocks = [block for block in filled if first[block] <= position <= last[block]]
        assert len(open_blocks) <= group


def test_golden_order_by_blocks():
    # Written down once from the reference above; a change of these numbers changes every run ever made.
    assert by_blocks(42, 0, [3, 2, 4, 1], group=2).tolist() == [7, 8, 9, 5, 6, 1, 4, 3, 2, 0]
    assert by_blocks(42, 1, [3, 2, 4, 1], group=2).tolist() == [5, 8, 6, 4, 7, 3, 0, 9, 2, 1]


def test_an_epoch_by_blocks_does_not_depend_on_earlier_ones():
    counts = [11] * 40
    cold = by_blocks(9, 7, counts)
    for epoch in range(7):
        by_blocks(9, epoch, counts)
    assert np.array_equal(by_blocks(9, 7, counts), cold)


def test_seed_epoch_set_and_group_each_give_another_order():
    counts = [17] * 30
    orders = [
        by_blocks(seed, epoch, counts, group, validation=validation).tobytes()
        for seed in (0, 1, 1 << 32, 1 << 63)
        for epoch in (0, 1)
        for group in (1, 8)
        for validation in (False, True)
    ]
    assert len(set(orders)) == len(orders)


def test_every_sample_reaches_every_position_when_one_group_holds_all():
    # 2,000 epochs of 3 blocks with 8 samples: each of the 64 (sample, position) pairs is expected 250 times.
    counts = np.zeros((8, 8), dtype=int)
    for epoch in range(2000):
        counts[by_blocks(3, epoch, [3, 3, 2]), np.arange(8)] += 1
    assert ((counts - 250.0) ** 2 / 250.0).sum() < 100


@given(seed=SEED, counts=COUNTS, world=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_ranks_together_get_every_sample_once_by_blocks(seed, counts, world):
    order = by_blocks(seed, 0, counts)
    interleaved = np.stack([rank_share(order, rank, world) for rank in range(world)], axis=1).reshape(-1)
    assert interleaved[: order.size].tolist() == order.tolist()
    assert (interleaved[order.size :] == EMPTY).all()


def test_the_global_order_is_what_it_was_and_ignores_nothing():
    expected = epoch_order(42, 3, 10, shuffle=True)
    assert epoch_order(42, 3, 10, shuffle=True, mode="global").tolist() == expected.tolist()
    assert epoch_order(42, 0, 10, shuffle=True).tolist() == [5, 2, 4, 6, 7, 1, 0, 8, 3, 9]


def test_without_shuffling_blocks_stay_in_file_order():
    starts = starts_of([3, 0, 4])
    assert epoch_order(1, 5, 7, shuffle=False, mode="blocks", block_starts=starts).tolist() == list(range(7))


def test_a_read_only_index_is_enough():
    starts = starts_of([3, 4])
    starts.flags.writeable = False
    order = epoch_order(1, 5, 7, shuffle=True, mode="blocks", block_starts=starts)
    assert sorted(order.tolist()) == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "random"}, "mode is 'random'; expected one of: global, blocks"),
        ({"mode": "blocks"}, 'use mode "global"'),
        ({"mode": "blocks", "block_starts": starts_of([3, 3])}, "ascend from 0 to the number of samples, 7"),
        ({"mode": "blocks", "block_starts": np.array([0, 5, 3, 7])}, "ascend"),
        ({"mode": "blocks", "block_starts": np.array([1, 7])}, "ascend"),
        ({"mode": "blocks", "block_starts": np.array([], np.int64)}, "ascend"),
        ({"mode": "blocks", "block_starts": starts_of([7]), "group": 0}, "group is 0 blocks"),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_impossible_blocks_are_named(options, message, shuffle):
    with pytest.raises(ValueRejected, match=message):
        epoch_order(0, 0, 7, shuffle=shuffle, **options)


def test_modes_have_their_names():
    assert MODES == ("global", "blocks")
