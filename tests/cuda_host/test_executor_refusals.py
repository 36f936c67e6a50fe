"""What the executor for CUDA is asked for and does not have is refused by name, as the one for the CPU does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import FakeCuda, device
from training_bench import Run, compiled

from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.graph import GraphId, Variant

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")


@pytest.fixture(scope="module")
def executor() -> Iterator[CudaExecutor]:
    with Run(compiled("mlp")) as run:
        yield run.executor


def test_steps_and_graphs_that_a_model_does_not_have(executor: CudaExecutor) -> None:
    with pytest.raises(ValueRejected, match="VAL_BASE is not a training variant"):
        executor.run_train_step(0, Variant.VAL_BASE)
    with pytest.raises(ValueRejected, match="TRAIN_BASE is not a validation variant"):
        executor.run_val_step(0, Variant.TRAIN_BASE)
    with pytest.raises(ValueRejected, match="TRAIN_BASE: input slot 2; expected 0 to 1"):
        executor.run_train_step(2)
    with pytest.raises(ValueRejected, match="compiled without freeze_first_layer"):
        executor.run_train_step(0, frozen=True)
    with pytest.raises(ValueRejected, match="compiled without ema"):
        executor.run_val_step(0, ema=True)
    with pytest.raises(ValueRejected, match="TRAIN_BASE: 7 rows of the batch count; expected 0 to its size 6"):
        executor.run_train_step(0, valid=7)
    with pytest.raises(ValueRejected, match="DEEP_FWD_BWD is part of a step"):
        executor.run_graph(GraphId.DEEP_FWD_BWD)


def test_a_slot_is_given_back_after_its_own_step_only(executor: CudaExecutor) -> None:
    given_back: list[int] = []
    executor.run_train_step(0, lr=0.0, valid=6)
    with pytest.raises(ValueRejected, match="slot 1 cannot be given back: the last step was on"):
        executor.release_when_copied(1, lambda: given_back.append(1))
    executor.release_when_copied(0, lambda: given_back.append(0))
    executor.drain()
    assert given_back == [0]


def test_a_model_for_the_host_and_slots_that_do_not_fit() -> None:
    model = compiled("mlp")
    images, labels = np.zeros((6, 4, 4, 3), np.float32), np.zeros(6, np.int32)
    with FakeCuda() as fake, device(fake) as opened:
        with pytest.raises(ValueRejected, match="inputs in host memory; compile it with external_inputs=False"):
            CudaExecutor(compiled("mlp", cuda=False), device=opened)
        with pytest.raises(DTypeError, match=r"slot 0, .*: an array of float64; expected float32"):
            CudaExecutor(model, device=opened, train_slots=[(images.astype(np.float64), labels)])
        with pytest.raises(ShapeError, match=r"slot 0, .*: an array of 20 bytes.*expected at least 24"):
            CudaExecutor(model, device=opened, train_slots=[(images, labels[:5])])
