"""Any call of CUDA may fail: the error is one of ours and names the GPU, and what was taken is given back."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import test_task_models
from cuda_emulator import compiler
from cuda_standin import CudaError, FakeCuda
from cuda_standin import device as stand_in

from renaissance import Predictor
from renaissance.backend.cuda import device as devices
from renaissance.core import gpus
from renaissance.core.errors import DeviceError, MemoryPlanError, without_frames
from renaissance.core.gpus import Gpu
from renaissance.task.models import SavedModel

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")

TAKES = {
    "malloc": "free",
    "hostAlloc": "freeHost",
    "streamCreateWithPriority": "streamDestroy",
    "eventCreateWithFlags": "eventDestroy",
    "graphInstantiate": "graphExecDestroy",
}
OTHERS = (
    *("memsetAsync", "memcpyAsync", "moduleLoadData", "moduleGetFunction", "launchKernel"),
    *("streamSynchronize", "eventRecord", "streamWaitEvent", "streamBeginCapture", "graphUpload", "graphLaunch"),
    "streamEndCapture",
)


class Failing(FakeCuda):
    """Call number ``at`` (from 1) of ``name`` fails, once."""

    def __init__(self, name: str = "", at: int = 0) -> None:
        super().__init__(check=False)
        self.fails, self.seen = (name, at), Counter[str]()


def failing(name: str) -> Any:
    def call(self: Failing, *arguments: Any, **options: Any) -> Any:
        self.seen[name] += 1
        if self.fails == (name, self.seen[name]):
            raise CudaError("MemoryAllocation", f"planted in {name}")
        return getattr(FakeCuda, name)(self, *arguments, **options)

    return call


for _name in (*TAKES, *OTHERS):
    setattr(Failing, _name, failing(_name))


def use(fake: Failing, model: SavedModel, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """Compile for the GPU and predict; the error, without the frames that keep things alive."""
    monkeypatch.setattr(devices, "open_device", lambda index, **options: stand_in(fake))
    try:
        Predictor(model, gpu=0, batch=2).predict(test_task_models.pictures(1))
    except Exception as error:
        return without_frames(error)
    finally:
        gc.collect()
    return None


def test_whatever_call_fails_the_error_names_the_gpu_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: (Gpu(0, "stand-in", (9, 0)),))
    model, sound = test_task_models.saved_model(test_task_models.POOLED), Failing()
    assert use(sound, model, monkeypatch) is None
    for name in (*TAKES, *OTHERS):
        count = sound.seen[name]
        for at in sorted({1, min(2, count), min(3, count), count} if name in TAKES else {1, count}):
            fake, where = Failing(name, at), f"{name}, call {at} of {count}"
            error = use(fake, model, monkeypatch)
            if name == "malloc":
                assert isinstance(error, MemoryPlanError), where
                assert "use a smaller batch" in str(error)
            elif not (name == "streamSynchronize" and at == count):  # that one gives back
                assert isinstance(error, DeviceError), (where, error)
                assert "GPU 0" in str(error) or "page-locked" in str(error), (where, error)
            for taken, given_back in TAKES.items():
                assert fake.counts[taken] == fake.counts[given_back], (where, taken)
            assert not fake.memory.blocks, where
