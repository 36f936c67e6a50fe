"""Transforms as data: frozen values that say what happens to a picture; they hold no code and no random state.

Values are checked at construction (ValueRejected, naming transform and argument); the order of a chain is checked by
``Recipe.build``. docs/recipes.md defines what each transform does to the pixels, docs/random-numbers.md which draws it
uses. "Geometric" transforms are fused into one resampling pass; "record only" ones are carried out by
``FusedNormalization``, whatever their place in the list, because they act on the finished picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from renaissance.core.errors import ValueRejected

PAD_MODES = ("constant", "edge", "reflect", "symmetric")
MAX_SIZE = 8192
"""Largest side of a picture or canvas in pixels; keeps 16.16 fixed-point coordinates inside 32 bits."""


@dataclass(frozen=True, slots=True)
class Transform:
    """Base of everything a user can list in a recipe."""

    random: ClassVar[bool] = False
    geometric: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, object]:
        """The JSON form: ``{"type": name, argument: value, ...}``."""
        plain: dict[str, object] = {"type": self.name}
        for field in fields(self):
            value = getattr(self, field.name)
            plain[field.name] = list(value) if isinstance(value, tuple) else value
        return plain


@dataclass(frozen=True, slots=True)
class Pad(Transform):
    """Adds ``padding`` pixels on all four sides, with the semantics of ``numpy.pad`` for each mode.

    ``fill`` (constant mode only) is one value for all channels or one per channel, 0 to 255.
    """

    geometric: ClassVar[bool] = True
    padding: int
    fill: int | Sequence[int] = 0
    mode: str = "constant"

    def __post_init__(self) -> None:
        _set(self, "padding", _integer("Pad", "padding", self.padding, 0, MAX_SIZE))
        _set(self, "fill", _fill("Pad", self.fill))
        if self.mode not in PAD_MODES:
            raise ValueRejected(f"Pad: mode is {self.mode!r}; expected one of: {', '.join(PAD_MODES)}")
        if self.mode != "constant" and any(self.fill_values):
            raise ValueRejected(f"Pad: fill is {self.fill!r} in mode {self.mode!r}; fill acts in constant mode only")

    @property
    def fill_values(self) -> tuple[int, ...]:
        return _as_tuple(self.fill)


@dataclass(frozen=True, slots=True)
class RandomCrop(Transform):
    """Cuts a ``size`` x ``size`` window at a uniformly drawn place.

    A picture smaller than the window is first padded with zeros on all sides by ``max(size - width, size - height)``.
    """

    random: ClassVar[bool] = True
    geometric: ClassVar[bool] = True
    size: int

    def __post_init__(self) -> None:
        _set(self, "size", _integer("RandomCrop", "size", self.size, 1, MAX_SIZE))


@dataclass(frozen=True, slots=True)
class RandomRotation(Transform):
    """Turns about the true centre by an angle uniform in [-degrees, degrees]; the size stays, outside is ``fill``."""

    random: ClassVar[bool] = True
    geometric: ClassVar[bool] = True
    degrees: float = 30.0
    fill: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        _set(self, "degrees", _real("RandomRotation", "degrees", self.degrees, 0.0, 360.0))
        _set(self, "fill", _fill("RandomRotation", self.fill))

    @property
    def fill_values(self) -> tuple[int, ...]:
        return _as_tuple(self.fill)


@dataclass(frozen=True, slots=True)
class RandomScale(Transform):
    """Stretches about the centre; the horizontal and the vertical ratio are independent, each uniform in
    [min_ratio, max_ratio]; the size stays, outside is 0.
    """

    random: ClassVar[bool] = True
    geometric: ClassVar[bool] = True
    min_ratio: float
    max_ratio: float

    def __post_init__(self) -> None:
        low = _real("RandomScale", "min_ratio", self.min_ratio, MIN_SCALE, MAX_SCALE)
        high = _real("RandomScale", "max_ratio", self.max_ratio, MIN_SCALE, MAX_SCALE)
        if low > high:
            raise ValueRejected(f"RandomScale: min_ratio {low!r} is above max_ratio {high!r}; give the smaller first")
        _set(self, "min_ratio", low)
        _set(self, "max_ratio", high)


@dataclass(frozen=True, slots=True)
class RandomErasing(Transform):
    """With probability ``p`` sets one rectangle of the finished picture to 0 after normalisation (record only).

    ``scale``: smallest and largest share of the area; ``ratio``: smallest and largest height to width, log-uniform.
    """

    random: ClassVar[bool] = True
    p: float
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)

    def __post_init__(self) -> None:
        _set(self, "p", _real("RandomErasing", "p", self.p, 0.0, 1.0))
        for argument, upper in (("scale", 1.0), ("ratio", 1e6)):
            low, high = _pair("RandomErasing", argument, getattr(self, argument), upper)
            _set(self, argument, (low, high))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(Transform):
    """With probability ``p`` mirrors left and right (record only)."""

    random: ClassVar[bool] = True
    p: float = 0.5

    def __post_init__(self) -> None:
        _set(self, "p", _real("RandomHorizontalFlip", "p", self.p, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class FusedNormalization:
    """The last operation of every chain, never listed by the user: flip, normalise, erase, cast and channel padding
    in one pass over the output. ``flip`` and ``erase`` are (op index, transform) or None.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: tuple[int, RandomHorizontalFlip] | None
    erase: tuple[int, RandomErasing] | None


MIN_SCALE = 2.0**-6
MAX_SCALE = 2.0**6
"""Bounds of RandomScale's ratios: beyond them a picture is a point or a single grey."""

LISTABLE: dict[str, type[Transform]] = {
    cls.__name__: cls for cls in (Pad, RandomCrop, RandomRotation, RandomScale, RandomErasing, RandomHorizontalFlip)
}
"""Every transform a recipe may list, by name; the JSON form uses these names."""


def transform_from_dict(plain: object) -> Transform:
    """Rebuild a transform from ``Transform.to_dict``; raises ValueRejected for an unknown type or argument."""
    if not isinstance(plain, dict) or not isinstance(plain.get("type"), str):
        raise ValueRejected(f'expected an object with a "type", given {plain!r}')
    name = plain["type"]
    cls = LISTABLE.get(name)
    if cls is None:
        raise ValueRejected(f"unknown transform {name!r}; expected one of: {', '.join(LISTABLE)}")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    del arguments["type"]
    known = [field.name for field in fields(cls)]
    for key in arguments:
        if key not in known:
            raise ValueRejected(f"{name}: unknown argument {key!r}; expected: {', '.join(known)}")
    for field in known:
        if field not in arguments:
            raise ValueRejected(f"{name}: argument {field!r} is missing; expected: {', '.join(known)}")
    return cls(**arguments)


def _set(instance: Transform, field: str, value: object) -> None:
    object.__setattr__(instance, field, value)


def _as_tuple(fill: int | Sequence[int]) -> tuple[int, ...]:
    return (fill,) if isinstance(fill, int) else tuple(fill)


def _integer(owner: str, argument: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected a whole number from {low} to {high}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise ValueRejected(f"{owner}: {argument} is {number}; expected {low} to {high}")
    return number


def _real(owner: str, argument: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected a number from {low:g} to {high:g}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueRejected(f"{owner}: {argument} is {number!r}; expected {low:g} to {high:g}")
    return number + 0.0  # -0.0 and 0.0 are the same recipe


def _pair(owner: str, argument: str, value: object, upper: float) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected two numbers, smallest first")
    low, high = (_real(owner, argument, number, 0.0, upper) for number in value)
    if not 0.0 < low <= high:
        raise ValueRejected(f"{owner}: {argument} is {(low, high)!r}; expected 0 < smallest <= largest")
    return low, high


def _fill(owner: str, value: object) -> int | tuple[int, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) not in (1, 3):
            raise ValueRejected(f"{owner}: fill has {len(value)} values; expected one, or one per channel (3)")
        values = tuple(_integer(owner, "fill", v, 0, 255) for v in value)
        return values[0] if len(values) == 1 else values
    return _integer(owner, "fill", value, 0, 255)
