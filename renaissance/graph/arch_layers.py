"""Layers of an ArchPlan: what kinds there are, what they are described by, and how shapes pass through them.

A residual sum is a flat run of layers between three markers, the shortcut's first:

    ADD2_START, shortcut..., ADD2_SHORTCUT_END, stem..., ADD2_END

Whoever walks the list keeps a stack: the start pushes the value that both branches read, the middle swaps the
shortcut's result with it, the end adds. Residuals nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from renaissance.core.errors import GraphError, RenaissanceError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue

CHANNEL_MULTIPLE = 8
"""``CHANNEL_PADDING`` rounds channels up to a multiple of this."""


class LayerKind(IntEnum):
    FC = 0
    RELU = 1
    FLATTEN = 2
    SOFTMAX_CE = 3
    CONV = 4
    CBR = 5
    BN1D = 6
    BN2D = 7
    TANH = 8
    SILU = 9
    RELU6 = 10
    LEAKY_RELU = 11
    HARDSWISH = 12
    ELU = 13
    SIGMOID = 14
    DROPOUT = 15
    MAXPOOL = 16
    AVGPOOL = 17
    GAP = 18
    CHANNEL_PADDING = 19
    IDENTITY = 20
    ADD2_START = 21
    ADD2_SHORTCUT_END = 22
    ADD2_END = 23


MARKERS = frozenset({LayerKind.ADD2_START, LayerKind.ADD2_SHORTCUT_END, LayerKind.ADD2_END})

Attrs = Mapping[str, AttrValue]
UNKNOWN = Shape()


@dataclass(frozen=True, slots=True)
class ArchLayer:
    """One layer. Shapes have N = 1 and are placeholders until ``infer_shapes`` has run.

    ``first`` marks the layer at which the part of the model ends that exists once per input slot: the first one with
    weights or, where that lies in a residual sum, an IDENTITY before the sum that copies its input.
    """

    kind: LayerKind
    name: str
    attrs: Attrs = field(default_factory=dict)
    input: Shape = UNKNOWN
    output: Shape = UNKNOWN
    first: bool = False


def window_size(size: int, kernel: int, stride: int, pad: int) -> int:
    """Positions of a window: floor((size + 2 pad - kernel) / stride) + 1."""
    return (size + 2 * pad - kernel) // stride + 1


def _windowed(shape: Shape, attrs: Attrs, channels: int) -> Shape:
    kernel, stride, pad = (int(attrs[key]) for key in ("kernel", "stride", "pad"))
    for axis, size in (("height", shape.h), ("width", shape.w)):
        if kernel > size + 2 * pad:
            raise ShapeError(
                f"kernel {kernel} does not fit the padded {axis} {size} + 2 * {pad} of its input {shape}; "
                f"use larger images, a smaller kernel or more padding"
            )
    height, width = (window_size(size, kernel, stride, pad) for size in (shape.h, shape.w))
    return Shape(shape.n, height, width, channels)


def _convolved(shape: Shape, attrs: Attrs) -> Shape:
    out, groups = int(attrs["out"]), int(attrs["groups"])
    if shape.c % groups or out % groups:
        raise ShapeError(f"{groups} groups must divide the {shape.c} input channels and the {out} filters")
    return _windowed(shape, attrs, out)


def _pooled(shape: Shape, attrs: Attrs) -> Shape:
    return _windowed(shape, attrs, shape.c)


def _same(shape: Shape, attrs: Attrs) -> Shape:
    return shape


def flat(shape: Shape) -> Shape:
    """All values of a sample as channels."""
    return Shape(shape.n, 1, 1, shape.h * shape.w * shape.c)


def padded_channels(channels: int) -> int:
    """``channels`` rounded up to a multiple of 8."""
    return -(-channels // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


@dataclass(frozen=True, slots=True)
class LayerDef:
    """What the steps need to know about a kind of layer. A new kind is a new entry.

    ``attrs``: names and types. ``activations``: the values that attribute may have. ``rows``: True when it gives a row
    per sample (so a BN after it is one-dimensional), False when an image, None when whatever it got.
    """

    output: Callable[[Shape, Attrs], Shape]
    attrs: Mapping[str, type] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    has_weights: bool = False
    wants_flat: bool = False
    """True when the layer reads one row of values per sample."""
    rows: bool | None = None


_CONV: dict[str, type] = {"out": int, "kernel": int, "stride": int, "pad": int, "groups": int, "bias": bool}
_BN: dict[str, type] = {"momentum": float, "eps": float}
_POOL: dict[str, type] = {"kernel": int, "stride": int, "pad": int}
_NORM_ACTIVATIONS = ("none", "relu", "relu6")
_bn = LayerDef(_same, {**_BN, "activation": str}, _NORM_ACTIVATIONS, has_weights=True)
_elementwise = LayerDef(_same)

LAYERS: Mapping[LayerKind, LayerDef] = {
    LayerKind.FC: LayerDef(
        lambda shape, attrs: Shape(shape.n, 1, 1, int(attrs["out"])),
        {"out": int, "bias": bool, "activation": str},
        ("none", "relu"),
        has_weights=True,
        wants_flat=True,
        rows=True,
    ),
    LayerKind.RELU: _elementwise,
    LayerKind.FLATTEN: LayerDef(lambda shape, _: flat(shape), rows=True),
    LayerKind.SOFTMAX_CE: LayerDef(_same, wants_flat=True),
    LayerKind.CONV: LayerDef(_convolved, {**_CONV, "activation": str}, ("none", "relu"), has_weights=True, rows=False),
    LayerKind.CBR: LayerDef(
        _convolved, {**_CONV, **_BN, "activation": str}, _NORM_ACTIVATIONS, has_weights=True, rows=False
    ),
    LayerKind.BN1D: _bn,
    LayerKind.BN2D: _bn,
    LayerKind.TANH: _elementwise,
    LayerKind.SILU: _elementwise,
    LayerKind.RELU6: _elementwise,
    LayerKind.LEAKY_RELU: _elementwise,
    LayerKind.HARDSWISH: _elementwise,
    LayerKind.ELU: _elementwise,
    LayerKind.SIGMOID: _elementwise,
    LayerKind.DROPOUT: LayerDef(_same, {"p": float}),
    LayerKind.MAXPOOL: LayerDef(_pooled, _POOL, rows=False),
    LayerKind.AVGPOOL: LayerDef(_pooled, {**_POOL, "count_include_pad": bool}, rows=False),
    LayerKind.GAP: LayerDef(lambda shape, _: Shape(shape.n, 1, 1, shape.c), rows=True),
    LayerKind.CHANNEL_PADDING: LayerDef(lambda shape, _: Shape(shape.n, shape.h, shape.w, padded_channels(shape.c))),
    LayerKind.IDENTITY: _elementwise,
    LayerKind.ADD2_START: _elementwise,
    LayerKind.ADD2_SHORTCUT_END: _elementwise,
    LayerKind.ADD2_END: LayerDef(_same, {"activation": str}, ("none", "relu")),
}


@dataclass(slots=True)
class _Open:
    """A residual sum that is being walked: what its branches read, and what the shortcut gave."""

    layer: ArchLayer
    source: Shape
    rows: bool
    shortcut: Shape | None = None


@dataclass(slots=True)
class Walk:
    """Follows shapes, and whether samples are rows, through a list of layers with its residual sums.

    Raises ShapeError naming the layer when one does not fit its input or the branches of a sum differ, and GraphError
    when markers do not match.
    """

    shape: Shape
    rows: bool = False
    _open: list[_Open] = field(default_factory=list)

    def step(self, layer: ArchLayer) -> tuple[Shape, Shape]:
        """Pass one layer; returns its input and output shape (those of a marker: what came, what goes on)."""
        before = self.shape
        definition = LAYERS[layer.kind]
        if layer.kind in MARKERS:
            self._marker(layer)
        else:
            try:
                self.shape = definition.output(before, layer.attrs)
            except RenaissanceError as error:
                raise type(error)(f"layer {layer.name}: {error}") from None
            self.rows = self.rows if definition.rows is None else definition.rows
        return before, self.shape

    def finish(self) -> None:
        """Raise when a residual sum is still open."""
        if self._open:
            raise GraphError(f"layer {self._open[-1].layer.name}: its ADD2_END is missing")

    def _marker(self, layer: ArchLayer) -> None:
        if layer.kind is LayerKind.ADD2_START:
            self._open.append(_Open(layer, self.shape, self.rows))
            return
        last = self._open[-1] if self._open else None
        if last is None or (last.shortcut is None) != (layer.kind is LayerKind.ADD2_SHORTCUT_END):
            raise GraphError(
                f"layer {layer.name}: {layer.kind.name} without the marker before it; "
                f"expected ADD2_START, ADD2_SHORTCUT_END, ADD2_END"
            )
        if last.shortcut is None:
            last.shortcut = self.shape
            self.shape, self.rows = last.source, last.rows
            return
        self._open.pop()
        if last.shortcut != self.shape:
            raise ShapeError(
                f"layer {layer.name}: the shortcut gives {last.shortcut}, the stem {self.shape}; both branches of an "
                f"add2 must give one shape (put conv(channels, 1, stride) and bn() into the shortcut)"
            )


def follow(layers: Iterable[ArchLayer], sample: Shape) -> Iterator[tuple[ArchLayer, Shape, Shape]]:
    """Every layer with its input and output shape."""
    walk = Walk(sample)
    for layer in layers:
        before, after = walk.step(layer)
        yield layer, before, after
    walk.finish()


def markers_of(number: int) -> tuple[ArchLayer, ArchLayer, ArchLayer]:
    """The three markers of the residual sum with this number; only the end makes a tensor, so it has the plain name."""
    name = f"add{number}"
    return (
        ArchLayer(LayerKind.ADD2_START, f"{name}.start"),
        ArchLayer(LayerKind.ADD2_SHORTCUT_END, f"{name}.shortcut"),
        ArchLayer(LayerKind.ADD2_END, name, {"activation": "none"}),
    )
