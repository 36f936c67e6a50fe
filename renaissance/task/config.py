"""A training run as a TOML file: every key is the name of a setter, and the setters check the values.

    [data]                              # a section per object: PREPROCESSOR_SETTING
    dataset = ["cifar10", "data/cifar10"]
    train_transforms = [{ Pad = 4 }, { RandomCrop = 32 }, { RandomHorizontalFlip = 0.5 }]

    [optimizer]                         # SGD().momentum(0.9)
    kind = "SGD"
    momentum = 0.9

``config_values`` says how values become arguments; docs/training.md has a whole file. What is unknown, misspelt or of
another type is refused with file, section and key, and with what was probably meant.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from renaissance.core.errors import FormatError, MissingFileError, ValueRejected
from renaissance.core.settings import ALL_GPUS, GLOBAL_SETTING
from renaissance.data.preprocessor import PREPROCESSOR_SETTING
from renaissance.graph import BluePrint
from renaissance.task.config_values import Table, at, call, known, setters
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
    "settings": frozenset({"dataset_facts"}),
    "data": frozenset({"commit"}),
    "task": frozenset({"model", "loss", "optimizer", "scheduler", "initializer"} | {"reporter", "cores", "compile"}),
}
"""Setters that need a Python object, have a section of their own, or are steps of a run."""
REPEATABLE = frozenset({("task", "save_model_at_epoch")})
"""Setters that may be called several times: a list of lists is a call each."""
DEVICES = ("use_cpu", "use_gpu")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A TOML file, read and checked for its sections; ``task`` checks the rest by using it."""

    source: str
    sections: Mapping[str, Table]
    from_command: frozenset[tuple[str, ...]] = frozenset()
    """(section, key) of values that the command line gave."""

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
                raise ValueRejected(f"{source}: there is no section [{name}]; {known(name, SECTIONS)}")
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
        changed = RunConfig.of(sections, f"{self.source} with --set")
        given = frozenset(tuple(place.split(".", 1)) for place in assignments)
        return replace(changed, source=self.source, from_command=given)

    def _where(self, section: str, key: str) -> str:
        if (section, key) in self.from_command:
            return f"--set {section}.{key}"
        return f"{self.source}: [{section}] {key}"

    def model(self) -> tuple[str, str]:
        """("zoo", name) or ("file", "FILE.py:NAME"), a relative file counted from the working folder."""
        section = self.sections["model"]
        if len(section) != 1 or next(iter(section)) not in ("zoo", "file"):
            given = ", ".join(section) or "nothing"
            raise ValueRejected(f'{self.source}: [model] has {given}; expected zoo = "NAME" or file = "FILE.py:NAME"')
        kind, value = next(iter(section.items()))
        if not isinstance(value, str) or not value:
            raise ValueRejected(f"{self._where('model', kind)} is {value!r}; expected text")
        return kind, value

    def configure_data(self, *, planning: bool = False) -> int:
        """Set GLOBAL_SETTING and PREPROCESSOR_SETTING and commit; returns the number of classes. ``planning``: GPUs
        need not be here."""
        settings = dict(self.sections["settings"])
        if planning and "use_gpu" in settings:
            settings["use_gpu"] = _elsewhere(settings["use_gpu"])
        devices = {key: settings[key] for key in DEVICES if key in settings} or {"use_cpu": True}
        self._apply("settings", GLOBAL_SETTING, devices)  # batch sizes ask for it
        self._apply("settings", GLOBAL_SETTING, {key: v for key, v in settings.items() if key not in devices})
        self._apply("data", PREPROCESSOR_SETTING, self.sections["data"])
        with at(f"{self.source}: [data]"):
            PREPROCESSOR_SETTING.commit()
        return PREPROCESSOR_SETTING.config.num_classes

    def task(self, blueprint: BluePrint) -> DeepLearningTask:
        """The task, ready to compile. ``configure_data`` has been called."""
        task = DeepLearningTask().model(blueprint)
        task.loss(self._apply("loss", CrossEntropyLoss(), self.sections.get("loss", {})))
        for section, kinds, setter in (
            ("optimizer", OPTIMIZERS, task.optimizer),
            ("scheduler", SCHEDULERS, task.scheduler),
        ):
            made = self._kind(section, kinds)
            with at(f"{self.source}: [{section}]"):
                setter(made)
        if "initializer" in self.sections:
            task.initializer(self._apply("initializer", Initializer(), self.sections["initializer"]))
        self._apply("task", task, self.sections["task"])
        return task

    def _kind(self, section: str, kinds: Mapping[str, Callable[[], Any]]) -> Any:
        options = dict(self.sections[section])
        name = options.pop("kind", None)
        if not isinstance(name, str) or name not in kinds:
            raise ValueRejected(f"{self._where(section, 'kind')} is {name!r}; {known(name, kinds)}")
        return self._apply(section, kinds[name](), options)

    def _apply(self, section: str, target: Any, options: Table) -> Any:
        names = options_of(section, type(target))
        for key, value in options.items():
            where = self._where(section, key)
            if key not in names:
                raise ValueRejected(f"{where} is unknown; {known(key, names)}")
            repeated = (section, key) in REPEATABLE and isinstance(value, list)
            with at(where):
                for one in value if repeated and all(isinstance(v, list) for v in value) else [value]:
                    call(getattr(target, key), one)
        return target


def _elsewhere(use_gpu: Any) -> Any:
    """Arguments of ``use_gpu`` with ``present=False``, unless they are wrong or all visible GPUs are meant: how many
    those are has to be asked."""
    named = use_gpu[0] if isinstance(use_gpu, list) and len(use_gpu) == 1 else use_gpu
    named = {"gpus": named} if isinstance(named, str) else named
    if not isinstance(named, Mapping) or named.get("gpus", ALL_GPUS) == ALL_GPUS:
        return use_gpu
    return {"present": False, **named}


def options_of(section: str, kind: type) -> list[str]:
    """The keys that a section takes when its values are set on a ``kind``."""
    return [name for name in setters(kind) if name not in NOT_IN_A_FILE.get(section, ())]
