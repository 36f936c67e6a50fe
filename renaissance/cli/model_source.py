"""Where the commands get a model from: the zoo, or a Python file of the user's."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from renaissance import zoo
from renaissance.core.errors import MissingFileError, RenaissanceError, ValueRejected
from renaissance.graph import BluePrint
from renaissance.graph.blueprint import Layer

_Result = TypeVar("_Result")


def blueprint_of(kind: str, value: str, classes: int) -> BluePrint:
    """The model of a configuration: ("zoo", name) or ("file", "FILE.py:NAME"), for a number of classes."""
    return zoo.model(value, classes) if kind == "zoo" else from_file(value, classes)


def from_file(model: str, classes: int | None) -> BluePrint:
    """The BluePrint called NAME in "FILE.py:NAME", or what a function of that name makes of the number of classes.

    The file is run. Raises MissingFileError, or ValueRejected that says what the file has, or what its code raised.
    """
    file, _, name = model.rpartition(":")
    if not file or not name or not file.endswith(".py"):
        raise ValueRejected(f"model {model!r}; expected FILE.py:NAME, NAME being a BluePrint in that file")
    path = Path(file)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    with _imports_from(path.parent.resolve()):
        value = _guarded(file, lambda: _value(path, name))
        if callable(value):
            if classes is None:
                raise ValueRejected(f"{model} is a function of the number of classes; give --classes")
            value = _guarded(f"{model}({classes})", lambda: value(classes))
    if not isinstance(value, BluePrint | Layer):
        raise ValueRejected(f"{model} is {value!r}; expected a BluePrint, or a function of the number of classes")
    return BluePrint(value)


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Search a folder for imports, as Python does for a file that it runs."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))


def _value(path: Path, name: str) -> Any:
    """What ``name`` is once the file has run."""
    values = runpy.run_path(str(path), run_name="renaissance_model")
    if name not in values:
        known = [key for key, value in values.items() if isinstance(value, BluePrint | Layer)]
        raise ValueRejected(f"there is no {name!r}; BluePrints in it: {', '.join(known) or 'none'}")
    return values[name]


def _guarded(where: str, call: Callable[[], _Result]) -> _Result:
    """What ``call`` returns; whatever the user's code raises is said in one line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, RenaissanceError) else f"{type(error).__name__}: "
        raise ValueRejected(f"{where}: {kind}{error}") from error
