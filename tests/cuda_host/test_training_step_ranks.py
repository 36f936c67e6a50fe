"""Two ranks on the stand-ins for CUDA and NCCL: equal weights from the mean gradient, and a step that one of them has
to skip is skipped by both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulator import compiler
from cuda_standin.nccl import World, run_ranks
from training_bench import LR, Run, Step, compiled, fill

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")
Bits = dict[str, bytes]


def other_batches(run: Run, rank: int) -> None:
    """Batches of a rank's own."""
    rng = np.random.default_rng(100 + rank)
    for slot in run.executor.own_train_slots:
        fill(slot, run.model, rng)


def weights(bits: Bits) -> Bits:
    return {name: b for name, b in bits.items() if name.endswith((".weight", ".bias", ".m", ".v", ".ema"))}


def on_two_ranks(name: str, half: str, body: Callable[[Run, int], Any], **changes: Any) -> list[Any]:
    model = compiled(name, half, world_size=2, **changes)

    def rank_body(world: World, rank: int) -> Any:
        with Run(model, rank + 1, world=world, rank=rank) as run:
            return body(run, rank)

    return run_ranks(2, rank_body)


@pytest.mark.parametrize(("name", "half"), [("mlp", "fp32"), ("cbr", "bf16"), ("residual", "fp16")])
def test_two_ranks_on_one_batch_do_what_one_rank_does(name: str, half: str) -> None:
    """The mean of a gradient and itself is exact, so the bits are those of one rank."""

    def body(run: Run, rank: int) -> Bits:
        for at in range(3):
            run.step(Step(at % 2))
        run.executor.clear_metrics()
        run.executor.run_val_step(0, valid=6)
        run.executor.reduce_metrics()
        return run.bits()

    both = on_two_ranks(name, half, body)
    with Run(compiled(name, half)) as run:
        alone = body(run, 0)
    assert both[0] == both[1]
    assert {n: b for n, b in both[0].items() if n in alone and b != alone[n]} == {}


def test_two_ranks_follow_the_mean_of_their_gradients() -> None:
    """One step of plain SGD on different batches, against the gradients that each rank finds alone."""
    model = compiled("cbr", "fp32", weight_decay=0.0)

    def gradients(rank: int) -> dict[str, npt.NDArray[Any]]:
        with Run(model) as run:
            other_batches(run, rank)
            start = {p.name: run.executor.read(p.weight).copy() for p in model.parameters}
            run.step(Step(0))
            return {p.name: (start[p.name] - run.executor.read(p.weight)) / LR for p in model.parameters}

    def body(run: Run, rank: int) -> tuple[Bits, dict[str, npt.NDArray[Any]]]:
        other_batches(run, rank)
        start = {p.name: run.executor.read(p.weight).copy() for p in run.model.parameters}
        run.step(Step(0))
        moved = {p.name: (start[p.name] - run.executor.read(p.weight)) / LR for p in run.model.parameters}
        return weights(run.bits()), moved

    (first, moved), (second, _) = on_two_ranks("cbr", "fp32", body, weight_decay=0.0)
    assert first == second
    alone = [gradients(rank) for rank in range(2)]
    for name, value in moved.items():
        mean = (alone[0][name] + alone[1][name]) / 2
        assert np.abs(value - mean).max() <= 1e-4 * max(1.0, np.abs(mean).max()), name
        assert np.abs(alone[0][name] - alone[1][name]).max() > 0, name


@pytest.mark.parametrize(("name", "half"), [("mlp", "fp32"), ("residual", "fp16")])
def test_a_step_that_overflows_on_one_rank_is_skipped_by_both(name: str, half: str) -> None:
    """Law 5 with several ranks."""

    def body(run: Run, rank: int) -> tuple[Bits, Bits, float, Bits]:
        other_batches(run, rank)
        run.step(Step(0))
        before = weights(run.bits())
        if rank:
            run.executor.own_train_slots[1].images.reshape(-1)[5] = np.inf
        run.step(Step(1))
        skipped, scale = weights(run.bits()), float(run.executor.read_scalar("scaling"))
        run.step(Step(0))
        return before, skipped, scale, weights(run.bits())

    both = on_two_ranks(name, half, body)
    for before, skipped, scale, after in both:
        assert skipped == before
        assert scale == (4096.0 if half == "fp16" else 1.0)
        assert after != before
    assert both[0] == both[1]


def test_the_deep_bucket_travels_while_the_first_layer_goes_backwards() -> None:
    """Nothing orders the first collective of a step after the backward pass of the first layer."""

    def body(run: Run, rank: int) -> bool:
        run.step(Step(0))
        run.bits()
        graph = run.fake.graph(run.fake.launched[-1])
        before = graph.ancestors()
        means = [i for i, op in enumerate(graph.ops) if op.name.startswith("all-reduce")]
        weight = [i for i, op in enumerate(graph.ops) if op.name.startswith("convolution weight") and "3->" in op.name]
        assert len(means) >= 2
        assert len(weight) == 1
        return not before[means[0]] >> weight[0] & 1 and not before[weight[0]] >> means[0] & 1

    assert on_two_ranks("residual", "fp32", body) == [True, True]
