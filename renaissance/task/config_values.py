"""Values of a TOML file as the arguments of a setter, by the types that the setter declares.

A value is the setter's one argument, a list its arguments in order, a table its arguments by name; ``true`` calls a
setter that takes none. Text stands for a member of an enum or a path, a table ``{ Name = arguments }`` for an object
such as a transform. A value of another type is refused here, so that ``"0.1"`` is no number and ``true`` is no 1.
"""

from __future__ import annotations

import difflib
import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum, Flag
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from renaissance.core.errors import RenaissanceError, ValueRejected
from renaissance.data.transforms import LISTABLE, Transform

Table = Mapping[str, Any]
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_LISTS: tuple[object, ...] = (tuple, list, Sequence, Iterable)
_TEXT: tuple[object, ...] = (str, Path, os.PathLike)


@contextmanager
def at(where: str) -> Iterator[None]:
    """Puts a place before the text of an error that is raised inside."""
    try:
        yield
    except RenaissanceError as error:
        raise type(error)(f"{where}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueRejected(f"{where}: {error}") from None


def known(name: object, names: Iterable[str]) -> str:
    """What to say about a name that is none of ``names``: the one that was probably meant, and all of them."""
    all_names = list(names)
    close = [n for n in all_names if n.lower() == str(name).lower()] or difflib.get_close_matches(
        str(name), all_names, 1
    )
    return (f"did you mean {close[0]}? " if close else "") + f"expected one of: {', '.join(all_names)}"


def setters(kind: type) -> list[str]:
    """Names of the public methods that return their own object: chained setters."""
    found = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        answer = None if name.startswith("_") else get_type_hints(method).get("return")
        if answer is Self or (inspect.isclass(answer) and issubclass(kind, answer)):
            found.append(name)
    return found


def call(function: Callable[..., Any], value: Any) -> Any:
    """Call a setter, or make an object of a class, with a value from a file.

    Raises ValueRejected that names the parameter and what it takes, and whatever ``function`` raises.
    """
    parameters = list(inspect.signature(function).parameters.values())
    hints = get_type_hints(function)
    if not parameters:
        if value is not True:
            raise ValueRejected(f"{value!r}; it takes no value: expected true, or leave it out")
        return function()
    return _call(function, *_arguments(value, parameters, hints))


def _call(function: Callable[..., Any], positional: Sequence[Any], named: Table) -> Any:
    parameters, hints = list(inspect.signature(function).parameters.values()), get_type_hints(function)
    for name in named:
        if name not in (names := [p.name for p in parameters]):
            raise ValueRejected(f"argument {name!r} is unknown; {known(name, names)}")
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        raise ValueRejected(f"{error}; expected {_signature(parameters)}") from None
    if parameters and parameters[0].kind in _ANY_NUMBER:
        return function(*(argument(item, hints.get(parameters[0].name)) for item in positional))
    alone = len(positional) == 1 and not named
    in_order = [
        argument(item, hints.get(p.name)) if alone else _named_argument(p.name, item, hints)
        for p, item in zip(parameters, positional, strict=False)
    ]
    return function(*in_order, **{name: _named_argument(name, item, hints) for name, item in named.items()})


def _named_argument(name: str, value: Any, hints: Mapping[str, Any]) -> Any:
    with at(name):
        return argument(value, hints.get(name))


def _arguments(
    value: Any, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(in order, by name)."""
    several = len(parameters) > 1 or parameters[0].kind in _ANY_NUMBER
    if isinstance(value, list) and several:
        return value, {}
    if isinstance(value, Mapping) and (several or not _objects(hints.get(parameters[0].name)).keys() & value.keys()):
        return [], dict(value)
    return [value], {}


def _signature(parameters: Sequence[inspect.Parameter]) -> str:
    return ", ".join(p.name if p.default is p.empty else f"{p.name} = {p.default!r}" for p in parameters)


def argument(value: Any, hint: Any) -> Any:
    """A value from a file as an object of the declared type. Raises ValueRejected that says what is expected."""
    kinds = _members(hint)
    for kind in kinds:
        if inspect.isclass(kind) and issubclass(kind, Enum) and isinstance(value, str | list):
            if issubclass(kind, Flag):
                mask = kind(0)
                for name in value if isinstance(value, list) else [value]:
                    mask |= _member(kind, name)
                return mask
            if isinstance(value, str):
                return _member(kind, value)
    objects = _objects(hint)
    if objects and isinstance(value, str | Mapping):
        return _object(value, objects)
    for kind in kinds:
        if isinstance(value, list) and (get_origin(kind) or kind) in _LISTS:
            return _list(value, get_args(kind))
        if _fits(value, kind):
            return value
    raise ValueRejected(f"{value!r}; expected {' or '.join(dict.fromkeys(_words(kind) for kind in kinds))}")


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; one type is a union of itself. What a file cannot hold (None) is left out."""
    union = get_origin(hint) in (Union, types.UnionType)
    return tuple(kind for kind in (get_args(hint) if union else (hint,)) if kind is not types.NoneType)


def _objects(hint: Any) -> Mapping[str, Callable[..., Any]]:
    """Name -> class of the objects that a parameter takes."""
    found: dict[str, Callable[..., Any]] = {}
    for kind in _members(hint):
        if kind is Transform:
            found.update(LISTABLE)
        elif inspect.isclass(kind) and is_dataclass(kind):
            found[kind.__name__] = kind
    return found


def _object(value: str | Table, objects: Mapping[str, Callable[..., Any]]) -> Any:
    example = "{ Name = { argument = value } }"
    if isinstance(value, Mapping) and len(value) != 1:
        raise ValueRejected(f"{value!r}; expected one table like {example}")
    name, arguments = (value, None) if isinstance(value, str) else next(iter(value.items()))
    if name not in objects:
        raise ValueRejected(f"{name!r} is unknown; {known(name, objects)}")
    with at(name):
        return _call(objects[name], (), {}) if arguments is None else call(objects[name], arguments)


def _member(kind: type[Enum], name: Any) -> Any:
    names = [member.name for member in kind]
    if name not in names:
        raise ValueRejected(f"{name!r}; {known(name, names)}")
    return kind[name]


def _list(value: Sequence[Any], items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not items:
        return tuple(value)
    if len(items) > 1 and items[-1] is not Ellipsis:
        if len(items) != len(value):
            raise ValueRejected(f"{value!r}; expected a list of {len(items)}")
        return tuple(argument(item, kind) for item, kind in zip(value, items, strict=True))
    return tuple(argument(item, items[0]) for item in value)


def _fits(value: Any, kind: Any) -> bool:
    kind = get_origin(kind) or kind
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, bool)
    if kind in _TEXT:
        return isinstance(value, str)
    return False


def _words(kind: Any) -> str:
    kind = get_origin(kind) or kind
    if kind in _TEXT:
        return "text"
    if kind in _LISTS:
        return "a list"
    if inspect.isclass(kind) and issubclass(kind, Enum):
        names = ", ".join(member.name for member in kind)
        return f"{'some' if issubclass(kind, Flag) else 'one'} of: {names}"
    if kind is Transform:
        return "a transform like { RandomCrop = { size = 32 } }"
    return {float: "a number", int: "a whole number", bool: "true or false"}.get(kind, f"a {kind.__name__}")
