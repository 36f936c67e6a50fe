"""ArchPlan as JSON: what ``to_json`` writes, ``from_json`` reads back as an equal plan, for every kind of layer.

    {"format": "ArchPlan-1", "input": [1, 28, 28, 1], "num_classes": 10, "layers": [
      {"kind": "FC", "name": "fc1", "attrs": {...}, "input": [...], "output": [...], "first": true},
      ...]}

One line per layer, so that two plans can be compared line by line. The reader trusts nothing: it follows the shapes
again and checks every attribute, so a plan that it returns is one the compiler could have made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from renaissance.core.dtype import FP32_SMALLEST_NORMAL
from renaissance.core.errors import FormatError, RenaissanceError
from renaissance.core.shape import INT32_MAX, Shape
from renaissance.graph.arch_layers import LAYERS, ArchLayer, Attrs, LayerKind
from renaissance.graph.arch_merge import mark_first
from renaissance.graph.arch_plan import ArchPlan
from renaissance.graph.arch_steps import check_loss, infer_shapes
from renaissance.graph.computation_graph import AttrValue

FORMAT = "ArchPlan-1"
_PLAN_KEYS = ("format", "input", "num_classes", "layers")
_LAYER_KEYS = ("kind", "name", "attrs", "input", "output", "first")
_RANGES: Mapping[str, tuple[float, float]] = {
    "pad": (0, INT32_MAX),
    "p": (0.0, math.nextafter(1.0, 0.0)),
    "momentum": (0.0, 1.0),
    "eps": (FP32_SMALLEST_NORMAL, INT32_MAX),
}
_COUNT = (1, INT32_MAX)
"""Range of every other number."""


def to_json(plan: ArchPlan) -> str:
    """Stable text of a plan."""
    rows = [
        json.dumps(
            {
                "kind": layer.kind.name,
                "name": layer.name,
                "attrs": dict(layer.attrs),
                "input": list(layer.input.dims),
                "output": list(layer.output.dims),
                "first": layer.first,
            }
        )
        for layer in plan.layers
    ]
    head = json.dumps({"format": FORMAT, "input": list(plan.input.dims), "num_classes": plan.num_classes})
    return f'{head[:-1]}, "layers": [\n  ' + ",\n  ".join(rows) + "\n]}\n"


def from_json(text: str, name: str = "ArchPlan") -> ArchPlan:
    """The plan that ``to_json`` wrote. ``name`` says in errors where the text is from, e.g. a file.

    Raises FormatError that names the layer and the entry, with what was expected and found.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: is not JSON: {error}") from None
    fields = _fields(name, data, _PLAN_KEYS)
    if fields["format"] != FORMAT:
        _refuse(f"{name}: format", f"{FORMAT!r}", fields["format"])
    sample = _shape(f"{name}: input", fields["input"])
    classes = _integer(f"{name}: num_classes", fields["num_classes"])
    rows = fields["layers"]
    if not isinstance(rows, list) or not rows:
        _refuse(f"{name}: layers", "a list with at least one layer", rows)
    layers = tuple(_read_layer(f"{name}: layers[{i}]", row) for i, row in enumerate(rows))
    _check(name, layers, sample, classes)
    return ArchPlan(sample, classes, layers)


def _read_layer(where: str, row: object) -> ArchLayer:
    fields = _fields(where, row, _LAYER_KEYS)
    kind, name, first = fields["kind"], fields["name"], fields["first"]
    if not isinstance(kind, str) or kind not in LayerKind.__members__:
        _refuse(f"{where}.kind", f"one of {', '.join(LayerKind.__members__)}", kind)
    if not isinstance(name, str) or not name:
        _refuse(f"{where}.name", "the name of the layer", name)
    if not isinstance(first, bool):
        _refuse(f"{where}.first", "true or false", first)
    layer_kind = LayerKind[kind]
    attrs = _read_attrs(f"{where}.attrs", layer_kind, fields["attrs"])
    before, after = (_shape(f"{where}.{key}", fields[key]) for key in ("input", "output"))
    return ArchLayer(layer_kind, name, attrs, before, after, first)


def _read_attrs(where: str, kind: LayerKind, value: object) -> Attrs:
    expected = LAYERS[kind].attrs
    given = _fields(where, value, tuple(expected))
    attrs: dict[str, AttrValue] = {}
    for key, attr_type in expected.items():
        attr = given[key]
        if type(attr) is not attr_type or not isinstance(attr, int | float | str | bool):
            _refuse(f"{where}.{key}", f"a value of type {attr_type.__name__}", attr)
        if isinstance(attr, str) and attr not in LAYERS[kind].activations:
            _refuse(f"{where}.{key}", f"one of {', '.join(LAYERS[kind].activations)}", attr)
        if isinstance(attr, int | float) and not isinstance(attr, bool):
            low, high = _RANGES.get(key, _COUNT)
            if not low <= attr <= high:
                _refuse(f"{where}.{key}", f"a number from {low} to {high}", attr)
        attrs[key] = attr
    return attrs


def _check(name: str, layers: Sequence[ArchLayer], sample: Shape, classes: int) -> None:
    losses = [i for i, layer in enumerate(layers) if layer.kind is LayerKind.SOFTMAX_CE]
    if losses != [len(layers) - 1]:
        raise FormatError(f"{name}: a plan ends with its only SOFTMAX_CE; it has one at each of {losses}")
    names = [layer.name for layer in layers]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise FormatError(f"{name}: two layers have the name {twice!r}; expected names that differ")
    try:
        shaped = infer_shapes(layers, sample)
        check_loss(shaped, classes)
    except RenaissanceError as error:
        raise FormatError(f"{name}: {error}") from None
    for i, (given, right) in enumerate(zip(layers, shaped, strict=True)):
        if given != right:
            raise FormatError(
                f"{name}: layers[{i}] ({given.name}): shapes are {given.input} -> {given.output}; "
                f"expected {right.input} -> {right.output}"
            )
    copied = tuple(layer for layer in layers if not (layer.first and layer.kind is LayerKind.IDENTITY))
    if mark_first(copied) != tuple(layers):
        marked = [layer.name for layer in layers if layer.first]
        right_name = next(layer.name for layer in mark_first(copied) if layer.first)
        raise FormatError(f"{name}: layers marked first are {marked}; expected [{right_name!r}]")


def _fields(where: str, value: object, keys: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict) or set(value) != set(keys):
        found = f"the entries {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)
        raise FormatError(f"{where} has {found}; expected the entries {', '.join(keys) or '(none)'}")
    return value


def _integer(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
        _refuse(where, "an integer of at least 1", value)
    return value


def _shape(where: str, value: object) -> Shape:
    if not isinstance(value, list) or len(value) != 4:
        _refuse(where, "four sizes [1,H,W,C]", value)
    sizes = [_integer(where, size) for size in value]
    if sizes[0] != 1:
        _refuse(where, "one sample, N = 1", value)
    return Shape(*sizes)


def _refuse(where: str, expected: str, value: object) -> NoReturn:
    raise FormatError(f"{where} is {value!r}; expected {expected}")
