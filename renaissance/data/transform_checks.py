"""Checks of the values that transforms are made of; each error names the transform and the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence

from renaissance.core.errors import ValueRejected


def integer(owner: str, argument: str, value: object, low: int, high: int) -> int:
    """``value`` as an int in [low, high]; raises ValueRejected."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected a whole number from {low} to {high}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise ValueRejected(f"{owner}: {argument} is {number}; expected {low} to {high}")
    return number


def real(owner: str, argument: str, value: object, low: float, high: float) -> float:
    """``value`` as a finite float in [low, high]; raises ValueRejected."""
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected a number from {low:g} to {high:g}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except TypeError:  # an array of several numbers
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected a number from {low:g} to {high:g}") from None
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueRejected(f"{owner}: {argument} is {number!r}; expected {low:g} to {high:g}")
    return number + 0.0  # -0.0 and 0.0 are the same recipe


def pair(owner: str, argument: str, value: object, upper: float, lower: float = 0.0) -> tuple[float, float]:
    """Two floats with 0 < smallest <= largest, both in [lower, upper]; raises ValueRejected."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected two numbers, smallest first")
    low, high = (real(owner, argument, number, lower, upper) for number in value)
    if not 0.0 < low <= high:
        raise ValueRejected(f"{owner}: {argument} is {(low, high)!r}; expected 0 < smallest <= largest")
    return low, high


def fill(owner: str, value: object) -> int | tuple[int, ...]:
    """One pixel value for all channels or a tuple of three, each 0 to 255; raises ValueRejected."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) not in (1, 3):
            raise ValueRejected(f"{owner}: fill has {len(value)} values; expected one, or one per channel (3)")
        values = tuple(integer(owner, "fill", v, 0, 255) for v in value)
        return values[0] if len(values) == 1 else values
    return integer(owner, "fill", value, 0, 255)


def flag(owner: str, argument: str, value: object) -> bool:
    """``value`` as a bool; raises ValueRejected for anything else (1 and True would be two recipes)."""
    if not isinstance(value, bool):
        raise ValueRejected(f"{owner}: {argument} is {value!r}; expected True or False")
    return value
