"""How an op is declared: the classes that the entries of the op table are made of, and the checks of a use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from renaissance.core.enums import StreamKind
from renaissance.core.errors import GraphError
from renaissance.graph.computation_graph import AttrValue
from renaissance.graph.gradients import GradientRule
from renaissance.graph.op_types import Attrs, FitRule, TypeRule, Types

AttrRules = Mapping[str, tuple[AttrValue, ...] | type]
"""Attribute -> allowed values, or the type of a free value."""
When = Mapping[str, tuple[str, tuple[AttrValue, ...]]]
"""Role -> (attribute, values with which the role is present)."""


class Place(IntEnum):
    """Where an output lives; the compiler turns it and the dtype into a region."""

    STATE = 0
    """A tensor that exists already: weight, gradient of a weight, statistic, scalar, label."""
    FEATURE = 1
    GRADIENT = 2
    TEMP = 3
    MASK = 4
    PREDICTED = 5


@dataclass(frozen=True, slots=True)
class Output:
    """One output role."""

    role: str
    place: Place
    accumulates: bool = False
    """True when the old contents are read too: the op does not fully overwrite the tensor."""


@dataclass(frozen=True, slots=True)
class SpanRole:
    """One region span an op works on. A span may be read, written or both, whichever list of the node holds it."""

    role: str
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class OpDef:
    """Declaration of one op."""

    name: str
    stream: StreamKind | None
    """None: the stream of the graph that the node is in."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    spans_in: tuple[SpanRole, ...] = ()
    spans_out: tuple[SpanRole, ...] = ()
    attrs: AttrRules = field(default_factory=dict)
    """All are required."""
    types: TypeRule | None = None
    """Types of the outputs from those of the inputs; None: all tensors are step scalars."""
    fits: FitRule | None = None
    """Check of outputs whose shape the declaration gives (the type rule returns None for them)."""
    gradient: GradientRule | None = None
    when: When = field(default_factory=dict)


def required(roles: Sequence[str]) -> int:
    """Number of roles that must be present."""
    return sum(not r.endswith("?") for r in roles)


def roles_for(definition: OpDef, roles: Sequence[str], attrs: Attrs) -> tuple[str, ...]:
    """``roles`` with those of ``when`` decided: dropped, or required (without the "?")."""
    result = []
    for role in roles:
        name = role.removesuffix("?")
        if name not in definition.when:
            result.append(role)
            continue
        attr, values = definition.when[name]
        if attrs.get(attr) in values:
            result.append(name)
    return tuple(result)


def check_types(label: str, definition: OpDef, inputs: Types, outputs: Types, attrs: Attrs) -> None:
    """Raise GraphError, ShapeError or DTypeError unless the outputs of a node are what its inputs give."""
    if definition.types is None:
        for t in (*inputs, *outputs):
            if t.shape.numel != 1:
                raise GraphError(f"{label}: {t} where a step scalar is expected")
        return
    for given, expected in zip(outputs, definition.types(inputs, attrs), strict=False):
        if expected is None:
            continue
        if given.shape != expected.shape or expected.dtype not in (None, given.dtype):
            raise GraphError(f"{label}: output is {given}; its inputs give {expected}")
    if definition.fits is not None:
        definition.fits(inputs, outputs, attrs)


def check_arity(label: str, what: str, given: int, roles: Sequence[str]) -> None:
    """Raise GraphError unless ``given`` fits the roles."""
    if not required(roles) <= given <= len(roles):
        raise GraphError(f"{label}: {given} {what}; expected {', '.join(roles) or 'none'}")
