"""Sample order (law 1): a pure function of seed, epoch, number of samples and mode; ranks share it without overlap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renaissance.core.errors import ValueRejected
from renaissance.core.philox import philox
from renaissance.data.order import (
    EMPTY,
    OrderLevel,
    batch_samples,
    batches_per_epoch,
    epoch_order,
    rank_share,
    share_size,
)

SEED = st.integers(0, 2**64 - 1)
EPOCH = st.integers(0, 2**31 - 1)
N = st.integers(0, 400)
WORLD = st.integers(1, 9)


def reference_order(seed: int, epoch: int, n: int, validation: bool = False) -> list[int]:
    """Spec/data 4.6 in plain integers."""
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        word = philox(seed, i, 0x02000004, 0, epoch + (0x80000000 if validation else 0))[0]
        j = word * (i + 1) >> 32
        order[i], order[j] = order[j], order[i]
    return order


@given(seed=SEED, epoch=EPOCH, n=N, validation=st.booleans())
@settings(deadline=None, max_examples=60)
def test_order_equals_the_reference_and_is_a_permutation(seed, epoch, n, validation):
    order = epoch_order(seed, epoch, n, shuffle=True, validation=validation)
    assert order.dtype == np.int32
    assert order.tolist() == reference_order(seed, epoch, n, validation)
    assert sorted(order.tolist()) == list(range(n))


def test_golden_order():
    # Written down once from the reference above; a change of these numbers changes every run ever made.
    assert epoch_order(42, 0, 10, shuffle=True).tolist() == [5, 2, 4, 6, 7, 1, 0, 8, 3, 9]
    assert epoch_order(42, 1, 10, shuffle=True).tolist() == [1, 9, 5, 0, 2, 8, 6, 4, 3, 7]
    assert epoch_order(42, 0, 10, shuffle=True, validation=True).tolist() == [5, 2, 3, 6, 4, 9, 7, 8, 1, 0]


def test_without_shuffling_the_order_is_the_file_order():
    for validation in (False, True):
        assert epoch_order(1, 5, 7, shuffle=False, validation=validation).tolist() == list(range(7))


def test_an_epoch_does_not_depend_on_earlier_ones():
    cold = epoch_order(9, 57, 1000, shuffle=True)
    for epoch in range(57):
        epoch_order(9, epoch, 1000, shuffle=True)
    assert np.array_equal(epoch_order(9, 57, 1000, shuffle=True), cold)


def test_seed_epoch_and_set_each_give_another_order():
    orders = [
        epoch_order(seed, epoch, 500, shuffle=True, validation=validation).tobytes()
        for seed in (0, 1, 1 << 32, 1 << 63)
        for epoch in (0, 1, 2)
        for validation in (False, True)
    ]
    assert len(set(orders)) == len(orders)


def test_every_sample_reaches_every_position():
    # 2,000 epochs of 8 samples: each of the 64 (sample, position) pairs is expected 250 times.
    counts = np.zeros((8, 8), dtype=int)
    for epoch in range(2000):
        counts[epoch_order(3, epoch, 8, shuffle=True), np.arange(8)] += 1
    chi_square = ((counts - 250.0) ** 2 / 250.0).sum()
    assert chi_square < 100  # 49 degrees of freedom; a biased shuffle gives thousands


@given(seed=SEED, n=N, world=WORLD)
@settings(deadline=None, max_examples=60)
def test_ranks_together_get_every_sample_once(seed, n, world):
    order = epoch_order(seed, 0, n, shuffle=True)
    shares = [rank_share(order, rank, world) for rank in range(world)]
    assert {share.size for share in shares} == {share_size(n, world)}
    interleaved = np.stack(shares, axis=1).reshape(-1)
    assert interleaved[:n].tolist() == order.tolist()
    assert (interleaved[n:] == EMPTY).all()


@given(n=N, world=WORLD, batch_size=st.integers(1, 70))
@settings(deadline=None, max_examples=60)
def test_batches_of_a_rank_are_its_share(n, world, batch_size):
    order = epoch_order(11, 4, n, shuffle=True)
    count = batches_per_epoch(n, batch_size, world)
    for rank in range(world):
        batches = [batch_samples(order, index, batch_size, rank, world) for index in range(count)]
        assert all(batch.size == batch_size and batch.dtype == np.int32 for batch in batches)
        joined = np.concatenate([*batches, np.empty(0, dtype=np.int32)])
        share = rank_share(order, rank, world)
        assert joined[: share.size].tolist() == share.tolist()
        assert (joined[share.size :] == EMPTY).all()


@given(n=N, world=WORLD, batch_size=st.integers(1, 70))
@settings(deadline=None, max_examples=60)
def test_dropping_the_last_batch_leaves_only_batches_full_on_every_rank(n, world, batch_size):
    order = epoch_order(0, 0, n, shuffle=False)
    kept, total = batches_per_epoch(n, batch_size, world, drop_last=True), batches_per_epoch(n, batch_size, world)
    full = [
        all((batch_samples(order, index, batch_size, rank, world) != EMPTY).all() for rank in range(world))
        for index in range(total)
    ]
    assert full == [True] * kept + [False] * (total - kept)


def test_mnist_counts():
    assert batches_per_epoch(60000, 200) == 300
    assert batches_per_epoch(10000, 128) == 79
    assert batches_per_epoch(10000, 128, drop_last=True) == 78
    assert batches_per_epoch(0, 128) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epoch_order(-1, 0, 3, shuffle=True), "seed is -1"),
        (lambda: epoch_order(1 << 64, 0, 3, shuffle=True), "seed"),
        (lambda: epoch_order(0, -1, 3, shuffle=True), "epoch is -1"),
        (lambda: epoch_order(0, 1 << 31, 3, shuffle=False), "epoch"),
        (lambda: epoch_order(0, 0, -3, shuffle=True), "number of samples is -3"),
        (lambda: epoch_order(0, 0, 1 << 31, shuffle=True), "number of samples"),
        (lambda: rank_share(np.arange(3, dtype=np.int32), 2, 2), "rank is 2"),
        (lambda: rank_share(np.arange(3, dtype=np.int32), 0, 0), "world size is 0"),
        (lambda: batches_per_epoch(3, 0), "batch size is 0"),
        (lambda: batches_per_epoch(-3, 1), "number of samples is -3"),
        (lambda: batch_samples(np.arange(3, dtype=np.int32), 2, 2), "batch index is 2; expected 0 to 1"),
    ],
)
def test_impossible_requests_are_named(call, message):
    with pytest.raises(ValueRejected, match=message):
        call()


def test_levels_have_the_numbers_of_the_format():
    assert {level.name: int(level) for level in OrderLevel} == {"BLOCKS": 2, "SAMPLES_OF_BUFFER": 3, "GLOBAL": 4}
