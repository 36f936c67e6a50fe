"""A whole DeepLearningTask on the stand-in for CUDA: a real dataserver, real kernels on the CPU, everything in between.

What is replaced is the probe for GPUs and ``open_device``; nothing in the task, the data plane or the executor is.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_task_models
import test_task_simple
from cuda_emulator import compiler
from cuda_standin import SYNCHRONISING, CudaError, FakeCuda, timed
from cuda_standin import device as stand_in
from task_data import CLASSES, write_stripes

from renaissance import (
    GLOBAL_SETTING,
    LARS,
    PREPROCESSOR_SETTING,
    TTA,
    BluePrint,
    CenterCrop,
    CosineAnnealingLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    Predictor,
    RandomCrop,
    add2,
    bn,
    conv,
    conv_bn_relu,
    dropout,
    fc,
    gap,
    identity,
    load_model,
    relu,
    seq,
)
from renaissance.backend.cuda import device as devices
from renaissance.backend.cuda.program import Program
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.core import gpus
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, RenaissanceError
from renaissance.core.gpus import Gpu
from renaissance.data.private_daemon import start_private_daemon
from renaissance.task import SilentReporter, TrainingResult
from renaissance.task.loop import TrainingLoop
from renaissance.task.result import read_result

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")

TRAIN, VAL, BATCH, SIDE = 76, 20, 16, 10
"""Both sets end with a short batch."""
STEPS = -(-TRAIN // BATCH)
EPOCHS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data"), train=TRAIN, val=VAL)


@pytest.fixture(scope="module")
def address(data: Path) -> Iterator[str]:
    """Of a dataserver for the runs that need none of their own."""
    with start_private_daemon({"mnist": data}, workers=1) as daemon:
        yield daemon.address


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeCuda]:
    """GPU 0 is there, and it is the stand-in: the runtime of each device that is opened."""
    opened: list[FakeCuda] = []

    def open_device(
        index: int, *, tf32: bool = False, connect: object = None, choices: PlanChoices | None = None
    ) -> devices.DeviceContext:
        assert index == 0
        opened.append(FakeCuda(seed=len(opened)))
        return stand_in(opened[-1], tuning=None if choices is None else timed(choices))

    monkeypatch.setattr(gpus, "visible_gpus", lambda: (Gpu(0, "stand-in", (9, 0)),))
    monkeypatch.setattr(devices, "open_device", open_device)
    return opened


@contextmanager
def settings(data: Path, device: str = "cuda", amp: bool = True, grows: bool = False) -> Iterator[None]:
    """``grows``: the last epoch is trained at a higher resolution than those before."""
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_gpu("0") if device == "cuda" else GLOBAL_SETTING.use_cpu()
        GLOBAL_SETTING.amp(amp).manual_seed(5).global_batch_size(BATCH).val_resolution(SIDE)
        GLOBAL_SETTING.train_resolution(*((0, SIDE - 2), (EPOCHS - 1, SIDE)) if grows else (SIDE,))
        PREPROCESSOR_SETTING.dataset("mnist", data).normalization(NormMode.MNIST)
        PREPROCESSOR_SETTING.train_transforms(RandomCrop(SIDE)).val_transforms(CenterCrop(SIDE)).commit()
        yield


class Told(SilentReporter):
    def __init__(self) -> None:
        self.text = ""

    def plan(self, text: str) -> None:
        self.text += text + "\n"


def small() -> DeepLearningTask:
    """A residual network with all that persists: batch norm, dropout, momentum, moving averages, a loss scale."""
    branch = seq(conv(8, 3, p=1), bn())
    net = seq(conv_bn_relu(8, 3, p=1), add2(identity(), branch), relu(), dropout(0.2), gap(), fc(CLASSES))
    task = DeepLearningTask().quiet().learning_curves(False).model(BluePrint(net)).total_epochs(EPOCHS)
    task.loss(CrossEntropyLoss().label_smoothing(0.1)).optimizer(LARS().weight_decay(1e-3))
    return task.scheduler(CosineAnnealingLR().base_lr(0.5).step_by_batch()).use_ema(0.9)


def trained(task: DeepLearningTask) -> TrainingResult:
    with task:
        task.compile()
        return task.run()


def test_a_run_that_was_broken_off_and_goes_on_ends_like_one_in_a_piece(
    data: Path, address: str, fakes: list[FakeCuda], tmp_path: Path
) -> None:
    with settings(data):
        straight = trained(small().dataserver(address).output(tmp_path / "straight"))
    assert len(straight.history) == EPOCHS
    assert straight.history[-1].train_loss < straight.history[0].train_loss
    assert all(r.ema_top1 is not None and r.top1 is not None for r in straight.history)
    written = read_result(tmp_path / "straight")
    assert written["numeric"]["backend"] == "cuda"
    assert (written["numeric"]["dtype"], written["numeric"]["gpu"]) == ("fp16", "stand-in")
    assert written["configuration"]["global"]["gpus"] == [0]
    assert written["versions"]["cuda_driver"]

    class PowerCut(Exception):
        pass

    left = STEPS + 3
    segment = TrainingLoop._segment

    def cut(self: TrainingLoop, end: int, *rest: Any, **named: Any) -> None:
        nonlocal left
        left -= end - self._next
        if left < 0:
            raise PowerCut
        segment(self, end, *rest, **named)

    told = Told()
    with settings(data):
        with pytest.MonkeyPatch.context() as cutting:
            cutting.setattr(TrainingLoop, "_segment", cut)
            with pytest.raises(PowerCut):
                trained(small().dataserver(address).output(tmp_path / "pieces").checkpoint_every(steps=2))
        resumed = trained(small().dataserver(address).output(tmp_path / "pieces").resume(True).reporter(told))
    assert "resume" in told.text
    assert resumed.weight_digest == straight.weight_digest
    assert resumed.ema_digest == straight.ema_digest
    assert resumed.data_digest == straight.data_digest
    for name in ("train_loss", "val_loss", "top1", "ema_loss", "ema_top1"):
        assert [getattr(r, name) for r in resumed.history] == [getattr(r, name) for r in straight.history], name


def test_a_gpu_trains_as_the_cpu_does_and_predicts_what_it_saved(
    data: Path, address: str, fakes: list[FakeCuda], tmp_path: Path
) -> None:
    results, probabilities = {}, {}
    pictures = np.random.default_rng(1).integers(0, 256, (5, SIDE, SIDE, 1), np.uint8)
    for device in ("cpu", "cuda"):
        with settings(data, device, amp=False, grows=True):
            task = small().dataserver(address).use_sema().freeze_first_layer_after(2).tta(TTA.LR).compile()
            results[device] = task.run()
            probabilities[device] = task.predict(pictures).probabilities
            task.save_model(tmp_path / f"{device}.safetensors")
    assert results["cpu"].data_digest == results["cuda"].data_digest
    for name in ("train_loss", "val_loss", "ema_loss"):
        a, b = ([getattr(r, name) for r in results[device].history] for device in ("cpu", "cuda"))
        np.testing.assert_allclose(a, b, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(probabilities["cpu"], probabilities["cuda"], atol=1e-3)
    on_cpu, on_gpu = load_model(tmp_path / "cuda.safetensors"), load_model(tmp_path / "cuda.safetensors", gpu=0)
    np.testing.assert_allclose(on_cpu.predict(pictures).probabilities, probabilities["cuda"], atol=1e-5)
    assert np.array_equal(on_gpu.predict(pictures).probabilities, probabilities["cuda"])
    half = Predictor(on_gpu.saved, batch=2, dtype=DType.FP16, gpu=0).predict(pictures)
    np.testing.assert_allclose(half.probabilities, probabilities["cuda"], atol=0.02)


def test_measured_plans_are_kept_and_belong_to_the_numeric_profile(
    data: Path, address: str, fakes: list[FakeCuda], tmp_path: Path
) -> None:
    file, told = tmp_path / "tuning" / "plans.json", [Told() for _ in range(3)]

    def task(number: int) -> DeepLearningTask:
        made = small().dataserver(address).reporter(told[number]).total_epochs(1)
        return made.tune(file).output(tmp_path / "run").checkpoint_every(steps=2)

    with settings(data):
        trained(task(0))
        numeric = read_result(tmp_path / "run")["numeric"]
        assert len(numeric["tuned"]) == 32
        with task(1).resume(True) as again:
            again.compile()
            assert again.engine.profile()["cudnn"] == numeric["cudnn"]
        stored = json.loads(file.read_text())
        for choice in stored["plans"].values():
            choice["plan"] = choice["plan"].replace("#1", "#0")
        file.write_text(json.dumps(stored))
        with pytest.raises(RenaissanceError, match=r"numeric\.tuned"), task(2).resume(True) as other:
            other.compile()
    count = len(stored["plans"])
    assert count > 10, "convolutions and products, of training and validation"
    assert f"tune   {file}: {count} plans, {count} measured now in 0." in told[0].text
    assert f"tune   {file}: {count} plans, none measured now" in told[1].text
    assert [fake.counts["malloc"] for fake in fakes] == [1 + count, 1, 1]


def watch(task: DeepLearningTask, fake: FakeCuda, waits: list[int]) -> None:
    """Count how often a training step waits, for anything but the former batch of its slot."""
    run_train_step = task.engine.executor.run_train_step

    def watched(*arguments: Any, **options: Any) -> None:
        with fake.phase() as inside:
            run_train_step(*arguments, **options)
        waits.append(sum(inside[name] for name in SYNCHRONISING if name != "eventSynchronize"))

    task.engine.executor.run_train_step = watched  # type: ignore[method-assign]


def test_a_run_says_how_batches_reach_the_gpu_waits_for_nothing_inside_a_step_and_leaves_nothing(
    data: Path, fakes: list[FakeCuda]
) -> None:
    told, waits = Told(), []
    with settings(data):
        task = small().reporter(told).total_epochs(1).compile()
        (fake,) = fakes
        assert "gpu    stand-in (sm_90)" in told.text
        assert "MB read in place" in told.text, "the rings of training and validation are registered where they lie"
        assert "a thread that launches" in told.text
        assert fake.counts["hostRegister"] == 2
        watch(task, fake, waits)
        task.run()
    assert waits == [0] * STEPS
    assert fake.counts["hostUnregister"] == 2, "the rings can be unmapped"
    kept = np.array(task.engine.read(task.compiled.parameters[0].weight))
    assert np.isfinite(kept).all(), "and the weights are still there"
    del task
    gc.collect()
    nothing_is_left(fake)


def test_a_gpu_that_fails_ends_the_run_with_its_error_and_what_to_resume_from(
    data: Path, fakes: list[FakeCuda], tmp_path: Path
) -> None:
    with settings(data):
        task = small().output(tmp_path).checkpoint_every(steps=2).compile()
        (fake,), run_train_step, steps = fakes, task.engine.executor.run_train_step, iter(range(STEPS))

        def failing(*arguments: Any, **options: Any) -> None:
            if next(steps) == 3:
                fake._failed = "kernel of a bad day"
            run_train_step(*arguments, **options)

        task.engine.executor.run_train_step = failing  # type: ignore[method-assign]
        batches = task._data.train  # type: ignore[union-attr]
        with pytest.raises(
            DeviceError, match=r"the GPU failed: .*kernel of a bad day.*; resume from .*checkpoint"
        ) as caught:
            task.run()
    assert caught.value.__cause__ is not None
    assert sum(batch is not None and not batch.released for batch in batches._held) <= 1, "but for the failed step's"
    assert task._data is None, "the dataserver is gone, too"


def test_a_model_that_cannot_be_captured_is_an_error_of_the_gpu_and_leaves_nothing(
    fakes: list[FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, calls = Program.capture, iter(range(100))

    def failing(self: Program) -> None:
        if next(calls) == 1:
            raise CudaError("StreamCaptureInvalidated", "planted")
        capture(self)

    monkeypatch.setattr(Program, "capture", failing)
    model = test_task_models.saved_model(test_task_models.POOLED)
    with pytest.raises(DeviceError, match=r"GPU 0 \(stand-in\): cudaErrorStreamCaptureInvalidated: planted"):
        Predictor(model, gpu=0)
    gc.collect()
    nothing_is_left(fakes[0])


def test_a_simple_task_runs_hand_built_graphs_on_a_gpu(fakes: list[FakeCuda]) -> None:
    test_task_simple.test_a_hand_built_step_trains_as_the_formulas_say("cuda")
    test_task_simple.test_what_validation_prepares_once_is_made_in_every_run("cuda")
    step = test_task_simple.build("cuda")
    fake = fakes[-1]
    with fake.phase() as inside:
        step.task.run_iter("step", "tanh", times=3)
    assert not any(inside[name] for name in SYNCHRONISING), "the host does not wait"
    assert inside["graphLaunch"] == 6
    del step
    gc.collect()
    for fake in fakes:
        nothing_is_left(fake)


def nothing_is_left(fake: FakeCuda) -> None:
    for taken, given_back in (
        ("malloc", "free"),
        ("hostAlloc", "freeHost"),
        ("hostRegister", "hostUnregister"),
        ("streamCreateWithPriority", "streamDestroy"),
        ("eventCreateWithFlags", "eventDestroy"),
        ("graphInstantiate", "graphExecDestroy"),
    ):
        assert fake.counts[taken] == fake.counts[given_back], taken
