"""Random models of every kind of layer, run for a few steps: the layout of memory changes no bit, memory that nobody
wrote is never read, and the reference backend gives the same loss and gradients.

Each model runs four times: packed by lifetime, every value in memory of its own, packed with all values poisoned with
NaN before every step, and node by node on the reference backend.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from blueprint_strategies import Drawn, blueprints
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from request_strategies import fitting_requests

from renaissance.backend.executor import GraphExecutor
from renaissance.core.dtype import DType
from renaissance.graph import CompiledModel, CompileRequest, Variant, compile_model
from renaissance.tensor import fill_parameter

SEED = 3
LR = 0.05
Outcome = dict[str, npt.NDArray[Any]]


def started(model: CompiledModel, backend: str, poison: bool = False) -> GraphExecutor:
    """Parameters of both signs, averages beside them, and random inputs in all slots."""
    executor = GraphExecutor(model, backend=backend, poison=poison)
    rng = np.random.default_rng(SEED)
    for p in model.parameters:
        values = fill_parameter(p.init, p.shape, SEED, p.ordinal)
        if not p.decay:
            values = values + rng.normal(0, 0.2, values.shape).astype(np.float32)
        for tensor in (p.weight, p.ema):
            if tensor is not None:
                executor.array(tensor)[...] = values
    for norm in model.batch_norms:
        executor.array(norm.prev_var)[...] = 1.0
    for name, value in model.scalar_init.items():
        executor.write_scalar(name, value)
    executor.write_scalar("seed_low", SEED)
    executor.cast_weights()
    for slot in executor.own_train_slots + executor.own_train_end_slots + executor.own_val_slots:
        values = rng.normal(size=slot.images.shape).astype(np.float32)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        slot.images[...] = bf16 if model.request.half is DType.BF16 else values
        slot.labels[...] = rng.integers(0, model.request.num_classes, slot.labels.shape)
    return executor


def outcome(executor: GraphExecutor) -> Outcome:
    """Loss and gradients of the first step; then the loss of every kind of step, and all state at the end."""
    model, request = executor.model, executor.model.request
    executor.run_train_step(0, lr=LR, valid=request.train_batch)
    found: Outcome = {f"{p.name} gradient": executor.array(p.grad).copy() for p in model.parameters}

    def note(what: str) -> None:
        found[what] = np.array(executor.read_scalar("loss"))

    note("loss 1")
    executor.run_train_step(1, frozen=request.freeze_first_layer, valid=max(1, request.train_batch - 1))
    note("loss 2")
    if request.train_last is not None:
        executor.run_train_step(0, Variant.TRAIN_LAST, valid=request.train_last)
        note("loss of the tail")
    if request.train_end_size is not None:
        executor.run_train_step(1, Variant.TRAIN_LOWRES, valid=request.train_batch)
        note("loss at the final resolution")
    for ema in (False, True)[: 1 + request.ema]:
        executor.run_val_step(0, valid=request.val_batch, ema=ema)
        note(f"validation, ema {ema}")
        if request.val_last is not None:
            executor.run_val_step(1, Variant.VAL_LAST, valid=request.val_last, ema=ema)
            note(f"validation of the tail, ema {ema}")
    return found | {model.tensor(i).name: executor.array(i).copy() for i in model.state}


def assert_same_bits(a: Outcome, b: Outcome, what: str) -> None:
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert not different, f"{what}: {different}"


@st.composite
def models(draw: st.DrawFn) -> tuple[Drawn, CompileRequest]:
    model = draw(blueprints())
    half = draw(st.sampled_from([None, None, DType.BF16]))
    return model, draw(fitting_requests(model, half=half, world_size=1, reuse=True))


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(models())
def test_memory_layout_changes_no_bit_and_the_reference_agrees(case: tuple[Drawn, CompileRequest]) -> None:
    drawn, request = case
    tight = compile_model(drawn.blueprint, request)
    loose = compile_model(drawn.blueprint, replace(request, reuse=False))
    assert loose.arena_bytes >= tight.arena_bytes
    ours = outcome(started(tight, "cpu"))
    assert_same_bits(ours, outcome(started(loose, "cpu")), "without reuse")
    assert_same_bits(ours, outcome(started(tight, "cpu", poison=True)), "with unused memory poisoned")
    reference = outcome(started(tight, "reference"))
    assert abs(ours["loss 1"] - reference["loss 1"]) <= (1e-4 if request.half is None else 0.1) * (1 + ours["loss 1"])
    if request.half is None:
        gradients = [name for name in ours if name.endswith("gradient")]
        largest = max(np.abs(reference[name]).max() for name in gradients)
        errors = {name: np.abs(ours[name] - reference[name]).max() / (largest + 1e-3) for name in gradients}
        assert max(errors.values()) < 2e-3, errors
