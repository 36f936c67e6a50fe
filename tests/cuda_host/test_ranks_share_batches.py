"""Two ranks that share batches, on the stand-in for CUDA and NCCL: what they train and count is what one rank with the
whole batch does, and their collectives have one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulator import compiler
from cuda_standin.nccl import World, run_ranks
from cuda_standin.work import Graph
from training_bench import BASE, Run, Step

from renaissance.backend.initial import dropout_key
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import ValueRejected
from renaissance.graph import (
    BluePrint,
    CompiledModel,
    CompileRequest,
    Variant,
    bn,
    cbr,
    compile_model,
    conv,
    fc,
    gap,
    maxpool,
    relu,
    seq,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")

RANKS = 2
SHARE = 6
STEPS = 3
PLAIN = BluePrint(seq(conv(6, 3, 1, 1), relu(), maxpool(2), conv(8, 3, 1, 1), relu(), gap(), fc(5)))
NORMED = BluePrint(seq(cbr(6, 3, 1, 1), maxpool(2), conv(8, 3, 1, 1), bn(), relu(), gap(), fc(5)))
Images = npt.NDArray[np.float32]


@cache
def model(net: BluePrint, ranks: int, half: DType | None = None) -> CompiledModel:
    """``net`` for ``ranks`` that share 12 samples a step."""
    request = {
        **BASE,
        "train_batch": RANKS * SHARE // ranks,
        "val_batch": RANKS * SHARE // ranks,
        "train_last": None,
        "optimizer": OptimizerKind.SGD_MOMENTUM,
        "label_smoothing": 0.1,
        "external_inputs": False,
        "world_size": ranks,
        "half": half,
    }
    return compile_model(net, CompileRequest(**request))


def give(run: Run, rank: int, ranks: int) -> None:
    """The rank's rows of the same batches, in the order of the dataserver: every ``ranks``-th."""
    rng = np.random.default_rng(11)
    for slot in (*run.executor.own_train_slots, *run.executor.own_val_slots):
        images = rng.standard_normal((RANKS * SHARE, *slot.images.shape[1:])).astype(np.float32)
        labels = rng.integers(0, 5, RANKS * SHARE)
        slot.images[...], slot.labels[:] = images[rank::ranks], labels[rank::ranks]


def on_ranks(net: BluePrint, half: DType | None, body: Callable[[Run], Any]) -> list[Any]:
    """Results of ``body`` for each of two ranks."""

    def ranked(world: World, rank: int) -> Any:
        with Run(model(net, RANKS, half), rank, world=world, rank=rank) as run:
            give(run, rank, RANKS)
            return body(run)

    return run_ranks(RANKS, ranked)


def alone(net: BluePrint, body: Callable[[Run], Any]) -> Any:
    """The result of ``body`` for one rank with the whole batch."""
    with Run(model(net, 1)) as run:
        give(run, 0, 1)
        return body(run)


def train(run: Run) -> tuple[list[float], dict[str, Images], dict[str, bytes]]:
    """Losses of some steps, then the weights and all that lasts."""
    losses = []
    for at in range(STEPS):
        run.step(Step(at % 2))
        losses.append(float(run.executor.read_scalar("loss")))
    weights = {p.name: run.executor.read(p.weight) for p in run.model.parameters}
    return losses, weights, run.bits()


def test_two_ranks_train_like_one_with_the_whole_batch_and_hold_the_same_bits() -> None:
    (losses, weights, bits), (other_losses, _, other_bits) = on_ranks(PLAIN, None, train)
    assert losses == other_losses, "the loss is the mean over the ranks"
    assert bits == other_bits
    expected_losses, expected, _ = alone(PLAIN, train)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert len(set(expected_losses)) == STEPS
    for name, values in expected.items():
        assert np.linalg.norm(weights[name] - values) <= 1e-6 * np.linalg.norm(values), name


def test_batch_norms_are_of_each_ranks_batch_and_what_lasts_is_their_mean() -> None:
    def body(run: Run) -> tuple[Images, Images, dict[str, bytes]]:
        run.step(Step(0))
        norm = run.model.batch_norms[0]
        return run.executor.read(norm.prev_mean), run.executor.read(norm.prev_var), run.bits()

    (mean, var, bits), (_, _, other_bits) = on_ranks(NORMED, None, body)
    assert bits == other_bits
    whole_mean, whole_var, _ = alone(NORMED, body)
    np.testing.assert_allclose(mean, whole_mean, atol=1e-6)
    np.testing.assert_allclose(var, whole_var, rtol=0.02)  # without the spread of the ranks' means (spec A13)
    assert not np.array_equal(var, whole_var)


def test_validation_counts_every_sample_once_also_when_shares_differ() -> None:
    """15 samples: 8 of them are rank 0's, in batches of 6 and 2, and 7 are rank 1's."""

    def body(run: Run, valid: tuple[int, int]) -> dict[str, float]:
        run.executor.clear_metrics()
        for slot, rows in enumerate(valid):
            run.executor.run_val_step(slot, Variant.VAL_BASE, valid=rows)
        run.executor.reduce_metrics()
        sums = dict(run.executor.scalars())
        return {name: value / sums["accum_count"] for name, value in sums.items()} | {"count": sums["accum_count"]}

    by_rank = [(6, 2), (6, 1)]
    first, second = on_ranks(PLAIN, None, lambda run: body(run, by_rank[run.device.collectives.rank]))
    assert first == second
    whole = alone(PLAIN, lambda run: body(run, (12, 3)))
    assert (first.pop("count"), whole.pop("count")) == (7.5, 15)
    np.testing.assert_allclose([first[name] for name in whole], list(whole.values()), rtol=1e-6)
    assert 0 < whole["accum_top1"] < 1


def test_a_rank_without_any_sample_in_a_batch_adds_nothing() -> None:
    def body(run: Run) -> tuple[float, float]:
        run.executor.clear_metrics()
        run.executor.run_val_step(0, Variant.VAL_BASE, valid=SHARE if run.device.collectives.rank == 0 else 0)
        own = dict(run.executor.scalars())
        run.executor.reduce_metrics()
        return own["accum_loss"], run.executor.scalars()["accum_loss"]

    (loss, mean), (nothing, same) = on_ranks(PLAIN, None, body)
    assert nothing == 0
    assert mean == same == loss / 2


def test_collectives_are_in_one_order_and_the_same_on_all_ranks() -> None:
    def captured(run: Run) -> Graph:
        run.step(Step(0))
        run.bits()
        return run.fake.graph(run.fake.launched[-1])

    orders = []
    for graph in on_ranks(NORMED, DType.FP16, captured):
        reduces = [at for at, op in enumerate(graph.ops) if op.name.startswith("all-reduce")]
        before = graph.ancestors()
        assert all(before[later] >> earlier & 1 for earlier, later in pairwise(reduces))
        orders.append([graph.ops[at].name for at in reduces])
    assert orders[0] == orders[1]
    assert len(orders[0]) == 3, "deep bucket, first bucket, statistics"


def test_a_model_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueRejected, match="compiled for 2 ranks and the device has joined 1"):
        Run(model(PLAIN, RANKS))

    def body(world: World, rank: int) -> None:
        with pytest.raises(ValueRejected, match="compiled for 1 ranks and the device has joined 2"):
            Run(model(PLAIN, 1), world=world, rank=rank)

    run_ranks(RANKS, body)


def test_each_rank_has_a_dropout_key_of_its_own() -> None:
    assert dropout_key(2**33 + 5, 0) == (5, 2)
    keys = {dropout_key(seed, rank) for seed in (0, 1, 2**64 - 1) for rank in range(8)}
    assert len(keys) == 24
