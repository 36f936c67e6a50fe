"""A run on GPUs as far as it goes without one: what is planned, what is refused, and that nothing falls back."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_fixtures import MNIST, no_daemon, own_settings  # noqa: F401  # fixtures
from test_task_models import POOLED, SIDE, pictures, saved_model

from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
    SGD,
    BluePrint,
    ConstantLR,
    CrossEntropyLoss,
    DeepLearningTask,
    Initializer,
    RandomCrop,
    conv_bn_relu,
    fc,
    gap,
    seq,
)
from renaissance.cli.errors import run_command
from renaissance.cli.main import main
from renaissance.core import gpus
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.gpus import Gpu
from renaissance.core.machine import CorePlan, WaitPolicy
from renaissance.graph.request import INITIAL_LOSS_SCALE
from renaissance.task.predict import Predictor
from renaissance.task.setup import Setup, make_setup
from renaissance.task.simple import SimpleTask


def task_for(ids: str = "0", **settings: Any) -> DeepLearningTask:
    """A task for GPUs that need not be here."""
    GLOBAL_SETTING.use_gpu(ids, present=False).global_batch_size(128).input_resolution(28)
    for name, value in settings.items():
        getattr(GLOBAL_SETTING, name)(value)
    PREPROCESSOR_SETTING.dataset("mnist", MNIST).train_transforms(RandomCrop(28)).commit()
    net = seq(conv_bn_relu(8, 3), gap(), fc(10))
    task = DeepLearningTask().quiet().model(BluePrint(net)).loss(CrossEntropyLoss())
    return task.optimizer(SGD()).scheduler(ConstantLR())


def setup_of(task: DeepLearningTask) -> Setup:
    return make_setup(task._options)


def test_a_run_on_a_gpu_is_compiled_for_inputs_in_its_memory_and_fp16_with_a_loss_scale() -> None:
    setup = setup_of(task_for("0-3", amp=True))
    request = setup.request(Initializer(), (None, None))
    assert (request.half, request.external_inputs, request.world_size) == (DType.FP16, False, 4)
    assert request.has_loss_scaling
    assert request.initial_loss_scale == INITIAL_LOSS_SCALE
    assert (setup.backend, setup.dtype, setup.batch) == ("cuda", DType.FP16, 32), "what the dataserver delivers, too"
    choice = setup.gpu(2)
    assert choice is not None
    assert (choice.index, choice.tf32) == (2, False)


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", DType.BF16), (False, DType.FP32)])
def test_other_types_need_no_loss_scale(amp: bool | str, dtype: DType) -> None:
    setup = setup_of(task_for(amp=amp))
    assert setup.dtype is dtype
    assert not setup.request(Initializer(), (None, None)).has_loss_scaling


OF_THE_CPU: dict[str, Callable[[DeepLearningTask], object]] = {
    "compute_threads is 2 in the task, but a GPU computes": lambda t: t.compute_threads(2),
    "compute_threads is 3 in GLOBAL_SETTING, but a GPU computes": lambda t: GLOBAL_SETTING.compute_threads(3),
    "compute_threads is 2 in the task's core plan, but a GPU computes": lambda t: t.cores(
        CorePlan.choose(compute_threads=2)
    ),
    "wait_policy is PASSIVE in the task's core plan, but a GPU computes": lambda t: t.cores(
        CorePlan.choose(compute_threads=1, wait_policy=WaitPolicy.PASSIVE)
    ),
    r"backend\('reference'\) computes on the CPU, but use_gpu\(\) was called": lambda t: t.backend("reference"),
}


@pytest.mark.parametrize("words", OF_THE_CPU)
def test_options_of_the_cpu_are_refused_by_name(words: str) -> None:
    task = task_for()
    OF_THE_CPU[words](task)
    with pytest.raises(ValueRejected, match=f"cannot compile: {words}; (drop|make the plan with CorePlan.beside_gpu)"):
        task.dry_run()


def test_compile_without_the_gpu_that_was_planned_with_is_an_error_before_a_daemon_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_for("0,1")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: (Gpu(0, "T4", (7, 5)),))
    with pytest.raises(DeviceError, match=r"use_gpu: GPU 0, 1 asked for, but there is no GPU 1; visible: 0 \(T4\)"):
        task.compile()


def test_a_run_for_gpus_elsewhere_is_planned_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: pytest.fail("nobody needs to know"))
    plan = task_for("0,1", amp=True).dry_run()
    text = plan.text()
    assert "backend    cuda on GPU 0, 1, fp16" in text
    assert "a thread that launches" in text
    assert plan.train_steps == -(-60000 // 128)
    assert plan.ring_bytes < 2 * 4 * (64 * 28 * 28 * 2 + 64 * 16 + 3 * 4096), "two rings of four fp16 batches"


def test_cores_beside_a_gpu_are_for_workers_and_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renaissance.core.machine.allowed_cpus", lambda: tuple(range(16)))
    monkeypatch.setattr("renaissance.core.machine.cpu_quota", lambda: None)
    plan = CorePlan.beside_gpu()
    assert (plan.workers, plan.worker_cpus, plan.compute_cpus, plan.worker_nice) == (15, (), (), 5)
    assert CorePlan.beside_gpu(processes=4).workers == 12
    assert CorePlan.beside_gpu(processes=16).workers == 1
    assert CorePlan.beside_gpu(workers=2).workers == 2
    assert plan.text(computes=False) == "16 cores: 15 workers on any CPU (nice 5), a thread that launches"
    pinned = replace(CorePlan.beside_gpu(workers=3), compute_cpus=(4,))
    assert pinned.text(computes=False).endswith("a thread that launches on CPUs 4")
    assert setup_of(task_for().cores(pinned)).cores is pinned


FILE = f"""
[settings]
use_gpu = "0-3"
amp = "bf16"
global_batch_size = 128
input_resolution = 28
[data]
dataset = ["mnist", {str(MNIST)!r}]
[model]
zoo = "lenet5"
[optimizer]
kind = "SGD"
[scheduler]
kind = "ConstantLR"
[task]
total_epochs = 2
"""


def test_a_dry_run_of_a_file_needs_no_gpu_and_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    command = ["train", str(tmp_path / "run.toml"), "--set"]
    for form in ('"96-99"', '["96-99"]', '{ gpus = "96-99" }'):
        assert main([*command, f"settings.use_gpu={form}", "--dry-run"]) == 0
        assert "backend    cuda on GPU 96, 97, 98, 99, bf16" in capsys.readouterr().out
        GLOBAL_SETTING.reset()
        PREPROCESSOR_SETTING.reset()
    assert main([*command, 'settings.use_gpu="96-99"']) == 1
    assert "use_gpu: GPU 96, 97, 98, 99 asked for, but " in capsys.readouterr().err


def test_a_model_is_compiled_for_a_gpu_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for device in ("cpu", "cuda"):
        assert main(["plan", "lenet5", "--show", "memory", "--device", device, "--dtype", "fp16"]) == 0
        shown.append(capsys.readouterr().out)
    on_host, on_gpu = (next(line for line in text.splitlines() if "I_A_DATA" in line) for text in shown)
    assert on_host != on_gpu, "inputs lie in the GPU's memory, and take some of it"
    assert main(["plan", "lenet5", "--show", "arch", "--device", "cuda"]) == 1
    assert "plan: --device acts on the compiled model" in capsys.readouterr().err


def test_what_a_predictor_or_a_simple_task_runs_on_is_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_model(POOLED)
    for options, words in (
        ({"gpu": 0, "threads": 2}, "threads is 2, which is of the CPU, and gpu is 0; drop one"),
        ({"gpu": 0, "backend": "cpu"}, "backend is 'cpu', which is of the CPU"),
        ({"gpu": True}, r"predict: gpu is True \(bool\); expected the index of one, such as 0"),
        ({"gpu": "0"}, r"predict: gpu is '0' \(str\); expected the index of one"),
        ({"gpu": -1}, "predict: gpu is -1"),
        ({"dtype": DType.FP16}, r"dtype FP16; expected FP32 or BF16 \(FP16 takes a GPU\)"),
    ):
        with pytest.raises(ValueRejected, match=words):
            Predictor(model, **options)  # type: ignore[arg-type]
    with pytest.raises(
        ValueRejected, match="SimpleTask: backend is 'cpu', which is of the CPU, and gpu is 1; drop one"
    ):
        SimpleTask(gpu=1, backend="cpu")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ())
    for what, make in (("predict", lambda: Predictor(model, gpu=0)), ("SimpleTask", lambda: SimpleTask(gpu=0))):
        words = f"{what}: GPU 0 asked for, but there is no GPU 0; visible: none; .*; without gpu it runs on the CPU"
        with pytest.raises(DeviceError, match=words):
            make()


def test_a_model_that_was_trained_in_fp16_is_predicted_in_fp32_on_the_cpu() -> None:
    model, images = saved_model(POOLED), pictures(3)
    assert images.shape[1] == SIDE
    exact = Predictor(model, backend="reference").predict(images)
    of_a_gpu = Predictor(replace(model, dtype=DType.FP16), backend="reference").predict(images)
    assert np.array_equal(exact.probabilities, of_a_gpu.probabilities)


def test_settings_of_a_gpu_are_written_into_the_result() -> None:
    setup = setup_of(task_for("2,3", tf32=True))
    choice = setup.gpu(1)
    assert choice is not None
    assert (choice.index, choice.tf32) == (3, True)
    plain = json.loads(json.dumps(setup.settings.to_json()))
    assert {name: plain[name] for name in ("device", "gpus", "world_size", "amp", "half", "tf32")} == {
        "device": "cuda",
        "gpus": [2, 3],
        "world_size": 2,
        "amp": False,
        "half": None,
        "tf32": True,
    }


@pytest.mark.parametrize("name", ["mlp_mnist", "cifar_resnet"])
def test_an_empty_list_of_gpus_is_refused_by_the_examples_and_does_not_mean_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--gpu", "", "--data", str(MNIST)])
    example = runpy.run_path(str(MNIST.parents[1] / "examples" / f"{name}.py"))
    assert run_command(example["main"]) == 1
    assert "use_gpu: cannot read '' in ''" in capsys.readouterr().err
