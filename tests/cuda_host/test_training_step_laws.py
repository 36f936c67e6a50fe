"""Laws of a training step on the stand-in for CUDA: nothing is allocated, the host does not wait, the next batch is
copied meanwhile, every event is needed, and a step with an infinite gradient leaves no trace."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import CudaError, FakeCuda, Race
from cuda_standin.capture import replayed
from cuda_standin.work import Graph
from training_bench import MODELS, Run, Step, compiled, fill

from renaissance.core.dtype import DType
from renaissance.graph import Variant

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")
DEPTH = 4


def train(run: Run, steps: int, slot: int = 0) -> list[int]:
    """Steps as a task makes them: each slot of the ring in turn, given back when it has been copied."""
    released: list[int] = []
    for at in range(slot, slot + steps):
        run.step(Step(at % DEPTH))
        run.executor.release_when_copied(at % DEPTH, lambda at=at: released.append(at))
    return released


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_two_graph_launches_and_nothing_else(name: str) -> None:
    """Law 3. The host waits for a slot of the ring only, when the GPU is a whole ring behind."""
    with Run(compiled(name, "fp16"), depth=DEPTH) as run:
        steps = 12
        with run.fake.phase() as calls:
            released = train(run, steps)
        assert calls["graphLaunch"] == calls["eventRecord"] == calls["streamWaitEvent"] == 2 * steps
        assert set(calls) <= {"graphLaunch", "eventRecord", "streamWaitEvent", "eventQuery", "eventSynchronize"}
        assert len(released) > steps - DEPTH
        run.executor.drain()
        assert released == sorted(released)
        assert len(released) == steps
        with run.fake.phase() as calls:
            for at in range(4):
                run.executor.run_val_step(at % 2, valid=6)
        run.executor.scalars()
        assert not {"malloc", "hostAlloc", "hostRegister", "moduleLoadData", "streamBeginCapture"} & set(calls)
        assert calls["graphLaunch"] <= 2 * 4 + 2
        assert calls["kernel"] == calls["library"] == 0


def test_the_next_batch_is_copied_while_a_step_computes_and_never_over_one_that_is_read() -> None:
    overlaps = 0
    for seed in range(6):
        with Run(compiled("mlp", "fp32"), seed, depth=DEPTH) as run:
            run.bits()
            first = len(run.fake.trace)
            train(run, 3)
            run.device.synchronize()
            launches = [serial for serial, _ in run.fake.trace[first:]]
            order = sorted(set(launches))  # copy A, step A, copy B, step B, copy A, step A
            at = {serial: [i for i, s in enumerate(launches) if s == serial] for serial in order}
            assert len(order) == 6
            step, copy_b, copy_a = order[1], order[2], order[4]
            overlaps += at[step][0] < at[copy_b][0] < at[step][-1]
            assert at[copy_a][0] > at[step][-1]
    assert overlaps


@pytest.mark.parametrize("way", ["registered", "staged", "pageable"])
def test_however_host_memory_is_reached_the_bits_are_the_same(way: str) -> None:
    model = compiled("mlp", "fp32")
    with Run(model) as own:
        for at in range(2):
            own.step(Step(at))
        expected = own.bits()
    options = {
        "registered": {},
        "staged": {"registers": False},
        "pageable": {"registers": False, "largest_locked": 12000, "pageable": True},
    }
    with Run(model, FakeCuda(5, **options[way]), depth=DEPTH) as run:
        train(run, 2)
        assert run.bits() == expected
        words = {"registered": "read in place", "staged": "page-locked copy", "pageable": "from pageable memory"}
        assert words[way] in run.executor.notes()["memory"]
        assert (run.fake.counts["pageable"] > 0) == (way == "pageable")


def test_a_slot_that_has_been_given_back_may_be_filled_with_anything() -> None:
    """The dataserver writes into a slot as soon as it has it back."""
    model = compiled("mlp", "fp32")
    found = []
    for seed, depth in ((1, 0), (2, 2), (3, 3), (4, 4)):  # the executor's own slots first: they are waited for
        with Run(model, seed, depth=depth) as run:
            slots = run.ring.slots if run.ring else run.executor.own_train_slots
            for at in range(9):
                slot = slots[at % len(slots)]
                fill(slot, model, np.random.default_rng(at))
                run.step(Step(at % len(slots)))
                run.executor.release_when_copied(at % len(slots), lambda slot=slot: slot.images.fill(np.nan))
            found.append(run.bits())
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("name", MODELS)
def test_each_event_of_a_step_is_needed_or_proved_redundant(name: str) -> None:
    """Each wait is left out in turn: the capture fails or two operations race, or nothing that conflicts loses its
    order and the bits stay what they are."""
    with Run(compiled(name, "fp16"), depth=DEPTH) as run:
        train(run, 2)
        run.bits()
        whole = run.executor.arena.everything
        before = ctypes.string_at(whole.ptr, whole.nbytes)
        run.step(Step(2))
        expected, executable = run.bits(), run.fake.launched[-1]
        graph = run.fake.graph(executable)
        assert graph.waits == run.executor.program(Variant.TRAIN_BASE, 2).waits > 4
        redundant = unnoticed(run, executable)
        for wait, mutant in redundant:
            run.fake.replace(executable, mutant)
            ctypes.memmove(whole.ptr, before, whole.nbytes)
            run.step(Step(2))
            assert run.bits() == expected, f"without wait {wait}"
        run.fake.replace(executable, graph)
        others = [e for e in run.fake.executables() if e != executable]
        assert len(redundant) + sum(len(unnoticed(run, e)) for e in others) <= total_waits(run) // 20


def unnoticed(run: Run, executable: int) -> list[tuple[int, Graph]]:
    """The waits of a graph without which it is still whole and without a race."""
    graph, found = run.fake.graph(executable), []
    for wait in range(graph.waits):
        try:
            mutant = replayed(graph.log, wait)
            mutant.check(run.fake.memory)
        except (CudaError, Race):
            continue
        found.append((wait, mutant))
    return found


def total_waits(run: Run) -> int:
    return sum(run.fake.graph(e).waits for e in run.fake.executables())


def test_each_event_between_transfers_and_steps_is_needed_or_proved_redundant() -> None:
    model = compiled("mlp", "bf16")
    with Run(model, depth=DEPTH) as run:
        train(run, DEPTH + 1)
        expected = run.bits()
    noticed = []
    for wait in range(2 * (DEPTH + 1)):
        run = Run(model, depth=DEPTH)
        run.bits()
        run.fake.drop_wait = run.fake.counts["streamWaitEvent"] + wait
        try:
            train(run, DEPTH + 1)
        except Race:
            noticed.append(wait)
            continue
        assert run.bits() == expected
        run.close()
    # the first transfers into A and B have no earlier step to wait for
    assert noticed == [1, *range(3, 2 * (DEPTH + 1))]


OVERFLOWS = [("mlp", "fp32"), ("cbr", "bf16"), ("residual", "fp32"), ("residual", "fp16")]
RESULTS = {"loss", "has_nan", "skip_first"}
"""What every step writes anew, whether it counts or not."""


@pytest.mark.parametrize(("name", "half"), OVERFLOWS)
def test_a_step_with_an_infinite_gradient_leaves_no_trace_but_the_loss_scale(name: str, half: str) -> None:
    """Law 5. Steps on images that are not finite, between two that are, might as well not have been."""
    model = compiled(name, half)
    found = []
    for bad in ((), (np.inf, np.nan)):
        with Run(model, len(bad), depth=DEPTH) as run:
            run.step(Step(0))
            before = run.bits()
            for value in bad:
                image = run.ring.slots[1].images.reshape(-1)  # type: ignore[union-attr]
                image[3] = 0x7F80 if model.request.half is DType.BF16 else value
                run.step(Step(1))
                changed = {n for n, b in run.bits().items() if b != before[n]} - RESULTS
                assert changed == ({"scaling", "good_steps"} if half == "fp16" else set())
            if half == "fp16":
                assert run.executor.read_scalar("scaling") == 8192 / 2 ** len(bad)
                run.executor.write_scalar("scaling", 8192)
                run.executor.write_scalar("good_steps", 1)
            run.step(Step(2))
            found.append(run.bits())
    assert found[0] == found[1]


def test_metrics_of_steps_under_way_arrive_without_waiting_and_those_of_an_old_pass_do_not() -> None:
    with Run(compiled("mlp", "fp32"), 4, depth=DEPTH) as run:
        executor = run.executor
        with run.fake.phase() as calls:
            seen = []
            for at in range(40):
                train(run, 1, at)
                seen.append(executor.scalars_soon()["accum_count"])
        assert not {"streamSynchronize", "deviceSynchronize"} & set(calls)
        assert seen == sorted(seen)
        assert 0 < seen[-1] <= 240
        assert set(seen) <= {6.0 * n for n in range(41)}
        assert executor.scalars()["accum_count"] == 240
        train(run, 1)
        executor.scalars_soon()  # is on its way when a new pass begins
        executor.clear_metrics()
        run.device.synchronize()
        assert executor.scalars_soon()["accum_count"] == 0
        run.device.synchronize()
        assert executor.scalars_soon()["accum_count"] == 0
        train(run, 1)
        assert executor.scalars()["accum_count"] == 6


def test_slots_are_given_back_after_a_kernel_has_failed() -> None:
    handed: list[int] = []
    released: list[int] = []

    def steps(run: Run) -> None:
        for at in range(2 * DEPTH):
            run.step(Step(at % DEPTH))
            handed.append(at)
            run.executor.release_when_copied(at % DEPTH, lambda at=at: released.append(at))
        run.executor.scalars()

    def fail() -> None:
        raise RuntimeError("a kernel wrote where it may not")

    for seed in range(4):  # the host hears of it sooner or later
        handed.clear()
        released.clear()
        run = Run(compiled("mlp", "fp32"), seed, depth=DEPTH)
        run.fake.library(run.device.origin, "bad", fail, (), ())
        with pytest.raises(RuntimeError, match="a kernel wrote where it may not"):
            steps(run)
        with suppress(RuntimeError):
            run.executor.release_slots()
        assert released == handed
        run.executor.release_slots()
        run.device.close()
