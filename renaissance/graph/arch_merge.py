"""The merging steps of the ArchPlan: layers that one op computes become one layer, and the first layer is marked.

Only neighbours in the list merge, so nothing merges across a marker of a residual sum: there the value between them
has a second reader, or is not the one the next layer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from renaissance.graph.arch_layers import LAYERS, ArchLayer, LayerKind
from renaissance.graph.arch_steps import renumber

ACTIVATIONS = {LayerKind.RELU: "relu", LayerKind.RELU6: "relu6"}

MergeRule = Callable[[ArchLayer, ArchLayer], ArchLayer | None]
"""One layer for two neighbours, or None. It has the name of the first, so that names do not depend on what merges."""


def merge_conv_bn(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """A convolution and the BN right after it become one CBR, which has the convolution's bias."""
    return _merge(layers, _conv_bn)


def merge_activations(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """A relu right after an fc, convolution, CBR, BN or sum becomes its activation; a relu6 that of a CBR or BN.

    A second activation after that stays a layer.
    """
    return _merge(layers, _activation)


def _merge(layers: Sequence[ArchLayer], rule: MergeRule) -> tuple[ArchLayer, ...]:
    merged: list[ArchLayer] = []
    for layer in layers:
        one = rule(merged[-1], layer) if merged else None
        if one is None:
            merged.append(layer)
        else:
            merged[-1] = replace(one, output=layer.output)
    return tuple(merged)


def _conv_bn(conv: ArchLayer, bn: ArchLayer) -> ArchLayer | None:
    if conv.kind is not LayerKind.CONV or bn.kind is not LayerKind.BN2D or conv.attrs["activation"] != "none":
        return None
    attrs = {**conv.attrs, **bn.attrs}
    attrs["activation"] = attrs.pop("activation")  # last, after the attributes of both
    return replace(conv, kind=LayerKind.CBR, attrs=attrs)


def _activation(layer: ArchLayer, after: ArchLayer) -> ArchLayer | None:
    activation = ACTIVATIONS.get(after.kind)
    if activation not in LAYERS[layer.kind].activations or layer.attrs["activation"] != "none":
        return None
    return replace(layer, attrs={**layer.attrs, "activation": activation})


def mark_first(layers: Sequence[ArchLayer]) -> tuple[ArchLayer, ...]:
    """The layers with the one marked at which the part ends that exists once per input slot.

    That is the first layer with weights. Where it lies in a residual sum, both branches read what comes before the sum
    - the input slot itself, when nothing does -, and the sum would have to exist once per slot with all weights in it.
    Instead an IDENTITY before the outermost such sum is marked: it copies its input out of the slot, and everything
    behind it exists once. Such a model has no first layer that could be frozen.
    """
    first = next(i for i, layer in enumerate(layers) if LAYERS[layer.kind].has_weights)
    open_starts: list[int] = []
    for i, layer in enumerate(layers[:first]):
        if layer.kind is LayerKind.ADD2_START:
            open_starts.append(i)
        elif layer.kind is LayerKind.ADD2_END:
            open_starts.pop()
    unmarked = [replace(layer, first=False) for layer in layers]
    if not open_starts:
        unmarked[first] = replace(unmarked[first], first=True)
        return tuple(unmarked)
    start = open_starts[0]
    shape = layers[start].input
    unmarked.insert(start, ArchLayer(LayerKind.IDENTITY, "", {}, shape, shape, first=True))
    return renumber(unmarked, LayerKind.IDENTITY)
