"""Every setter acts or raises; what is missing is named in one error, before any process is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from task_fixtures import MNIST, no_daemon, own_settings  # noqa: F401  # fixtures

from renaissance import (
    GLOBAL_SETTING,
    LARS,
    PREPROCESSOR_SETTING,
    SGD,
    TTA,
    AdamW,
    BluePrint,
    ConstantLR,
    CosineAnnealingLR,
    CrossEntropyLoss,
    DeepLearningTask,
    Initializer,
    RandomCrop,
    fc,
    relu,
    seq,
)
from renaissance.core.enums import CompileInfo, Metric, Phase
from renaissance.core.errors import CheckpointError, DeviceError, PhaseError, ShapeError, ValueRejected
from renaissance.core.machine import CorePlan, WaitPolicy
from renaissance.data.resolution import SteppedResolution
from renaissance.graph import bn, compile_model, conv, dropout, gap
from renaissance.task import SilentReporter, facts, options, resolutions, setup
from renaissance.task import deep_learning_task as module
from renaissance.task.checkpoint import verify_identity


def committed(batch: int = 200, progressive: tuple[tuple[int, int], tuple[int, int]] | None = None) -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(batch).val_resolution(28)
    GLOBAL_SETTING.train_resolution(*(progressive or (28,)))
    PREPROCESSOR_SETTING.dataset("mnist", MNIST).train_transforms(RandomCrop(28)).commit()


def complete() -> DeepLearningTask:
    return (
        DeepLearningTask()
        .quiet()
        .model(BluePrint(seq(fc(16), relu(), fc(10))))
        .loss(CrossEntropyLoss())
        .optimizer(AdamW())
        .scheduler(ConstantLR())
    )


def test_everything_that_is_missing_is_named_in_one_error() -> None:
    with pytest.raises(ValueRejected) as caught:
        DeepLearningTask().quiet().resume(True).checkpoint_every(steps=5).compile()
    text = str(caught.value)
    for part in (".model(", ".loss(", ".optimizer(", ".scheduler(", "commit()", "use_cpu()", "global_batch_size"):
        assert part in text
    assert "output folder for checkpoint_every" in text
    assert "output folder for resume" in text
    assert "\n" not in text


def test_uncommitted_data_is_missing_data() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).input_resolution(28)
    PREPROCESSOR_SETTING.dataset("mnist", MNIST)
    with pytest.raises(ValueRejected, match=r"missing: data: call PREPROCESSOR_SETTING"):
        complete().compile()


def test_settings_that_were_reset_after_the_data_was_committed_are_refused() -> None:
    committed()
    GLOBAL_SETTING.reset()
    GLOBAL_SETTING.use_cpu().global_batch_size(200).input_resolution(32)
    with pytest.raises(ValueRejected, match=r"GLOBAL_SETTING was reset since; call PREPROCESSOR_SETTING\.commit\(\)"):
        complete().compile()


class Told(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def plan(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("cached", [False, True])
def test_only_a_first_run_is_told_before_the_wait_that_kernels_are_compiled(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    if cached:
        (tmp_path / "core_0").mkdir()
        (tmp_path / "core_0" / "digest.xxh64-38.py311.nbi").touch()
    told = Told()
    with pytest.raises(AssertionError, match="a daemon was started"):
        complete().reporter(told).compile()
    assert told.lines == ([] if cached else [module.FIRST_RUN])


def test_file_format_cannot_be_chosen_for_a_daemon_that_runs_already() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).input_resolution(28)
    PREPROCESSOR_SETTING.dataset("mnist", MNIST).using_dts_format(False).commit()
    with pytest.raises(ValueRejected, match="using_dts_format is for a private dataserver; the one at unix:/run/x"):
        complete().dataserver("unix:/run/x").compile()


def test_output_that_is_a_file_is_refused_before_a_daemon_is_started(tmp_path: Path) -> None:
    committed()
    (tmp_path / "file").touch()
    with pytest.raises(ValueRejected, match="file is a file; give a folder"):
        complete().output(tmp_path / "file").compile()


def test_last_layer_that_does_not_fit_the_classes_is_refused_before_a_daemon_is_started() -> None:
    committed()
    with pytest.raises(ShapeError, match="10"):
        complete().model(BluePrint(seq(fc(16), relu(), fc(11)))).compile()


def test_resume_without_a_checkpoint_is_refused_before_a_daemon_is_started(tmp_path: Path) -> None:
    committed()
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        complete().output(tmp_path).resume(True).compile()


@pytest.mark.parametrize(
    ("setter", "arguments", "options", "named"),
    [
        ("model", ("mlp",), {}, "model"),
        ("model", (seq(fc(10)),), {}, "model"),
        ("loss", (None,), {}, "loss"),
        ("optimizer", (AdamW,), {}, "optimizer"),
        ("optimizer", (SGD().momentum(0.0).nesterov(),), {}, "nesterov"),
        ("scheduler", (1e-3,), {}, "scheduler"),
        ("initializer", ("zeros",), {}, "initializer"),
        ("total_epochs", (0,), {}, "total_epochs"),
        ("total_epochs", (2.5,), {}, "total_epochs"),
        ("validate_every", (0,), {}, "validate_every"),
        ("validate_every", (1, -1), {}, "validate_every"),
        ("early_stop_by_top1", (1.5,), {}, "early_stop_by_top1"),
        ("early_stop_by_top1", (0,), {}, "early_stop_by_top1"),
        ("grad_clip", (0,), {}, "grad_clip"),
        ("grad_clip", (float("nan"),), {}, "grad_clip"),
        ("metrics", (0xFFFF,), {}, "metrics"),
        ("metrics", ("loss",), {}, "metrics"),
        ("loss_scale", (0.5,), {}, "loss_scale"),
        ("loss_scale", (float("inf"),), {}, "loss_scale"),
        ("freeze_first_layer_after", (-1,), {}, "freeze_first_layer_after"),
        ("use_ema", (1.0,), {}, "use_ema"),
        ("use_ema", (-0.1,), {}, "use_ema"),
        ("use_sema", ("yes",), {}, "use_sema"),
        ("sema_decay", (1 - 2.0**-25,), {}, "sema_decay"),
        ("tta", ("flip",), {}, r"TTA\.LR"),
        ("learning_curves", (1,), {}, "learning_curves"),
        ("save_best_model", ("best.pt",), {}, r"\.safetensors"),
        ("save_model_at_epoch", (0, "a.safetensors"), {}, "save_model_at_epoch"),
        ("save_model_at_epoch", (1, "a"), {}, r"\.safetensors"),
        ("dataserver", ("localhost:5000",), {}, "unix:PATH"),
        ("checkpoint_every", (), {}, "checkpoint_every"),
        ("checkpoint_every", (), {"steps": 0}, "checkpoint_every"),
        ("compute_threads", (0,), {}, "compute_threads"),
        ("cores", (4,), {}, "CorePlan"),
        ("backend", ("cuda",), {}, "cpu, reference"),
        ("check_digest", (1,), {}, "check_digest"),
    ],
)
def test_bad_option_value_is_named(
    setter: str, arguments: tuple[object, ...], options: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueRejected, match=named):
        getattr(DeepLearningTask(), setter)(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.sema_decay(0.99), "use_sema is off"),
        (lambda t: t.use_ema(0.9).use_sema().sema_decay(0.99), "one moving average"),
        (lambda t: t.metrics(Metric.EMA_TOP1), "EMA_TOP1.* needs use_ema"),
        (lambda t: t.freeze_first_layer_after(3), "there are 3 epochs; it never acts"),
        (lambda t: t.save_model_at_epoch(4, "a.safetensors"), "save_model_at_epoch is 4, but there are 3"),
        (
            lambda t: t.save_model_at_epoch(1, "a.safetensors").save_model_at_epoch(3, "a.safetensors"),
            "two of them write a.safetensors",
        ),
        (lambda t: t.validate_every(1, 9).save_best_model("a.safetensors"), "save_best_model needs a validated"),
        (lambda t: t.validate_every(9).early_stop_by_top1(0.5), "early_stop_by_top1 needs a validated"),
    ],
)
def test_options_that_cannot_act_together_are_refused_before_a_daemon_is_started(
    change: Callable[[DeepLearningTask], object], named: str
) -> None:
    committed()
    task = complete().total_epochs(3)
    change(task)
    with pytest.raises(ValueRejected, match=f"cannot compile: .*{named}"):
        task.compile()


def test_what_cannot_be_written_or_resumed_is_refused_by_a_dry_run_too(tmp_path: Path) -> None:
    (tmp_path / "best.safetensors").mkdir()
    (tmp_path / "file").touch()
    cases: list[tuple[Callable[[DeepLearningTask], object], str]] = [
        (lambda t: t.output(tmp_path / "file"), "output is .* is a file"),
        (lambda t: t.save_best_model(tmp_path / "best.safetensors"), "save_best_model is .* is a folder"),
        (lambda t: t.save_model_at_epoch(1, tmp_path / "file/a.safetensors"), "save_model_at_epoch is .* is a file"),
        (lambda t: t.tune(tmp_path), "tune is .* is a folder"),
        (lambda t: t.resume(tmp_path / "none.tsr"), "no such checkpoint"),
        (lambda t: t.output(tmp_path / "new").resume(True), "no checkpoint to resume from"),
    ]
    committed()
    for change, named in cases:
        for start in (DeepLearningTask.dry_run, DeepLearningTask.compile):
            task = complete()
            change(task)
            with pytest.raises((ValueRejected, CheckpointError), match=named):
                start(task)
    assert not (tmp_path / "new").exists()


def test_one_decay_from_either_place() -> None:
    made = options.TaskOptions
    assert (made().ema, made(use_sema=True).ema, made(use_ema=0.5).ema) == (False, True, True)
    assert made(use_sema=True).ema_decay == 0.9
    assert made(use_sema=True, sema_decay=0.99).ema_decay == made(use_ema=0.99, use_sema=True).ema_decay == 0.99
    assert not made(use_ema=0.99, use_sema=True, sema_decay=0.99).contradictions()
    assert made(use_sema=True).metrics & Metric.EMA_TOP1
    assert not made().metrics & Metric.EMA_TOP1


def test_a_missing_optional_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda module: None)
    with pytest.raises(ValueRejected, match=r"tensorboardX, .* pip install 'renaissance\[tensorboard\]'"):
        DeepLearningTask().tensorboard("runs")
    with pytest.raises(ValueRejected, match=r"matplotlib, .* pip install 'renaissance\[plot\]'"):
        DeepLearningTask().learning_curves(True)
    DeepLearningTask().learning_curves(None).learning_curves(False)


def test_more_than_two_training_resolutions_are_refused() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).train_resolution(28).val_resolution(28)
    stepped = SteppedResolution([(0, 20), (1, 24), (2, 28)])
    setting = PREPROCESSOR_SETTING.dataset("mnist", MNIST).train_transforms(RandomCrop(28)).train_resolutions(stepped)
    setting.commit()
    with pytest.raises(
        ValueRejected, match=r"3 sizes in 3 epochs \(20, 24, 28\); a compiled task has programs for two"
    ):
        complete().total_epochs(3).compile()
    plan = resolutions.train_sizes(GLOBAL_SETTING.snapshot(), PREPROCESSOR_SETTING.config, 2)
    assert (plan.first, plan.end, plan.end_epochs, plan.steps()) == (20, 24, {1}, [(0, 20), (1, 24)])


def test_a_resolution_that_no_epoch_reaches_is_refused() -> None:
    committed(progressive=((0, 20), (3, 28)))
    with pytest.raises(ValueRejected, match="28 pixels begin after 3 epochs, but there are 3; they never act"):
        complete().total_epochs(3).compile()


def test_two_schedules_of_the_training_resolution_are_refused() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).train_resolution((0, 20), (2, 28)).val_resolution(28)
    setting = PREPROCESSOR_SETTING.dataset("mnist", MNIST).train_transforms(RandomCrop(28))
    setting.train_resolutions(SteppedResolution([(0, 24), (1, 28)])).commit()
    with pytest.raises(ValueRejected, match="one schedule, drop one of the two"):
        complete().compile()


def test_a_training_resolution_that_the_recipe_cannot_have_is_refused() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).train_resolution((0, 20), (2, 28)).val_resolution(28)
    PREPROCESSOR_SETTING.dataset("mnist", MNIST).commit()
    with pytest.raises(ValueRejected, match=r"train_resolution: at 20 pixels: .*no transform sets the size"):
        complete().compile()


IDENTITY_CHANGES: dict[str, Callable[[DeepLearningTask], object]] = {
    "switch_ema": lambda t: t.use_sema(),
    "ema_decay": lambda t: t.use_ema(0.95),
    "grad_clip": lambda t: t.grad_clip(0.06),
    "loss_scale": lambda t: t.loss_scale(1024.0),
    "freeze_first_layer_after": lambda t: t.freeze_first_layer_after(2),
    "label_smoothing": lambda t: t.loss(CrossEntropyLoss().label_smoothing(0.2)),
    "optimizer": lambda t: t.optimizer(LARS().trust_coefficient(0.002)),
    "schedule": lambda t: t.scheduler(CosineAnnealingLR()),
    "model": lambda t: t.model(BluePrint(seq(conv(4, 3), bn(), relu(), dropout(0.2), gap(), fc(10)))),
    "data": lambda t: (GLOBAL_SETTING.reset(), PREPROCESSOR_SETTING.reset(), committed(progressive=((0, 20), (1, 28)))),
    "seed": lambda t: GLOBAL_SETTING.manual_seed(7),
}


def test_everything_the_weights_depend_on_is_compared_when_a_run_resumes() -> None:
    """And the error says what was changed, with both values, by the name of the option."""

    def identity_of(change: Callable[[DeepLearningTask], object] = lambda t: None) -> dict[str, object]:
        with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
            committed()
            task = complete().total_epochs(3)
            task.model(BluePrint(seq(conv(4, 3), bn(), relu(), dropout(0.1), gap(), fc(10))))
            change(task)
            made = setup.make_setup(task._options)
            compiled = compile_model(made.blueprint, made.request(Initializer(), (None, None)))
            schedule = task._options.scheduler.prepare(3, 5)  # type: ignore[union-attr]
            return facts.identity(compiled, made, schedule, (1000, 200), {"backend": "cpu"})

    before = identity_of()
    for name, change in IDENTITY_CHANGES.items():
        with pytest.raises(CheckpointError) as caught:
            verify_identity(Path("file"), json.loads(json.dumps(before)), identity_of(change))
        parts = str(caught.value).split(": the checkpoint belongs to another run: ")[1].split("; ")
        assert any(part.startswith((f"{name} is ", f"{name}.")) for part in parts), name
    same = {
        "validation": lambda t: t.validate_every(2).tta(TTA.LR).early_stop_by_top1(0.9).metrics(Metric.VAL_TOP1),
        "output": lambda t: t.output("runs").save_best_model("a.safetensors").checkpoint_every(steps=3),
    }
    for change in same.values():
        verify_identity(Path("file"), json.loads(json.dumps(before)), identity_of(change))


def test_dry_run_plans_everything_and_starts_and_changes_nothing() -> None:
    GLOBAL_SETTING.use_cpu().global_batch_size(200).train_resolution((0, 20), (3, 28)).val_resolution(28)
    PREPROCESSOR_SETTING.dataset("mnist", MNIST).train_transforms(RandomCrop(28)).commit()
    told = Told()
    task = complete().reporter(told).total_epochs(5).validate_every(2, 1).early_stop_by_top1(0.9)
    task.model(BluePrint(seq(gap(), fc(10)))).scheduler(CosineAnnealingLR().base_lr(0.1).warmup(1).step_by_batch())
    plan = task.use_sema().dry_run()
    assert (plan.train_samples, plan.val_samples, plan.train_steps, plan.val_steps) == (60000, 10000, 300, 50)
    assert [e.resolution for e in plan.epochs] == [20, 20, 20, 28, 28]
    assert [e.validated for e in plan.epochs] == [True, False, True, False, True]
    assert [e.switched for e in plan.epochs] == [False, True, True, True, True]
    assert (plan.epochs[0].last_lr, plan.epochs[1].first_lr) == (0.1, 0.1)
    assert plan.parameters == 20
    assert plan.ring_bytes > 4 * 200 * 4 * (20 * 20 + 28 * 28 + 28 * 28)
    assert told.lines == [plan.text()]
    rows = [line.split()[:2] for line in plan.text().splitlines()[-3:]]
    assert rows == [["1", "20"], ["2-3", "20"], ["4-5", "28"]]
    assert task.phase is Phase.PLANNING
    assert task.total_epochs(6).dry_run().epochs[-1].epoch == 6
    GLOBAL_SETTING.compute_threads(1)  # not locked


def test_two_different_thread_counts_are_an_error() -> None:
    committed()
    GLOBAL_SETTING.compute_threads(2)
    with pytest.raises(ValueRejected, match=r"compute_threads is 1 in the task and 2 in GLOBAL_SETTING"):
        complete().compute_threads(1).compile()


def test_core_plan_is_used_as_given_and_must_agree_with_the_other_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    committed()
    plan = CorePlan.choose(workers=3, compute_threads=1, wait_policy=WaitPolicy.ACTIVE)
    seen: list[CorePlan] = []
    monkeypatch.setattr(module.DataPlane, "open", lambda *arguments: seen.append(arguments[-1]))
    with pytest.raises(AttributeError):  # there is no data plane to go on with
        complete().cores(plan).compile()
    assert seen == [plan]
    with pytest.raises(ValueRejected, match="compute_threads is 2 in the task and 1 in the task's core plan"):
        complete().cores(plan).compute_threads(2).compile()


def test_a_backend_that_was_asked_for_and_cannot_run_is_an_error_before_a_daemon_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    committed()
    monkeypatch.setattr(options, "why_unavailable", lambda backend: "no oneDNN here" if backend == "cpu" else None)
    with pytest.raises(DeviceError, match="backend 'cpu' cannot run here: no oneDNN here"):
        complete().backend("cpu").compile()
    assert options.runnable_backend("reference", None) == ("reference", "")
    backend, note = options.runnable_backend(None, 2)
    assert backend == "reference"
    assert "backend 'cpu' cannot run here: no oneDNN here" in note


def test_threads_that_the_reference_backend_would_ignore_are_refused() -> None:
    committed()
    with pytest.raises(ValueRejected, match="compute_threads is 2, but backend 'reference'"):
        complete().backend("reference").compute_threads(2).compile()


def test_tuning_is_refused_by_a_backend_that_has_nothing_to_choose_from(tmp_path: Path) -> None:
    committed()
    with pytest.raises(
        ValueRejected, match=r"tune\('.*choices.json'\) chooses among kernels of backend 'cpu', not 'ref"
    ):
        complete().backend("reference").tune(tmp_path / "choices.json").compile()


def test_queries_before_compile_say_so() -> None:
    task = DeepLearningTask()
    assert task.phase is Phase.PLANNING
    with pytest.raises(PhaseError, match="call compile"):
        task.run()
    with pytest.raises(PhaseError, match="call compile"):
        task.plan_text(CompileInfo.ALL)
    with pytest.raises(PhaseError, match="call compile"):
        task.fetch("step")
