"""What the options of losses, optimizers and schedules have in common."""

from __future__ import annotations

from numbers import Real

from renaissance.core.errors import ValueRejected


def number(name: str, value: object) -> float:
    """``value`` as a float; raises ValueRejected naming the option for what is none, such as text or True."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueRejected(f"{name} is {value!r}; expected a number")
    return float(value)
