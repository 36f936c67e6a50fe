"""Every option of a run acts (law 8), seen in real runs; and what a run writes is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from training_support import TRAIN, cut_mnist, settings, small_task

from renaissance import (
    SGD,
    TTA,
    Adam,
    AdamW,
    BluePrint,
    CompileInfo,
    ConstantLR,
    DeepLearningTask,
    Initializer,
    InitKind,
    Phase,
    Tensor,
    fc,
    relu,
    seq,
)
from renaissance.backend.cpu import onednn
from renaissance.core.errors import DeviceError, PhaseError, ValueRejected
from renaissance.graph import bn, conv, gap
from renaissance.task import TrainingResult, read_result
from renaissance.task.models import read_model
from renaissance.task.progress import SilentReporter


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


def train(
    data: Path, change: Callable[[DeepLearningTask], object] = lambda task: None, epochs: int = 1, amp: bool = True
) -> tuple[TrainingResult, DeepLearningTask]:
    with settings(data, amp=amp):
        task = small_task(epochs)
        change(task)
        task.compile()
        return task.run(), task


@pytest.fixture(scope="module")
def plain(data: Path) -> TrainingResult:
    return train(data)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda task: task.optimizer(SGD().momentum(0.9).nesterov()),
        lambda task: task.optimizer(SGD().momentum(0.0)),
        lambda task: task.optimizer(Adam().weight_decay(1e-4)),
        lambda task: task.optimizer(AdamW().weight_decay(0.1)),
        lambda task: task.scheduler(ConstantLR().base_lr(1e-2)),
        lambda task: task.grad_clip(1e-4),
        lambda task: task.initializer(Initializer().fc(InitKind.XAVIER_NORMAL)),
    ],
    ids=["nesterov", "sgd", "adam", "decay", "rate", "clip", "initializer"],
)
def test_option_changes_the_weights_and_not_the_data(
    change: Callable[[DeepLearningTask], object], data: Path, plain: TrainingResult
) -> None:
    result, _ = train(data, change)
    assert result.weight_digest != plain.weight_digest
    assert result.data_digest == plain.data_digest
    assert np.isfinite(result.history[0].train_loss)


def test_moving_averages_and_more_views_change_what_is_validated_and_not_the_weights(
    data: Path, plain: TrainingResult
) -> None:
    result, _ = train(data, lambda task: task.use_ema(0.9).tta(TTA.LR))
    assert (result.weight_digest, result.data_digest) == (plain.weight_digest, plain.data_digest)
    (record,) = result.history
    assert record.val_loss not in (None, plain.history[0].val_loss)
    assert record.ema_loss not in (None, record.val_loss)
    assert result.ema_digest not in (None, result.weight_digest)
    assert (result.best_ema_top1, result.best_ema_epoch) == (record.ema_top1, 1)


def test_a_frozen_first_layer_stays_as_it_is_also_when_weights_are_switched(data: Path, tmp_path: Path) -> None:
    def change(task: DeepLearningTask) -> None:
        task.model(BluePrint(seq(conv(4, 3), bn(), relu(), conv(8, 3, 2), bn(), relu(), gap(), fc(10))))
        task.optimizer(SGD().nesterov().weight_decay(0.1)).use_sema().freeze_first_layer_after(1)
        task.save_model_at_epoch(1, tmp_path / "1.safetensors").save_model_at_epoch(3, tmp_path / "3.safetensors")

    train(data, change, epochs=3)
    before, after = (read_model(tmp_path / f"{n}.safetensors").tensors for n in (1, 3))
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {"conv1.weight"}


def test_reference_backend_agrees_with_the_kernels(data: Path) -> None:
    def momentum(task: DeepLearningTask) -> None:
        # Adam would divide rounding noise by itself where a gradient is nearly 0.
        task.optimizer(SGD().momentum(0.9)).scheduler(ConstantLR().base_lr(1e-2))

    def reference(task: DeepLearningTask) -> None:
        momentum(task)
        task.backend("reference")

    (fast, kernels), (slow, numpy) = train(data, momentum, amp=False), train(data, reference, amp=False)
    assert slow.data_digest == fast.data_digest
    assert slow.history[0].train_loss == pytest.approx(fast.history[0].train_loss, rel=1e-5)
    for parameter in kernels.compiled.parameters:
        a, b = kernels.engine.read(parameter.weight), numpy.engine.read(parameter.weight)
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


def test_without_onednn_the_reference_backend_trains_and_says_why(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "libdnnl.so.3"
    bad.write_bytes(b"no library")
    monkeypatch.setenv("RENAISSANCE_ONEDNN", str(bad))
    monkeypatch.setattr(onednn, "_loaded", None)
    shown: list[str] = []
    reporter = SilentReporter()
    monkeypatch.setattr(reporter, "plan", shown.append)
    result, task = train(data, lambda t: t.reporter(reporter))
    (engine,) = (line for line in "\n".join(shown).splitlines() if line.startswith("engine "))
    for part in ("backend reference", "backend 'cpu' cannot run here", str(bad), "pip install onednn-cpu-iomp"):
        assert part in engine
    assert result.epochs == 1
    assert task.engine.profile()["backend"] == "reference"
    with pytest.raises(DeviceError, match="backend 'cpu' cannot run here"):
        train(data, lambda t: t.backend("cpu"))


def test_one_compute_thread_gives_the_same_weights(data: Path, plain: TrainingResult) -> None:
    result, task = train(data, lambda t: t.compute_threads(1))
    assert task.engine.profile()["threads"] == 1
    assert result.weight_digest == plain.weight_digest


def test_early_stop_ends_the_run(data: Path) -> None:
    result, _ = train(data, lambda task: task.early_stop_by_top1(0.01), epochs=5)
    assert result.stopped_early
    assert result.epochs == 1


def test_validation_follows_its_interval(data: Path) -> None:
    result, _ = train(data, lambda task: task.validate_every(2), epochs=3)
    assert [record.top1 is not None for record in result.history] == [False, True, False]
    assert result.best_epoch == 2


def test_metrics_count_true_samples(data: Path, plain: TrainingResult) -> None:
    record = plain.history[0]
    assert record.samples == TRAIN
    assert record.top1 is not None
    assert record.top5 is not None
    assert (record.top1 * 250) == pytest.approx(round(record.top1 * 250), abs=1e-4), "a count of 250 samples"
    assert record.top1 <= record.top5 <= 1.0


def test_run_writes_a_complete_result_and_a_log(data: Path, tmp_path: Path, plain: TrainingResult) -> None:
    optimizer = AdamW().weight_decay(1e-4)
    with settings(data):
        task = small_task(1).optimizer(optimizer).output(tmp_path).compile()
        optimizer.weight_decay(0.5)  # changes nothing any more, in the weights or on paper
        result = task.run()
    assert result.weight_digest == plain.weight_digest
    written = read_result(tmp_path)
    assert written["configuration"]["optimizer"]["weight_decay"] == 1e-4
    assert written["weight_digest"] == result.weight_digest == plain.weight_digest
    assert written["data_digest"] == plain.data_digest
    assert written["epochs"] == 1
    assert written["samples_per_s"] > 0
    assert 0 <= written["wait_share"] <= 1
    assert {"renaissance", "python", "numpy", "numba", "onednn"} <= written["versions"].keys()
    assert {"backend", "dtype", "isa", "threads"} <= written["numeric"].keys()
    assert written["configuration"]["optimizer"]["kind"] == "ADAMW"
    assert written["configuration"]["global"]["seed"] == 123
    assert written["configuration"]["preprocessor"]["dataset"] == "mnist"
    assert written["started"] <= written["ended"]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1]
    assert {p.name for p in tmp_path.iterdir()} == {"result.json", "log.jsonl", "checkpoints"}


def test_dry_run_leaves_nothing_and_says_what_the_run_then_does(data: Path, tmp_path: Path) -> None:
    with settings(data):
        task = small_task(2).output(tmp_path / "run")
        plan = task.dry_run()
        assert task.phase is Phase.PLANNING
        assert list(tmp_path.iterdir()) == []
        task.compile()
        assert plan.arena_bytes == task.compiled.arena_bytes
        result = task.run()
    assert plan.train_samples == sum(record.samples for record in result.history) / 2
    assert [epoch.first_lr for epoch in plan.epochs] == [record.lr for record in result.history]
    assert [epoch.resolution for epoch in plan.epochs] == [record.resolution for record in result.history] == [28, 28]


def test_phases_go_one_way(data: Path) -> None:
    _, task = train(data)
    for again in (task.compile, task.run, lambda: task.total_epochs(3), lambda: task.initializer(Initializer())):
        with pytest.raises(PhaseError):
            again()


def test_tensors_are_read_and_written_by_name(data: Path) -> None:
    _, task = train(data)
    parameter = task.compiled.parameters[0]
    name = task.compiled.tensor(parameter.weight).name
    before = task.fetch(name)
    task.transfer(Tensor.zeros(before.shape), name)
    assert not task.fetch(name).numpy().any()
    assert before.numpy().any(), "fetch is a copy"
    with pytest.raises(ValueRejected, match="no tensor 'nothing'"):
        task.fetch("nothing")
    with pytest.raises(ValueRejected, match="expected"):
        task.transfer(Tensor.zeros(task.fetch("step").shape), name)


def test_plans_are_stable_text(data: Path) -> None:
    _, first = train(data)
    _, second = train(data)
    text = first.plan_text(CompileInfo.ALL)
    assert text == second.plan_text(CompileInfo.ALL)
    for part in ("ArchPlan", "W_FC_WEIGHT", "FC_FWD", "SOFTMAX_CE_INF"):
        assert part in text
    assert first.plan_text(CompileInfo.NONE) == ""
