"""GraphExecutor: captured steps equal uncaptured ones, allocate nothing, and read their inputs from the slots."""

from __future__ import annotations

import gc
import platform
import threading
import tracemalloc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from renaissance.backend import GraphExecutor
from renaissance.backend.cpu.threads import runtime
from renaissance.backend.registry import Call, CaptureContext, NativeCall, PythonCall, default_registry
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import (
    DeviceError,
    DTypeError,
    MemoryPlanError,
    MissingKernelError,
    ShapeError,
    ValueRejected,
)
from renaissance.graph import (
    BluePrint,
    CompiledModel,
    CompileRequest,
    GraphId,
    Node,
    Variant,
    bn,
    compile_model,
    conv,
    fc,
    relu,
    seq,
)
from renaissance.graph.captured import CaptureMode
from renaissance.tensor import fill_parameter

BATCH, SIDE, CLASSES = 12, 6, 5
PROFILES: dict[str, dict[str, Any]] = {
    "fp32 adamw": {"optimizer": OptimizerKind.ADAMW},
    "bf16 adamw": {"optimizer": OptimizerKind.ADAMW, "half": DType.BF16},
    "fp32 momentum": {"optimizer": OptimizerKind.SGD_MOMENTUM},
}


def compiled(**changes: Any) -> CompiledModel:
    request: dict[str, Any] = {
        "height": SIDE, "width": SIDE, "channels": 1, "num_classes": CLASSES, "train_batch": BATCH,
        "val_batch": BATCH, "train_last": 7, "label_smoothing": 0.1, "weight_decay": 1e-2,
    }  # fmt: skip
    layers = seq(fc(24), relu(), fc(16), relu(), fc(CLASSES))
    return compile_model(BluePrint(layers), CompileRequest(**(request | changes)))


def start(executor: GraphExecutor, seed: int = 5) -> None:
    model = executor.model
    for p in model.parameters:
        executor.array(p.weight)[...] = fill_parameter(p.init, p.shape, seed, p.ordinal)
    for name, value in model.scalar_init.items():
        executor.write_scalar(name, value)
    executor.cast_weights()
    rng = np.random.default_rng(seed)
    for slot in (*executor.own_train_slots, *executor.own_val_slots):
        values = rng.standard_normal(slot.images.shape).astype(np.float32)
        slot.images[...] = bf16_from_fp32(values) if model.request.half else values
        slot.labels[:] = rng.integers(0, CLASSES, slot.labels.shape)


def state(executor: GraphExecutor) -> list[bytes]:
    return [executor.array(i).tobytes() for i in executor.model.state]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("threads", [1, 2])
def test_ten_replays_equal_ten_uncaptured_steps_bit_for_bit(profile: str, threads: int) -> None:
    model = compiled(**PROFILES[profile])
    replayed, eager = GraphExecutor(model, threads=threads), GraphExecutor(model, threads=threads)
    for executor in (replayed, eager):
        start(executor)
    first = state(eager)
    for step in range(10):
        variant = Variant.TRAIN_LAST if step == 9 else Variant.TRAIN_BASE
        replayed.run_train_step(step % 2, variant, lr=0.01, valid=7 if step == 9 else BATCH)
        eager.write_scalar("lr", 0.01)
        eager.write_scalar("batch_valid", 7 if step == 9 else BATCH)
        eager.run_uncaptured(variant, step % 2)
        assert state(replayed) == state(eager), f"step {step}"
    assert state(eager) != first


@pytest.mark.parametrize("profile", PROFILES)
def test_the_compiled_backend_follows_the_reference(profile: str) -> None:
    model = compiled(**PROFILES[profile])
    native, reference = GraphExecutor(model), GraphExecutor(model, backend="reference")
    for executor in (native, reference):
        start(executor)
        for step in range(4):
            executor.run_train_step(step % 2, lr=0.01, valid=BATCH)
        executor.run_val_step(1, valid=BATCH)
    tolerance = 3e-2 if model.request.half else 1e-4
    for p in model.parameters:
        a, b = native.array(p.weight), reference.array(p.weight)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), p.name
    assert native.read_scalar("loss") == pytest.approx(reference.read_scalar("loss"), rel=tolerance)
    assert native.read_scalar("accum_count") == reference.read_scalar("accum_count") == 5 * BATCH


def test_a_hundred_steps_allocate_nothing() -> None:
    """Law 3: arena allocations 0, Python heap growth bounded."""
    executor = GraphExecutor(compiled(**PROFILES["bf16 adamw"]), threads=2)
    start(executor)
    run_steps(executor, 4)
    allocations = executor.arena.allocations
    gc.collect()
    tracemalloc.start()
    try:
        run_steps(executor, 2)
        before = tracemalloc.get_traced_memory()[0]
        run_steps(executor, 100)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert executor.arena.allocations == allocations
    assert grown < 4096


def test_on_the_host_a_slot_is_given_back_and_a_number_known_when_a_step_returns() -> None:
    executor, given_back = GraphExecutor(compiled(), backend="reference"), []
    start(executor)
    executor.run_train_step(0, lr=0.01, valid=BATCH - 1)
    executor.release_when_copied(0, lambda: given_back.append(0))
    assert given_back == [0]
    executor.drain()
    assert executor.scalars() == executor.scalars_soon()
    assert executor.scalars()["accum_count"] == BATCH - 1
    lr = executor.model.scalar("lr")
    executor.write(lr, np.array(0.5))
    assert executor.read(lr).shape == (1, 1, 1, 1)
    assert executor.read_scalar("lr") == 0.5
    assert executor.notes() == {}


def run_steps(executor: GraphExecutor, count: int) -> None:
    for step in range(count):
        executor.run_train_step(step % 2, lr=0.01, valid=BATCH)
        executor.run_val_step(step % 2, valid=BATCH)


def test_a_planted_allocation_is_refused() -> None:
    executor = GraphExecutor(compiled())
    with pytest.raises(MemoryPlanError, match="planted: 64 bytes were asked for after compile"):
        executor.arena.block(64, "planted")


def test_the_callers_slots_are_read_in_place() -> None:
    model = compiled(**PROFILES["bf16 adamw"])
    rng = np.random.default_rng(2)
    slots = [(slot_memory((BATCH, SIDE, SIDE, 1), rng), np.zeros(BATCH, np.int32)) for _ in range(4)]
    executor = GraphExecutor(model, train_slots=slots, val_slots=[])
    start(executor)
    losses = []
    for slot in range(4):
        executor.write_scalar("lr", 0.0)
        executor.run_train_step(slot, valid=BATCH)
        losses.append(executor.read_scalar("loss"))
    assert len(set(losses)) == 4, "each slot has its own images"
    slots[2][1][:] = 1
    executor.run_train_step(2, valid=BATCH)
    assert executor.read_scalar("loss") != losses[2], "labels are read when the step runs"
    with pytest.raises(ValueRejected, match=r"input slot 4; expected 0 to 3"):
        executor.run_train_step(4)


def slot_memory(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.uint16]:
    return bf16_from_fp32(rng.standard_normal(shape).astype(np.float32))


def test_addresses_serve_as_slots() -> None:
    model = compiled()
    rng = np.random.default_rng(2)
    images = [rng.standard_normal((BATCH, SIDE, SIDE, 1)).astype(np.float32) for _ in range(2)]
    labels = np.arange(BATCH, dtype=np.int32) % CLASSES
    losses = []
    for memory in ([(i, labels) for i in images], [(i.ctypes.data, labels.ctypes.data) for i in images]):
        executor = GraphExecutor(model, train_slots=memory, val_slots=[])
        start(executor)
        executor.run_train_step(1, lr=0.01, valid=BATCH)
        losses.append(executor.read_scalar("loss"))
    assert losses[0] == losses[1]


def test_released_slots_are_not_referenced_and_not_run() -> None:
    """The rings can be unmapped; what the arena holds stays readable."""
    labels = np.zeros(BATCH, np.int32)
    images = [np.zeros((BATCH, SIDE, SIDE, 1), np.float32) for _ in range(2)]
    executor = GraphExecutor(compiled(), train_slots=[(i, labels) for i in images], val_slots=[])
    start(executor)
    held = weakref.ref(images.pop())
    gc.collect()
    assert held() is not None
    executor.release_slots()
    gc.collect()
    assert held() is None
    assert executor.array(executor.model.parameters[0].weight).any()
    with pytest.raises(ValueRejected, match="no slots are bound"):
        executor.run_train_step(1)
    with pytest.raises(ValueRejected, match="no slots are bound"):
        executor.run_uncaptured(Variant.TRAIN_BASE, 1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_short_batch_reads_its_own_rows_only(backend: str) -> None:
    executor = GraphExecutor(compiled(val_last=5), backend=backend)
    start(executor)
    executor.own_train_slots[0].images[7:] = np.nan
    executor.run_train_step(0, Variant.TRAIN_LAST, lr=0.01, valid=7)
    assert executor.read_scalar("has_nan") == 0
    executor.own_val_slots[1].images[5:] = np.nan
    executor.run_val_step(1, Variant.VAL_LAST, valid=5)
    assert np.isfinite(executor.read_scalar("loss"))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_validation_batch_may_be_larger_than_a_training_batch(backend: str) -> None:
    executor = GraphExecutor(compiled(val_batch=3 * BATCH), backend=backend)
    start(executor)
    slot = executor.own_val_slots[0]
    executor.run_val_step(0, valid=3 * BATCH)
    executor.own_val_slots[1].labels[:] = executor.array(executor.model.predicted, Variant.VAL_BASE).reshape(-1)
    executor.own_val_slots[1].images[...] = slot.images
    executor.run_val_step(1, valid=3 * BATCH)
    assert executor.read_scalar("top1") == 1


def test_the_team_has_its_size_in_whatever_thread_a_step_is_launched() -> None:
    """The size belongs to a thread: without the first call of a program, oneDNN would use every core there."""
    executor, sizes = GraphExecutor(compiled(), threads=3), []
    start(executor)

    def launch() -> None:
        library = runtime().library
        library.omp_set_num_threads(1)
        executor.run_train_step(0, lr=0.01, valid=BATCH)
        sizes.append(library.omp_get_max_threads())

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert sizes == [3]


def test_a_slot_that_is_too_small_or_not_contiguous_is_named() -> None:
    model, labels = compiled(), np.zeros(BATCH, np.int32)
    small = np.zeros((BATCH - 1, SIDE, SIDE, 1), np.float32)
    with pytest.raises(ShapeError, match=r"slot 0, data_a: an array of 1584 bytes.*at least 1728"):
        GraphExecutor(model, train_slots=[(small, labels)])
    strided = np.zeros((BATCH, SIDE, SIDE, 2), np.float32)[..., :1]
    with pytest.raises(ShapeError, match="contiguous: False"):
        GraphExecutor(model, train_slots=[(strided, labels)])


def test_a_slot_of_another_element_type_is_named() -> None:
    images, labels = np.zeros((BATCH, SIDE, SIDE, 1), np.float32), np.zeros(BATCH, np.int32)
    with pytest.raises(DTypeError, match=r"slot 0, data_a: an array of float32; expected uint16, which stores BF16"):
        GraphExecutor(compiled(half=DType.BF16), train_slots=[(images, labels)])
    with pytest.raises(DTypeError, match=r"slot 0, label_a: an array of int64; expected int32"):
        GraphExecutor(compiled(), val_slots=[(images, labels.astype(np.int64))])


def test_variants_of_equal_size_share_a_capture() -> None:
    executor = GraphExecutor(compiled())
    step = executor._steps
    assert step[Variant.TRAIN_BASE, 0, False] is step[Variant.TRAIN_LOWRES, 0, False]
    assert step[Variant.TRAIN_LAST, 1, False] is step[Variant.TRAIN_LOWRES_LAST, 1, False]
    assert step[Variant.VAL_BASE, 0, False] is step[Variant.VAL_LAST, 0, False]
    assert len({id(s) for s in step.values()}) == 2 * 3


def test_a_step_of_a_skipped_gradient_leaves_no_trace() -> None:
    """Law 5, through the executor: an Inf in the images of one step changes nothing that persists."""
    executor = GraphExecutor(compiled(**PROFILES["fp32 adamw"]))
    start(executor)
    executor.run_train_step(0, lr=0.01, valid=BATCH)
    before = state(executor)
    executor.own_train_slots[1].images[3] = np.inf
    executor.run_train_step(1, lr=0.01, valid=BATCH)
    assert executor.read_scalar("has_nan") == 1
    assert state(executor) == before
    executor.run_train_step(0, lr=0.01, valid=BATCH)
    assert state(executor) != before


def test_service_graphs_run_alone() -> None:
    executor = GraphExecutor(compiled(**PROFILES["bf16 adamw"]))
    start(executor)
    executor.run_val_step(0, valid=BATCH)
    assert executor.read_scalar("accum_count") == BATCH
    executor.clear_metrics()
    assert executor.read_scalar("accum_count") == executor.read_scalar("accum_loss") == 0
    weight = executor.model.parameters[0]
    assert weight.half is not None
    executor.array(weight.weight)[...] = 1.5
    executor.cast_weights()
    assert (executor.array(weight.half) == 0x3FC0).all()
    executor.run_graph(GraphId.VAL_RESULT_COMM)
    with pytest.raises(ValueRejected, match="DEEP_FWD_BWD is part of a step"):
        executor.run_graph(GraphId.DEEP_FWD_BWD)


def test_variants_are_checked() -> None:
    executor = GraphExecutor(compiled(), backend="reference")
    with pytest.raises(ValueRejected, match="VAL_BASE is not a training variant"):
        executor.run_train_step(0, Variant.VAL_BASE)
    with pytest.raises(ValueRejected, match="TRAIN_LAST is not a validation variant"):
        executor.run_val_step(0, Variant.TRAIN_LAST)
    with pytest.raises(ValueRejected, match="wait policy 'active': the reference backend has no threads"):
        GraphExecutor(compiled(), backend="reference", wait_policy="active")
    with pytest.raises(ValueRejected, match="unknown backend 'tpu'"):
        GraphExecutor(compiled(), backend="tpu")


def test_more_rows_than_a_batch_has_are_refused_before_anything_is_written() -> None:
    executor = GraphExecutor(compiled(), backend="reference")
    start(executor)
    before = state(executor)
    for variant, valid in ((Variant.TRAIN_BASE, BATCH + 1), (Variant.TRAIN_LAST, 8), (Variant.TRAIN_BASE, -1)):
        with pytest.raises(ValueRejected, match=f"{variant.name}: {valid} rows of the batch count; expected 0 to"):
            executor.run_train_step(0, variant, valid=valid)
    with pytest.raises(ValueRejected, match=f"VAL_BASE: 99 rows of the batch count; expected 0 to its size {BATCH}"):
        executor.run_val_step(0, valid=99)
    assert executor.read_scalar("batch_valid") == BATCH
    assert state(executor) == before


def test_validation_reads_what_belongs_to_its_weights_whatever_was_run_between() -> None:
    """Folded batch norms of both kinds of weights lie in the same memory."""
    layers = seq(conv(4, 3), relu(), bn(), fc(CLASSES))  # a batch norm that no convolution takes in
    request = CompileRequest(
        height=SIDE, width=SIDE, channels=1, num_classes=CLASSES, train_batch=BATCH, val_batch=BATCH, ema=True
    )
    executor = GraphExecutor(compile_model(BluePrint(layers), request), backend="reference")
    start(executor)
    executor.run_train_step(0, lr=0.1, valid=BATCH)
    losses = []
    for ema in (False, True):
        executor.run_val_step(0, valid=BATCH, ema=ema)
        losses.append(executor.read_scalar("loss"))
    assert losses[0] != losses[1]
    executor.run_graph(GraphId.UPDATE_BN_INF_PARAMS)
    executor.run_val_step(0, ema=True)
    assert executor.read_scalar("loss") == losses[1]
    executor._prepare[False] = _Failing()
    with pytest.raises(DeviceError, match="half way"):
        executor.run_val_step(0, ema=False)
    executor.run_val_step(0, ema=True)
    assert executor.read_scalar("loss") == losses[1]


class _Failing:
    """A program that cannot be run."""

    mode = CaptureMode.EAGER

    def launch(self) -> None:
        raise DeviceError("half way")


def test_an_op_without_a_kernel_fails_at_compile_by_name() -> None:
    with pytest.raises(MissingKernelError, match="RANGE_MEAN_ALLREDUCE has no kernel on backend 'cpu'"):
        GraphExecutor(compiled(world_size=2))


def test_a_call_of_another_backend_is_refused_not_left_out() -> None:
    registry = default_registry("cpu")
    registry._launchers["LABEL_COPY", "cpu"] = lambda node, ctx: [PythonCall(lambda: None, "LABEL_COPY #1")]
    with pytest.raises(ValueRejected, match=r"LABEL_COPY #1: PythonCall on backend 'cpu'"):
        GraphExecutor(compiled(), registry=registry)


def test_a_failing_node_is_named() -> None:
    registry = default_registry("cpu")
    broken = registry.launcher("LABEL_COPY", "cpu")

    def launch(node: Node, ctx: CaptureContext) -> list[Call]:
        from renaissance.backend.cpu.onednn import Arg, onednn

        a = onednn().desc((4, 4), DType.FP32)
        call = onednn().matmul(a, a, None, a).bind({Arg.SRC: (a, 0)}, 0, "LABEL_COPY #1")
        assert isinstance(call, NativeCall)
        return [*broken(node, ctx), call]

    registry._launchers["LABEL_COPY", "cpu"] = launch
    executor = GraphExecutor(compiled(), registry=registry)
    with pytest.raises(DeviceError, match=r"LABEL_COPY #1: oneDNN status 2 \(invalid arguments\)"):
        executor.run_train_step(0)


def test_programs_print_as_stable_text() -> None:
    executor = GraphExecutor(compiled())
    text = executor.program(Variant.VAL_BASE, 0)
    assert text == GraphExecutor(compiled()).program(Variant.VAL_BASE, 0)
    assert "FC_FWD" in text
    assert executor.profile()["dtype"] == "fp32"
    assert executor.versions()["onednn"] == executor.profile()["onednn"]
    reference = GraphExecutor(compiled(), backend="reference").profile()
    assert reference == {
        "backend": "reference", "dtype": "fp32", "machine": platform.machine(), "numpy": np.__version__
    }  # fmt: skip
