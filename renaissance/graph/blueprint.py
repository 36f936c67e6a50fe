"""BluePrint: the model as the user writes it, a tree of immutable layers.

    BluePrint(seq(fc(1024), relu(), fc(10)))

A layer is a description without shapes; the same object may appear in several places and is a new layer each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from renaissance.core.errors import ValueRejected
from renaissance.core.shape import INT32_MAX


@dataclass(frozen=True, slots=True)
class Fc:
    """Fully connected layer: y = x·Wᵀ + b over all values of a sample."""

    out: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Relu:
    """max(x, 0)."""


@dataclass(frozen=True, slots=True)
class Flatten:
    """[N,H,W,C] -> [N,1,1,H*W*C]."""


@dataclass(frozen=True, slots=True)
class Seq:
    """Layers one after the other."""

    layers: tuple[Layer, ...]


Layer = Fc | Relu | Flatten | Seq


def fc(out: int, bias: bool = True) -> Fc:
    """Fully connected layer with ``out`` outputs. Raises ValueRejected for a bad ``out`` or a non-boolean ``bias``."""
    if isinstance(out, bool) or not isinstance(out, int) or not 1 <= out <= INT32_MAX:
        raise ValueRejected(f"fc({out!r}): out is the number of outputs; expected an integer of at least 1")
    if not isinstance(bias, bool):
        raise ValueRejected(f"fc({out}, bias={bias!r}): expected True or False")
    return Fc(out, bias)


def relu() -> Relu:
    """Rectified linear unit."""
    return Relu()


def flatten() -> Flatten:
    """All values of a sample as one row; allowed anywhere, needed nowhere (the compiler adds it before an fc)."""
    return Flatten()


def seq(*layers: Layer | list[Layer] | tuple[Layer, ...]) -> Seq:
    """Layers in order, as arguments or as one list; nests. Raises ValueRejected when empty or given something else."""
    given = tuple(layers[0]) if len(layers) == 1 and isinstance(layers[0], list | tuple) else layers
    if not given:
        raise ValueRejected("seq(): expected at least one layer, for example seq(fc(10))")
    return Seq(tuple(_layer(x, f"seq(): item {i}") for i, x in enumerate(given)))


@dataclass(frozen=True, slots=True, init=False)
class BluePrint:
    """A whole model: one layer, usually a ``seq``. Raises ValueRejected for anything that is not a layer."""

    root: Layer

    def __init__(self, layer: Layer | BluePrint) -> None:
        root = layer.root if isinstance(layer, BluePrint) else _layer(layer, "BluePrint()")
        object.__setattr__(self, "root", root)


def _layer(value: object, where: str) -> Layer:
    if isinstance(value, Fc | Relu | Flatten | Seq):
        return value
    raise ValueRejected(f"{where} is {value!r}; expected a layer: fc(...), relu(), flatten() or seq(...)")
