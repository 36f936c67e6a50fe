"""Random models of every kind of layer on the stand-in for CUDA: no race, captured and uncaptured steps agree bit for
bit, memory that nobody wrote is never read, and the reference backend finds the same loss and gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from blueprint_strategies import Drawn, blueprints
from cuda_emulator import compiler
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from request_strategies import fitting_requests
from training_bench import Run, Step, run_step, start

from renaissance.backend.executor import GraphExecutor
from renaissance.core.dtype import DType
from renaissance.graph import CompiledModel, CompileRequest, Variant, compile_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")


def steps_of(request: CompileRequest) -> list[Step]:
    """One of every kind that the model has."""
    steps = [Step(0), Step(1, option=request.freeze_first_layer, missing=int(request.train_batch > 1))]
    if request.train_last is not None:
        steps.append(Step(0, Variant.TRAIN_LAST))
    if request.train_end_size is not None:
        steps.append(Step(1, Variant.TRAIN_LOWRES))
    for ema in (False, True)[: 1 + request.ema]:
        steps.append(Step(0, Variant.VAL_BASE, ema))
        if request.val_last is not None:
            steps.append(Step(1, Variant.VAL_LAST, ema))
    return steps


@st.composite
def models(draw: st.DrawFn) -> tuple[Drawn, CompileRequest]:
    model = draw(blueprints())
    half = draw(st.sampled_from([None, None, DType.BF16, DType.FP16]))
    return model, draw(fitting_requests(model, half=half, world_size=1, reuse=True, external_inputs=False))


def played(model: CompiledModel, seed: int, captured: bool, poison: bool = False) -> dict[str, bytes]:
    with Run(model, seed, poison=poison) as run:
        for step in steps_of(model.request):
            run.step(step, captured)
        return run.bits()


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(models())
def test_any_model_trains_on_the_stand_in_as_on_the_reference(case: tuple[Drawn, CompileRequest]) -> None:
    drawn, request = case
    model = compile_model(drawn.blueprint, request)
    expected = played(model, 1, captured=True)
    assert played(model, 2, captured=False, poison=True) == expected
    with Run(model, 3) as run:
        reference = GraphExecutor(model, backend="reference")
        start(reference, [*reference.own_train_slots, *reference.own_train_end_slots])
        losses, gradients = [], []
        for executor in (run.executor, reference):
            run_step(executor, Step(0))
            losses.append(float(executor.read_scalar("loss")))
            gradients.append([np.array(executor.read(p.grad), np.float64) for p in model.parameters])
    assert abs(losses[0] - losses[1]) <= (1e-4 if request.half is None else 0.1) * (1 + abs(losses[1]))
    if request.half is None:
        assert relative(*gradients) < 2e-3


def relative(found: list[npt.NDArray[np.float64]], exact: list[npt.NDArray[np.float64]]) -> float:
    """The largest error beside the largest gradient of the model."""
    largest = max(np.abs(e).max() for e in exact)
    return float(max(np.abs(f - e).max() for f, e in zip(found, exact, strict=True)) / (largest + 1e-3))
