"""ArchPlan: the model as a flat, standardised list of layers with shapes.

Each step is a function from plain data to plain data; ``build_arch_plan`` applies them in order:

    expand              tree -> list, layers numbered per kind ("fc1", "relu1", ...)
    append_loss         the softmax cross-entropy, exactly once, at the end
    normalize_flattens  a flatten where an fc or the loss would see H*W > 1, none where it would do nothing
    infer_shapes        input and output shape of every layer (N = 1)
    merge_activations   fc + relu -> one fc with activation "relu"
    mark_first          the first layer that has weights; all graphs up to it exist once per input slot

The checks: the model has weights, and the loss sees as many values as there are classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph.blueprint import BluePrint, Fc, Flatten, Layer, Relu, Seq
from renaissance.graph.computation_graph import AttrValue


class LayerKind(IntEnum):
    FC = 0
    RELU = 1
    FLATTEN = 2
    SOFTMAX_CE = 3


Attrs = Mapping[str, AttrValue]
UNKNOWN = Shape()


@dataclass(frozen=True, slots=True)
class ArchLayer:
    """One layer. Shapes have N = 1 and are placeholders until ``infer_shapes`` has run."""

    kind: LayerKind
    name: str
    attrs: Attrs = field(default_factory=dict)
    input: Shape = UNKNOWN
    output: Shape = UNKNOWN
    first: bool = False


def _flat(shape: Shape) -> Shape:
    return Shape.of(shape.numel)


@dataclass(frozen=True, slots=True)
class LayerDef:
    """What the steps need to know about a kind of layer. A new kind is a new entry."""

    output: Callable[[Shape, Attrs], Shape]
    has_weights: bool = False
    wants_flat: bool = False
    """True when the layer reads one row of values per sample."""


LAYERS: Mapping[LayerKind, LayerDef] = {
    LayerKind.FC: LayerDef(lambda _, attrs: Shape.of(int(attrs["out"])), has_weights=True, wants_flat=True),
    LayerKind.RELU: LayerDef(lambda shape, _: shape),
    LayerKind.FLATTEN: LayerDef(lambda shape, _: _flat(shape)),
    LayerKind.SOFTMAX_CE: LayerDef(lambda shape, _: shape, wants_flat=True),
}


@dataclass(frozen=True, slots=True)
class ArchPlan:
    """The standardised model."""

    input: Shape
    num_classes: int
    layers: tuple[ArchLayer, ...]

    @property
    def first(self) -> int:
        """Index of the first weight-bearing layer."""
        return next(i for i, layer in enumerate(self.layers) if layer.first)

    def text(self) -> str:
        """Stable text, one row per layer."""
        lines = [
            f"ArchPlan: {len(self.layers)} layers, input {self.input}, {self.num_classes} classes, "
            f"first weights in {self.layers[self.first].name}"
        ]
        for i, layer in enumerate(self.layers):
            attrs = " ".join(f"{k}={v}" for k, v in layer.attrs.items())
            shapes = f"{layer.input} -> {layer.output}"
            row = f"  {i:>3} {layer.kind.name:<10} {layer.name:<12} {shapes:<32} {attrs}{' [FIRST]' * layer.first}"
            lines.append(row.rstrip())
        return "\n".join(lines) + "\n"


def build_arch_plan(blueprint: BluePrint, input_shape: Shape, num_classes: int) -> ArchPlan:
    """All steps for a model whose samples are ``input_shape`` (its N is ignored).

    Raises ShapeError when the last layer does not fit ``num_classes``, ValueRejected when the model has no weights.
    """
    sample = input_shape.with_n(1)
    layers = normalize_flattens(append_loss(expand(blueprint)), sample)
    layers = infer_shapes(layers, sample)
    check_loss(layers, num_classes)
    return ArchPlan(sample, num_classes, mark_first(merge_activations(layers)))


def expand(blueprint: BluePrint) -> tuple[ArchLayer, ...]:
    """The leaves of the tree in order."""
    return number(tuple(_leaf(leaf) for leaf in _leaves(blueprint.root)))


def _leaves(layer: Layer) -> Iterator[Layer]:
    if isinstance(layer, Seq):
        for child in layer.layers:
            yield from _leaves(child)
    else:
        yield layer


def _leaf(layer: Layer) -> ArchLayer:
    match layer:
        case Fc(out, bias):
            return ArchLayer(LayerKind.FC, "", {"out": out, "bias": bias, "activation": "none"})
        case Relu():
            return ArchLayer(LayerKind.RELU, "")
        case Flatten():
            return ArchLayer(LayerKind.FLATTEN, "")
        case Seq():
            raise ValueRejected("a seq is not a leaf")


def number(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """The layers named by kind and position among their kind."""
    count = dict.fromkeys(LayerKind, 0)
    named = []
    for layer in layers:
        count[layer.kind] += 1
        named.append(replace(layer, name=f"{layer.kind.name.lower()}{count[layer.kind]}"))
    return tuple(named)


def append_loss(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """The layers with exactly one loss, at the end."""
    rest = [layer for layer in layers if layer.kind is not LayerKind.SOFTMAX_CE]
    return (*rest, ArchLayer(LayerKind.SOFTMAX_CE, "loss"))


def normalize_flattens(layers: Sequence[ArchLayer], sample: Shape) -> tuple[ArchLayer, ...]:
    """Flattens only where they change the shape, and wherever a layer needs one.

    Shapes are followed with every written flatten in place, so writing one that is not needed changes nothing.
    """
    result: list[ArchLayer] = []
    shape = sample
    for layer in layers:
        is_flat = shape == _flat(shape)
        if layer.kind is LayerKind.FLATTEN and is_flat:
            continue
        if LAYERS[layer.kind].wants_flat and not is_flat:
            result.append(ArchLayer(LayerKind.FLATTEN, ""))
            shape = _flat(shape)
        result.append(layer)
        shape = LAYERS[layer.kind].output(shape, layer.attrs)
    flattens = iter(number([layer for layer in result if layer.kind is LayerKind.FLATTEN]))
    return tuple(next(flattens) if layer.kind is LayerKind.FLATTEN else layer for layer in result)


def infer_shapes(layers: Sequence[ArchLayer], sample: Shape) -> tuple[ArchLayer, ...]:
    """The layers with their shapes; each reads what the one before it gives."""
    shaped = []
    for layer in layers:
        output = LAYERS[layer.kind].output(sample, layer.attrs)
        shaped.append(replace(layer, input=sample, output=output))
        sample = output
    return tuple(shaped)


def check_loss(layers: Sequence[ArchLayer], num_classes: int) -> None:
    """Raise when the model has no weights or its last layer does not give one value per class."""
    weighted = [layer for layer in layers if LAYERS[layer.kind].has_weights]
    if not weighted:
        raise ValueRejected("the model has no layer with weights, so there is nothing to train; add an fc(...)")
    loss, last = layers[-1], weighted[-1]
    if loss.input.c != num_classes:
        raise ShapeError(
            f"last layer {last.name}: it gives {loss.input.c} outputs, but the data set has {num_classes} classes; "
            f"end the model with fc({num_classes})"
        )


def merge_activations(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """A relu right after an fc becomes the fc's activation; another relu after that stays a layer."""
    merged: list[ArchLayer] = []
    for layer in layers:
        last = merged[-1] if merged else None
        if (
            layer.kind is LayerKind.RELU
            and last is not None
            and last.kind is LayerKind.FC
            and last.attrs["activation"] == "none"
        ):
            merged[-1] = replace(last, attrs={**last.attrs, "activation": "relu"}, output=layer.output)
        else:
            merged.append(layer)
    return tuple(merged)


def mark_first(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """The layers with the first weight-bearing one marked."""
    first = next(i for i, layer in enumerate(layers) if LAYERS[layer.kind].has_weights)
    return tuple(replace(layer, first=i == first) for i, layer in enumerate(layers))
