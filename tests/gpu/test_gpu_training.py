"""Training on the device: as on the CPU within tolerance, the same bits in every run, captured or call by call."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gpu_models import (
    CHECKED,
    CPU_LOSSES,
    STEPS,
    batches,
    compiled,
    cpu_losses,
    losses,
    on_device,
    state_digest,
    validated,
)

from renaissance.backend import why_unavailable
from renaissance.backend.cuda.device import DeviceContext
from renaissance.core.dtype import DType
from renaissance.graph import Variant

MODELS = ("mlp", "resnet18")
TYPES = {"fp32": None, "fp16": DType.FP16, "bf16": DType.BF16}
TOLERANCE = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 6e-2}
"""Relative difference of a loss from the CPU's fp32 run, over the first steps: rounding, and what it grows to."""


def small_on_stand_in(device: DeviceContext, name: str) -> None:
    if device.name == "stand-in" and name != "mlp":
        pytest.skip("takes minutes on the stand-in")


@pytest.mark.parametrize("name", ["mlp"])  # the other takes half a minute: run gpu_models.py and look at the difference
def test_the_stored_losses_are_the_cpus(name: str) -> None:
    """Needs no GPU: the yardstick of the next test."""
    if why_unavailable("cpu"):
        pytest.skip(f"no oneDNN here: {why_unavailable('cpu')}")
    for kind, values in cpu_losses(name).items():
        np.testing.assert_allclose(json.loads(CPU_LOSSES.read_text())[name][kind], values, rtol=1e-3, err_msg=kind)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_agree_with_the_cpu(device: DeviceContext, name: str, dtype: str) -> None:
    small_on_stand_in(device, name)
    expected = json.loads(CPU_LOSSES.read_text())[name]
    model = compiled(name, TYPES[dtype])
    data = batches(model, STEPS)
    executor = on_device(device, model)
    given = losses(executor, data)
    np.testing.assert_allclose(given, expected["train"], rtol=TOLERANCE[dtype])
    assert given[-1] < given[0]
    for kind in ("val", "ema"):
        loss, _ = validated(executor, data[:CHECKED], ema=kind == "ema")
        assert loss == pytest.approx(expected[kind][0], rel=2 * TOLERANCE[dtype])
    executor.close()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_two_runs_have_the_same_digest_and_capture_changes_nothing(
    device: DeviceContext, name: str, dtype: str
) -> None:
    small_on_stand_in(device, name)
    model = compiled(name, TYPES[dtype])
    data = batches(model, 10)
    digests = []
    for captured in (True, True, False):
        executor = on_device(device, model)
        losses(executor, data, captured=captured)
        digests.append(state_digest(executor))
        executor.close()
    assert len(set(digests)) == 1, digests


def test_an_overflow_in_fp16_leaves_everything_but_the_loss_scale(device: DeviceContext) -> None:
    model = compiled("mlp", DType.FP16, loss_scale=2.0**31)
    executor = on_device(device, model)
    before = {t: executor.read(t).copy() for t in model.state}
    losses(executor, batches(model, 1))
    changed = {model.tensor(t).name for t in model.state if not np.array_equal(executor.read(t), before[t])}
    assert changed == {"scaling"}
    assert executor.read_scalar("scaling") == 2.0**30
    executor.close()


def test_nothing_is_allocated_in_a_step(real_gpu: DeviceContext) -> None:
    from cupy.cuda import runtime

    model = compiled("resnet18", DType.FP16)
    executor = on_device(real_gpu, model)
    data = batches(model, 4)
    losses(executor, data)
    real_gpu.synchronize()
    free = runtime.memGetInfo()[0]
    for _ in range(25):
        losses(executor, data)
    assert runtime.memGetInfo()[0] == free
    assert executor.arena.allocations == 1
    executor.close()


@pytest.mark.parametrize("name", MODELS)
def test_captured_graph_has_the_nodes_that_were_planned(real_gpu: DeviceContext, name: str) -> None:
    """Ours are counted exactly by kernel, copy and fill; a library's call is one kernel or more."""
    from cupy.cuda import runtime

    model = compiled(name, DType.FP16)
    executor = on_device(real_gpu, model)
    program = executor.program(Variant.TRAIN_BASE, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        runtime.graphDebugDotPrint(program.graph, str(path), 0)
        nodes = len(re.findall(r'^\s*"?graph_\d+_node_\d+"?\s*\[', path.read_text(), re.MULTILINE))
    assert nodes >= program.own_nodes + program.library_calls
    assert nodes <= program.own_nodes + 4 * program.library_calls
    executor.close()


def test_plans_and_kernels_from_the_disk_give_the_same_bits_in_another_process(
    real_gpu: DeviceContext, tmp_path: Path
) -> None:
    """The first process makes them, the second takes what it left."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}
    child = Path(__file__).with_name("digest_child.py")
    digests, files = [], []
    for _ in range(2):
        done = subprocess.run([sys.executable, child], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.split()[-1])
        files.append(sorted(f.name for f in (tmp_path / "renaissance").rglob("*") if f.is_file()))
    assert files[0] == files[1]
    assert any(name.endswith(".plan") for name in files[0])
    assert digests[0] == digests[1]
