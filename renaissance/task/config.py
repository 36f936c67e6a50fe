"""A training run as a TOML file: every key is the name of a setter, and the setters check the values.

    [settings]                          # GLOBAL_SETTING
    amp = true
    manual_seed = 123
    global_batch_size = 128
    input_resolution = 32

    [data]                              # PREPROCESSOR_SETTING
    dataset = ["cifar_10", "data/cifar_10"]
    normalization = "CIFAR"
    train_transforms = [{ RandomCrop = { size = 32, padding = 4 } }, { RandomHorizontalFlip = 0.5 }]

    [model]
    zoo = "resnet18_cifar"              # or: file = "net.py:blueprint"

    [optimizer]
    kind = "SGD"
    momentum = 0.9

    [scheduler]
    kind = "CosineAnnealingLR"
    base_lr = 0.1

    [task]                              # DeepLearningTask
    total_epochs = 30

A value is the setter's argument, a list its arguments in order, a table its arguments by name. Names of enum members
are written as text. [loss] and [initializer] are optional. What is unknown or misspelt is refused.
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from renaissance.algo import (
    LARS,
    SGD,
    WSDLR,
    Adam,
    AdamW,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWithWarmRestartsLR,
    CrossEntropyLoss,
    ExponentialLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from renaissance.core.enums import TTA, FanMode, InitKind, Metric, NormMode
from renaissance.core.errors import FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.data.preprocessor import PREPROCESSOR_SETTING
from renaissance.data.transforms import LISTABLE, Transform
from renaissance.graph import BluePrint
from renaissance.task.deep_learning_task import DeepLearningTask
from renaissance.tensor import Initializer

OPTIMIZERS = {cls.__name__: cls for cls in (SGD, LARS, Adam, AdamW)}
SCHEDULERS = {
    cls.__name__: cls
    for cls in (
        ConstantLR,
        PolynomialLR,
        CosineAnnealingLR,
        StepLR,
        MultiStepLR,
        ExponentialLR,
        WSDLR,
        CosineAnnealingWithWarmRestartsLR,
    )
}
SECTIONS = ("settings", "data", "model", "optimizer", "scheduler", "loss", "initializer", "task")
OPTIONAL = ("loss", "initializer")
NOT_IN_A_FILE: Mapping[str, frozenset[str]] = {
    "settings": frozenset({"reset", "lock", "scoped", "snapshot", "dataset_facts"}),
    "data": frozenset({"reset", "lock", "scoped", "commit"}),
    "task": frozenset(
        {"model", "loss", "optimizer", "scheduler", "initializer", "reporter", "cores", "compile", "run", "dry_run"}
        | {"close", "fetch", "transfer", "tensor_id", "plan_text", "memory_plan", "graphs", "save_model", "predict"}
    ),
}
"""Public methods of the three objects that are no options, or that need a Python object."""
ENUMS: Mapping[tuple[str, str], type[Enum]] = {
    ("data", "normalization"): NormMode,
    ("initializer", "conv"): InitKind,
    ("initializer", "fc"): InitKind,
    ("initializer", "bn"): InitKind,
    ("initializer", "fan_mode"): FanMode,
    ("task", "tta"): TTA,
}
Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A TOML file, read and checked for its sections; ``task`` checks the rest by using it."""

    source: str
    sections: Mapping[str, Table]

    @classmethod
    def read(cls, path: Path | str) -> RunConfig:
        """Raises MissingFileError, or FormatError that names file and place."""
        path = Path(path)
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file; expected a training configuration in TOML")
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: is not TOML: {error}") from None
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Table, source: str) -> RunConfig:
        """From a table of sections."""
        for name, section in content.items():
            if name not in SECTIONS:
                raise ValueRejected(f"{source}: there is no section [{name}]; {_known(name, SECTIONS)}")
            if not isinstance(section, Mapping):
                raise ValueRejected(f"{source}: {name} is {section!r}; expected a section [{name}]")
        lacking = [f"[{name}]" for name in SECTIONS if name not in content and name not in OPTIONAL]
        if lacking:
            raise ValueRejected(f"{source}: missing: {', '.join(lacking)}")
        return cls(source, content)

    def with_values(self, assignments: Mapping[str, str]) -> RunConfig:
        """The configuration with "section.key" -> value in TOML's syntax put over what the file says."""
        sections = {name: dict(section) for name, section in self.sections.items()}
        for place, text in assignments.items():
            section, dot, key = place.partition(".")
            if not dot or not key:
                raise ValueRejected(f"--set {place}={text}: expected SECTION.KEY=VALUE")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except (tomllib.TOMLDecodeError, KeyError):
                value = text  # a bare word is text
            sections.setdefault(section, {})[key] = value
        return RunConfig.of(sections, self.source)

    def model(self) -> tuple[str, str]:
        """("zoo", name) or ("file", "FILE.py:NAME"), a relative file counted from the working folder."""
        section = self.sections["model"]
        if len(section) != 1 or next(iter(section)) not in ("zoo", "file"):
            given = ", ".join(section) or "nothing"
            raise ValueRejected(f'{self.source}: [model] has {given}; expected zoo = "NAME" or file = "FILE.py:NAME"')
        kind, value = next(iter(section.items()))
        if not isinstance(value, str) or not value:
            raise ValueRejected(f"{self.source}: [model] {kind} is {value!r}; expected text")
        return kind, value

    def configure_data(self) -> int:
        """Set GLOBAL_SETTING and PREPROCESSOR_SETTING and commit; returns the number of classes."""
        settings = dict(self.sections["settings"])
        if "use_gpu" not in settings and settings.pop("use_cpu", True) is not True:
            raise ValueRejected(f"{self.source}: [settings] use_cpu: expected true, or leave it out")
        if "use_gpu" not in settings:
            GLOBAL_SETTING.use_cpu()
        self._apply("settings", GLOBAL_SETTING, settings)
        self._apply("data", PREPROCESSOR_SETTING, self.sections["data"])
        with _at(f"{self.source}: [data]"):
            PREPROCESSOR_SETTING.commit()
        return PREPROCESSOR_SETTING.config.num_classes

    def task(self, blueprint: BluePrint) -> DeepLearningTask:
        """The task, ready to compile. ``configure_data`` has been called."""
        task = DeepLearningTask().model(blueprint)
        task.loss(self._apply("loss", CrossEntropyLoss(), self.sections.get("loss", {})))
        task.optimizer(self._kind("optimizer", OPTIMIZERS))
        task.scheduler(self._kind("scheduler", SCHEDULERS))
        if "initializer" in self.sections:
            task.initializer(self._apply("initializer", Initializer(), self.sections["initializer"]))
        self._apply("task", task, self.sections["task"])
        return task

    def _kind(self, section: str, kinds: Mapping[str, Callable[[], Any]]) -> Any:
        options = dict(self.sections[section])
        name = options.pop("kind", None)
        if name not in kinds:
            raise ValueRejected(f"{self.source}: [{section}] kind is {name!r}; {_known(str(name), kinds)}")
        return self._apply(section, kinds[name](), options)

    def _apply(self, section: str, target: Any, options: Table) -> Any:
        known = _options_of(section, target)
        for key, value in options.items():
            where = f"{self.source}: [{section}] {key}"
            if key not in known:
                raise ValueRejected(f"{where} is unknown; {_known(key, known)}")
            with _at(where):
                _call(getattr(target, key), _converted(section, key, value))
        return target


class _at:  # noqa: N801  (reads as a word)
    """Puts a place before the text of what is raised inside."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RenaissanceError):
            raise type(error)(f"{self._where}: {error}") from None
        if isinstance(error, TypeError | ValueError):
            raise ValueRejected(f"{self._where}: {error}") from None


def _options_of(section: str, target: Any) -> list[str]:
    hidden = NOT_IN_A_FILE.get(section, frozenset({"config", "config_for", "prepare"}))
    methods = inspect.getmembers(type(target), inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in hidden]


def _converted(section: str, key: str, value: Any) -> Any:
    """Text to enum members, tables to transforms."""
    if (section, key) in ENUMS and isinstance(value, str):
        return _member(ENUMS[section, key], value)
    if (section, key) == ("task", "metrics"):
        mask = Metric.NONE
        for name in value if isinstance(value, list) else [value]:
            mask |= _member(Metric, name)
        return mask
    if section == "data" and key in ("train_transforms", "val_transforms"):
        if not isinstance(value, list):
            raise ValueRejected(f"{value!r}; expected a list of tables like {{ RandomCrop = {{ size = 32 }} }}")
        return [_transform(item) for item in value]
    return value


def _member(kind: type[Any], name: Any) -> Any:
    names = [member.name for member in kind]
    if name not in names:
        raise ValueRejected(f"{name!r}; {_known(str(name), names)}")
    return kind[name]


def _transform(item: Any) -> Transform:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, Mapping) or len(item) != 1:
        raise ValueRejected(f"transform {item!r}; expected one table like {{ RandomCrop = {{ size = 32 }} }}")
    name, arguments = next(iter(item.items()))
    if name not in LISTABLE:
        raise ValueRejected(f"transform {name!r}; {_known(name, LISTABLE)}")
    with _at(f"transform {name}"):
        made: Transform = _call(LISTABLE[name], arguments)
    return made


def _call(function: Callable[..., Any], value: Any) -> Any:
    """``function`` with one argument, a list of arguments, or arguments by name."""
    positional, named = [value], {}
    if isinstance(value, list):
        positional = value
    elif isinstance(value, Mapping):
        positional, named = [], dict(value)
    positional = [tuple(v) if isinstance(v, list) else v for v in positional]
    named = {k: tuple(v) if isinstance(v, list) else v for k, v in named.items()}
    if isinstance(value, list) and len(_parameters(function)) == 1 and not _takes_any(function):
        positional = [tuple(positional)]  # one argument that is a list
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        names = ", ".join(map(str, _parameters(function)))
        raise ValueRejected(f"{value!r}: {error}; expected ({names})") from None
    return function(*positional, **named)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in _parameters(function))


def _known(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), 1)
    return (f"did you mean {close[0]}? " if close else "") + f"expected one of: {', '.join(names)}"
