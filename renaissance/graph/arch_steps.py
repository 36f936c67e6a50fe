"""The standardising steps of the ArchPlan: functions from plain data to plain data.

``build_arch_plan`` applies them, and the merging steps of ``arch_merge``, in order; each can be used and tested alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.core.shape import Shape
from renaissance.graph.arch_layers import LAYERS, ArchLayer, Attrs, LayerKind, Walk, flat, follow, markers_of
from renaissance.graph.blocks import mobile_block, resnet_block
from renaissance.graph.blueprint import (
    Activation,
    Add2,
    AvgPool,
    BluePrint,
    Bn,
    ChannelPadding,
    Conv,
    Dropout,
    Fc,
    Flatten,
    Gap,
    Identity,
    Layer,
    MaxPool,
    MbConv,
    Repeat,
    ResNetBlock,
    Seq,
)

BN_KINDS = frozenset({LayerKind.BN1D, LayerKind.BN2D})


def expand(blueprint: BluePrint, sample: Shape) -> tuple[ArchLayer, ...]:
    """The leaves of the tree in order, named by kind and position ("fc1", "relu1", ...), blocks and repeats unrolled.

    Shapes are followed because a block depends on the channels it gets. Raises ShapeError naming the layer.
    """
    expander = _Expander(sample)
    expander.add(blueprint.root)
    return tuple(expander.layers)


class _Expander:
    def __init__(self, sample: Shape) -> None:
        self.layers: list[ArchLayer] = []
        self._walk = Walk(sample)
        self._count: Counter[str] = Counter()

    def add(self, layer: Layer) -> None:
        match layer:
            case Seq(layers):
                for child in layers:
                    self.add(child)
            case Repeat(body, times):
                for _ in range(times):
                    self.add(body)
            case Add2(shortcut, stem):
                start, middle, end = markers_of(self._next("add"))
                self._append(start)
                self.add(shortcut)
                self._append(middle)
                self.add(stem)
                self._append(end)
            case ResNetBlock():
                self.add(resnet_block(layer, self._walk.shape.c))
            case MbConv():
                self.add(mobile_block(layer, self._walk.shape.c))
            case _:
                kind, attrs = _leaf(layer, self._walk.shape.c)
                name = _SHORT_NAMES.get(kind, kind.name.lower())
                self._append(ArchLayer(kind, f"{name}{self._next(name)}", attrs))

    def _next(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name]

    def _append(self, layer: ArchLayer) -> None:
        self._walk.step(layer)
        self.layers.append(layer)


_SHORT_NAMES = {LayerKind.BN1D: "bn", LayerKind.BN2D: "bn"}
"""Which of the two a BN is, is decided in a later step; its name does not depend on it."""


def _leaf(layer: Layer, channels: int) -> tuple[LayerKind, Attrs]:
    match layer:
        case Fc(out, bias):
            return LayerKind.FC, {"out": out, "bias": bias, "activation": "none"}
        case Conv(out, kernel, stride, pad, groups, bias):
            filters = channels if out is None else out
            attrs: dict[str, int | float | str | bool] = {"out": filters, **_window(kernel, stride, pad)}
            attrs |= {"groups": channels if groups is None else groups, "bias": bias, "activation": "none"}
            return LayerKind.CONV, attrs
        case Bn(momentum, eps):
            return LayerKind.BN2D, {"momentum": momentum, "eps": eps, "activation": "none"}
        case Activation(kind):
            return LayerKind[kind.name], {}
        case Dropout(p):
            return LayerKind.DROPOUT, {"p": p}
        case MaxPool(kernel, stride, pad):
            return LayerKind.MAXPOOL, _window(kernel, stride, pad)
        case AvgPool(kernel, stride, pad, count_include_pad):
            return LayerKind.AVGPOOL, {**_window(kernel, stride, pad), "count_include_pad": count_include_pad}
        case Flatten():
            return LayerKind.FLATTEN, {}
        case ChannelPadding():
            return LayerKind.CHANNEL_PADDING, {}
        case Gap():
            return LayerKind.GAP, {}
        case Identity():
            return LayerKind.IDENTITY, {}
    raise ValueRejected(f"{layer!r} is not a leaf of the blueprint")


def _window(kernel: int, stride: int, pad: int) -> dict[str, int]:
    return {"kernel": kernel, "stride": stride, "pad": pad}


def renumber(layers: Sequence[ArchLayer], kind: LayerKind) -> tuple[ArchLayer, ...]:
    """The layers with those of one kind named again by position, after some were added or removed."""
    count = 0
    named = []
    for layer in layers:
        if layer.kind is kind:
            count += 1
            layer = replace(layer, name=f"{kind.name.lower()}{count}")
        named.append(layer)
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
    walk = Walk(sample)
    for layer in layers:
        is_flat = walk.shape == flat(walk.shape)
        if layer.kind is LayerKind.FLATTEN and is_flat:
            continue
        if LAYERS[layer.kind].wants_flat and not is_flat:
            inserted = ArchLayer(LayerKind.FLATTEN, f"flatten before {layer.name}")
            walk.step(inserted)
            result.append(inserted)
        result.append(layer)
        walk.step(layer)
    return renumber(result, LayerKind.FLATTEN)


def normalize_identities(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """Identities only in shortcuts that have no other layer, and one in each of these.

    Raises ValueRejected for a residual sum whose stem has no layers.
    """
    result: list[ArchLayer] = []
    for layer in layers:
        if layer.kind is LayerKind.IDENTITY:
            continue
        last = result[-1].kind if result else None
        if layer.kind is LayerKind.ADD2_SHORTCUT_END and last is LayerKind.ADD2_START:
            result.append(ArchLayer(LayerKind.IDENTITY, ""))
        if layer.kind is LayerKind.ADD2_END and last is LayerKind.ADD2_SHORTCUT_END:
            raise ValueRejected(
                f"layer {layer.name}: the stem of add2(shortcut, stem) has no layer that does anything; "
                f"expected at least one (the identity belongs into the shortcut)"
            )
        result.append(layer)
    return renumber(result, LayerKind.IDENTITY)


def decide_bn_kinds(layers: Sequence[ArchLayer], sample: Shape) -> tuple[ArchLayer, ...]:
    """A BN is one-dimensional when the last layer before it that decides makes rows (fc, flatten, gap), else 2-D."""
    result = []
    walk = Walk(sample)
    for layer in layers:
        if layer.kind in BN_KINDS:
            layer = replace(layer, kind=LayerKind.BN1D if walk.rows else LayerKind.BN2D)
        walk.step(layer)
        result.append(layer)
    return tuple(result)


def infer_shapes(layers: Iterable[ArchLayer], sample: Shape) -> tuple[ArchLayer, ...]:
    """The layers with their shapes. Raises ShapeError naming a layer that does not fit, or whose branches differ."""
    return tuple(replace(layer, input=before, output=after) for layer, before, after in follow(layers, sample))


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
