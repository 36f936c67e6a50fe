"""``renaissance train``'s file: every setter can be written in it, and whatever is wrong is named with its place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from renaissance.algo import CrossEntropyLoss
from renaissance.core.enums import InitKind, Metric, NormMode
from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.data.preprocessor import PREPROCESSOR_SETTING
from renaissance.data.recipe import Recipe
from renaissance.data.resolution import ProgressiveResolution, SteppedResolution
from renaissance.data.transforms import Pad, RandomCrop, RandomErasing, RandomHorizontalFlip
from renaissance.graph import BluePrint, fc
from renaissance.task.config import OPTIMIZERS, SCHEDULERS, SECTIONS, RunConfig, options_of
from renaissance.task.config_values import call
from renaissance.task.deep_learning_task import DeepLearningTask
from renaissance.tensor import Initializer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
EXAMPLE = ROOT / "examples" / "cifar_resnet18.toml"
MINIMAL: dict[str, dict[str, Any]] = {
    "settings": {"global_batch_size": 8, "input_resolution": 28},
    "data": {"dataset": ["mnist", str(ROOT / "data" / "mnist")]},
    "model": {"zoo": "lenet5"},
    "optimizer": {"kind": "SGD"},
    "scheduler": {"kind": "ConstantLR"},
    "task": {},
}
VALUES: dict[str, dict[str, str]] = {
    "settings": {
        "amp": "true",
        "auto_seed": "true",
        "compute_threads": "2",
        "global_batch_size": "128",
        "input_resolution": "32",
        "local_batch_size": "64",
        "manual_seed": "123",
        "tf32": "false",
        "train_resolution": "[[0, 20], [2, 28]]",
        "use_cpu": "true",
        "use_gpu": '{ gpus = "0-1", present = false }',
        "val_resolution": "32",
    },
    "data": {
        "color_channels": "3",
        "dataset": '["cifar10", "data/cifar10"]',
        "decode": '"exact"',
        "download": '[true, ["somewhere"]]',
        "drop_last": "true",
        "fully_mode": "true",
        "load": '"partial"',
        "load_workers": "1",
        "normalization": "[[0.5, 0.4, 0.3], [1, 0.2, 0.2]]",
        "on_corrupt": '{ action = "blank", max_samples = 3 }',
        "order": '"blocks"',
        "partial_mode": "true",
        "preprocess_workers": "2",
        "read_ahead": "1048576",
        "ring_depth": "6",
        "sdmp_factor": "1",
        "shuffle_train": "false",
        "train_resolutions": "{ ProgressiveResolution = [16, 32, 4] }",
        "train_transforms": '[{ Pad = { padding = 2, fill = [1, 2, 3] } }, { RandomCrop = 32 }, "DoNothing"]',
        "using_cpvs": "false",
        "using_dts_format": '[true, "RAW"]',
        "val_transforms": "[{ Resize = 40 }, { CenterCrop = { size = 32 } }]",
    },
    "task": {
        "backend": '"reference"',
        "check_digest": "true",
        "checkpoint_every": "{ epochs = 1, steps = 100 }",
        "compute_threads": "2",
        "dataserver": '"unix:/run/x.sock"',
        "early_stop_by_top1": "0.99",
        "freeze_first_layer_after": "3",
        "grad_clip": "1",
        "learning_curves": "false",
        "loss_scale": "1024.0",
        "metrics": '["TRAIN_LOSS", "VAL_TOP1"]',
        "output": '"runs/x"',
        "quiet": "true",
        "resume": "true",
        "save_best_model": '"best.safetensors"',
        "save_model_at_epoch": '[[1, "a.safetensors"], [2, "b.safetensors"]]',
        "sema_decay": "0.9",
        "tensorboard": '"runs/board"',
        "total_epochs": "3",
        "tta": '"LR"',
        "tune": '"runs/tuning.json"',
        "use_ema": "0.99",
        "use_sema": "true",
        "validate_every": "[2, 1]",
    },
    "loss": {"label_smoothing": "0.1"},
    "initializer": {
        "bn": '"ZERO_GAMMA"',
        "conv": '"KAIMING_NORMAL"',
        "fan_mode": '"FAN_OUT"',
        "fc": '"XAVIER_UNIFORM"',
        "nonlinearity": "0.1",
        "scale": "1.5",
        "sigma": "0.02",
    },
    "optimizer": {
        **dict.fromkeys(("momentum", "beta1", "beta2", "trust_coefficient"), "0.9"),
        **dict.fromkeys(("weight_decay", "eps"), "1e-4"),
        "nesterov": "true",
    },
    "scheduler": {
        **dict.fromkeys(("warmup", "step_size", "t_0", "t_mult"), "2"),
        **dict.fromkeys(("step_by_batch", "step_by_epoch"), "true"),
        **dict.fromkeys(("base_lr", "warmup_start_lr", "warmup_start_factor", "power"), "0.5"),
        **dict.fromkeys(("end_lr", "eta_min", "gamma", "decay_start"), "0.01"),
        "milestones": "[3, 6]",
    },
}
"""A valid value in TOML for every key of every section."""


@pytest.fixture(autouse=True)
def _scoped() -> Iterator[None]:
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        yield


def toml(text: str) -> Any:
    return tomllib.loads(f"value = {text}")["value"]


def config(**sections: Any) -> RunConfig:
    """The minimal file with some sections changed; a key None is left out."""
    merged = {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {**MINIMAL, **sections}}
    return RunConfig.of({n: {k: v for k, v in s.items() if v is not None} for n, s in merged.items()}, "run.toml")


def test_every_setter_can_be_written_in_a_file() -> None:
    targets: dict[str, list[Any]] = {
        "settings": [GLOBAL_SETTING],
        "data": [PREPROCESSOR_SETTING],
        "task": [DeepLearningTask()],
    }
    targets |= {"loss": [CrossEntropyLoss()], "initializer": [Initializer()]}
    targets |= {"optimizer": [c() for c in OPTIMIZERS.values()], "scheduler": [c() for c in SCHEDULERS.values()]}
    assert {*targets, "model"} == set(SECTIONS)
    for section, objects in targets.items():
        names = {name for target in objects for name in options_of(section, type(target))}
        assert names == VALUES[section].keys()
        for target in objects:
            for name in options_of(section, type(target)):
                fresh: Any = target if section in ("settings", "data") else type(target)()
                if section in ("settings", "data"):
                    fresh.reset()
                if name == "global_batch_size":
                    fresh.use_cpu()
                value = toml(VALUES[section][name])
                if name == "save_model_at_epoch":  # several calls
                    value = value[0]
                assert call(getattr(fresh, name), value) is fresh, (section, name)


def test_values_arrive_as_python_would_give_them(tmp_path: Path) -> None:
    cfg = config(
        settings={"input_resolution": 32, "manual_seed": 7, "amp": True},
        data={
            "dataset": ["cifar10", str(tmp_path)],
            "normalization": "CIFAR",
            "train_transforms": [
                {"Pad": 4},
                {"RandomCrop": {"size": 32}},
                {"RandomHorizontalFlip": 0.5},
                {"RandomErasing": {"p": 0.5}},
            ],
        },
        initializer={"conv": "ZEROS"},
        loss={"label_smoothing": 0.1},
        optimizer={"kind": "LARS", "trust_coefficient": 0.01},
        scheduler={"kind": "MultiStepLR", "milestones": [3, 5]},
        task={
            "metrics": ["VAL_TOP1", "VAL_LOSS"],
            "save_model_at_epoch": [[2, "b.safetensors"], [1, "a.safetensors"]],
            "checkpoint_every": {"steps": 5},
        },
    )
    cfg.configure_data()
    settings, data = GLOBAL_SETTING.snapshot(), PREPROCESSOR_SETTING.config
    assert (settings.seed, settings.amp, settings.local_batch_size, settings.device) == (7, True, 8, "cpu")
    transforms = (Pad(4), RandomCrop(32), RandomHorizontalFlip(0.5), RandomErasing(0.5))
    assert data.train_recipe == Recipe.build(transforms, NormMode.CIFAR, resolution=32, color_channels=3)
    task = cfg.task(BluePrint(fc(10)))
    options = task._options
    assert options.metrics == Metric.VAL_TOP1 | Metric.VAL_LOSS
    assert options.save_at == ((1, Path("a.safetensors")), (2, Path("b.safetensors")))
    assert (options.checkpoint_epochs, options.checkpoint_steps) == (None, 5)
    assert options.optimizer is not None
    assert options.optimizer.config().trust_coefficient == 0.01
    assert options.scheduler is not None
    assert options.scheduler.prepare(6, 1).lr(4) == pytest.approx(0.01)
    assert task._initializer._conv is InitKind.ZEROS
    setting = PREPROCESSOR_SETTING
    for text, made in (
        ("{ SteppedResolution = [[0, 16], [2, 32]] }", None),
        ("{ SteppedResolution = { steps = [[0, 16], [2, 32]] } }", SteppedResolution(((0, 16), (2, 32)))),
        ("{ ProgressiveResolution = { begin = 16, end = 32, epochs = 3 } }", ProgressiveResolution(16, 32, 3)),
    ):
        setting.reset()
        call(setting.train_resolutions, toml(text))
        assert made is None or setting._values["train_resolutions"] == made


def test_what_is_wrong_is_named_with_its_place() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimiser": {}}, r"run\.toml: there is no section \[optimiser\]; did you mean optimizer\? expected one of:"),
        ({"task": {"total_epoch": 3}}, r"\[task\] total_epoch is unknown; did you mean total_epochs\? expected one of"),
        ({"task": {"compile": True}}, r"\[task\] compile is unknown"),
        ({"task": {"total_epochs": "3"}}, r"\[task\] total_epochs: '3'; expected a whole number"),
        ({"task": {"total_epochs": 3.0}}, r"\[task\] total_epochs: 3\.0; expected a whole number"),
        ({"task": {"total_epochs": 0}}, r"\[task\] total_epochs: total_epochs is 0; expected a whole number, at least"),
        ({"task": {"validate_every": [1, 2, 3]}}, r"\[task\] validate_every: too many positional argumen"),
        ({"task": {"validate_every": {"every": 1}}}, r"validate_every: argument 'every' is unknown; .* interval, o"),
        ({"task": {"validate_every": [1, True]}}, r"\[task\] validate_every: offset: True; expected a whole number"),
        ({"task": {"quiet": False}}, r"\[task\] quiet: False; it takes no value: expected true, or leave it out"),
        ({"task": {"tta": "FLIP"}}, r"\[task\] tta: 'FLIP'; expected one of: DISABLED, LR, SHIFT_1PX"),
        ({"task": {"metrics": ["VAL_LOS"]}}, r"\[task\] metrics: 'VAL_LOS'; did you mean VAL_LOSS\?"),
        ({"optimizer": {"kind": "Adamw"}}, r"\[optimizer\] kind is 'Adamw'; did you mean AdamW\? expected one of: SGD"),
        ({"optimizer": {"kind": 3}}, r"\[optimizer\] kind is 3; expected one of"),
        ({"optimizer": {"kind": None}}, r"\[optimizer\] kind is None; expected one of"),
        ({"optimizer": {"beta1": 0.9}}, r"\[optimizer\] beta1 is unknown; expected one of: momentum, nesterov, weight"),
        ({"optimizer": {"weight_decay": True}}, r"\[optimizer\] weight_decay: True; expected a number"),
        ({"optimizer": {"weight_decay": "0.1"}}, r"\[optimizer\] weight_decay: '0\.1'; expected a number"),
        ({"optimizer": {"nesterov": True, "momentum": 0.0}}, r"run\.toml: \[optimizer\]: SGD: nesterov is on but mome"),
        ({"scheduler": {"base_lr": -1}}, r"\[scheduler\] base_lr: base_lr is -1"),
        ({"initializer": {"gamma": True}}, r"\[initializer\] gamma is unknown"),
        ({"initializer": {"conv": "STANDARD"}}, r"\[initializer\] conv: initializer\.conv: STANDARD is for batch norm"),
        ({"loss": {"label_smoothing": [0.1]}}, r"\[loss\] label_smoothing: \[0\.1\]; expected a number"),
    ]  # fmt: skip
    for sections, message in cases:
        with pytest.raises(ValueRejected, match=message):
            config(**sections).task(BluePrint(fc(10)))
    data_cases: list[tuple[dict[str, Any], str]] = [
        ({"settings": {"manual_seed": 1.5}}, r"\[settings\] manual_seed: 1\.5; expected a whole number"),
        ({"settings": {"use_cpu": False}}, r"\[settings\] use_cpu: False; it takes no value"),
        ({"settings": {"manual_seed": 3, "auto_seed": True}}, r"\[settings\] auto_seed: GLOBAL_SETTING: seed is alrea"),
        ({"data": {"dataset": "mnist"}}, r"\[data\] dataset: missing a required argument: 'path'; exp.* name"),
        ({"data": {"dataset": ["mnst", "x"]}}, r"\[data\] dataset: .*mnst"),
        ({"data": {"normalization": "CIFR"}}, r"\[data\] normalization: 'CIFR'; did you mean CIFAR\?"),
        ({"data": {"train_transforms": {"RandomCrop": 3}}}, r"\[data\] train_transforms: "),
        ({"data": {"train_transforms": ["RandomErasing"]}}, r"RandomErasing: missing a required argument: 'p'"),
        ({"data": {"train_transforms": [{"RandmCrop": 3}]}}, r"'RandmCrop' is unknown; did you mean RandomCrop\?"),
        ({"data": {"train_transforms": [{"RandomCrop": {"sise": 3}}]}}, r"'sise' is unknown; did you mean siz"),
        ({"data": {"train_transforms": [{"RandomCrop": "3"}]}}, r"train_transforms: RandomCrop: '3'; expected a whole"),
        ({"data": {"train_transforms": [{"Pad": 2, "RandomCrop": 3}]}}, r"expected one table like \{ Name"),
        ({"data": {"commit": True}}, r"\[data\] commit is unknown"),
        ({"data": {"val_transforms": [{"RandomCrop": 28}]}}, r"run\.toml: \[data\]: .*RandomCrop"),
    ]  # fmt: skip
    for sections, message in data_cases:
        with (
            GLOBAL_SETTING.scoped(),
            PREPROCESSOR_SETTING.scoped(),
            pytest.raises(ValueRejected, match=message),
        ):
            config(**sections).configure_data()


def test_the_file_itself_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(MissingFileError, match=r"run\.toml: no such file; expected a training configuration"):
        RunConfig.read(path)
    for content in (b"[task\n", b"\xff\xfe", b"task = { total_epochs = 1 \n }}"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"run\.toml: is not TOML"):
            RunConfig.read(path)
    path.write_text("task = 3\n")
    with pytest.raises(ValueRejected, match=r"run\.toml: task is 3; expected a section \[task\]"):
        RunConfig.read(path)
    path.write_text("[[task]]\n[settings]\n")
    with pytest.raises(ValueRejected, match=r"task is \[\{\}\]; expected a section"):
        RunConfig.read(path)
    path.write_text("[settings]\n[task]\n")
    with pytest.raises(ValueRejected, match=r"run\.toml: missing: \[data\], \[model\], \[optimizer\], \[scheduler\]"):
        RunConfig.read(path)
    for model, message in (
        ({}, "has nothing"),
        ({"zoo": "lenet5", "file": "a.py:b"}, "has zoo, file"),
        ({"zo": "lenet5"}, 'has zo; expected zoo = "NAME"'),
        ({"zoo": 3}, "zoo is 3; expected text"),
    ):
        with pytest.raises(ValueRejected, match=re.escape(message)):
            RunConfig.of({**MINIMAL, "model": model}, "run.toml").model()


def test_the_command_line_goes_over_the_file() -> None:
    cfg = config(optimizer={"momentum": 0.8}).with_values(
        {
            "task.total_epochs": "4",
            "optimizer.kind": "SGD",
            "task.metrics": '["VAL_TOP1"]',
            "model.zoo": "nin",
            "loss.label_smoothing": "0.2",
        }
    )
    assert cfg.sections["task"] == {"total_epochs": 4, "metrics": ["VAL_TOP1"]}
    assert cfg.sections["optimizer"] == {"kind": "SGD", "momentum": 0.8}
    assert cfg.sections["loss"] == {"label_smoothing": 0.2}
    assert cfg.model() == ("zoo", "nin")
    for place, value, message in (
        ("task.total_epochs", "x", r"^--set task\.total_epochs: 'x'; expected a whole number"),
        ("task.epochs", "3", r"^--set task\.epochs is unknown"),
        ("optimizer.kind", "ADAM", r"^--set optimizer\.kind is 'ADAM'; did you mean Adam\?"),
        ("tasks.total_epochs", "3", r"run\.toml with --set: there is no section \[tasks\]"),
        ("task", "3", r"--set task=3: expected SECTION\.KEY=VALUE"),
        ("task.", "3", r"--set task\.=3: expected SECTION\.KEY=VALUE"),
    ):
        with pytest.raises(RenaissanceError, match=message):
            config().with_values({place: value}).task(BluePrint(fc(10)))


def test_the_examples_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (on_page,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for text, source in ((on_page, "docs/training.md"), (EXAMPLE.read_text(), EXAMPLE.name)):
        with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
            cfg = RunConfig.of(tomllib.loads(text), source)
            assert cfg.configure_data() == 10
            cfg.task(BluePrint(fc(10)))
            assert cfg.model() == ("zoo", "resnet18_cifar")
