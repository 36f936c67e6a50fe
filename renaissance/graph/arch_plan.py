"""ArchPlan: the model as a flat, standardised list of layers with shapes.

Each step is a function from plain data to plain data; ``build_arch_plan`` applies them in order:

    expand                tree -> list, layers numbered per kind ("fc1", "relu1", ...), residual sums between markers
    append_loss           the softmax cross-entropy, exactly once, at the end
    normalize_flattens    a flatten where an fc or the loss would see H*W > 1, none where it would do nothing
    normalize_identities  an identity in every shortcut without layers, nowhere else
    decide_bn_kinds       one-dimensional after an fc, flatten or gap
    infer_shapes          input and output shape of every layer (N = 1)
    merge_conv_bn         convolution + BN -> one CBR
    merge_activations     fc, convolution, CBR, BN, residual sum + relu (+ relu6) -> one layer with that activation
    mark_first            the layer at which the part ends that exists once per input slot

The checks: shapes fit together, the model has weights, and the loss sees as many values as there are classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from renaissance.core.shape import Shape
from renaissance.graph.arch_layers import LAYERS, ArchLayer, Attrs, LayerDef, LayerKind
from renaissance.graph.arch_merge import mark_first, merge_activations, merge_conv_bn
from renaissance.graph.arch_steps import (
    append_loss,
    check_loss,
    decide_bn_kinds,
    expand,
    infer_shapes,
    normalize_flattens,
    normalize_identities,
)
from renaissance.graph.blueprint import BluePrint

__all__ = [
    "LAYERS",
    "ArchLayer",
    "ArchPlan",
    "Attrs",
    "LayerDef",
    "LayerKind",
    "append_loss",
    "build_arch_plan",
    "check_loss",
    "decide_bn_kinds",
    "expand",
    "infer_shapes",
    "mark_first",
    "merge_activations",
    "merge_conv_bn",
    "normalize_flattens",
    "normalize_identities",
]

KIND_WIDTH, NAME_WIDTH, SHAPES_WIDTH = 10, 12, 32
"""Narrowest columns of the text; longer entries widen them for the whole plan."""


@dataclass(frozen=True, slots=True)
class ArchPlan:
    """The standardised model."""

    input: Shape
    num_classes: int
    layers: tuple[ArchLayer, ...]

    @property
    def first(self) -> int:
        """Index of the layer that ends the part that exists once per input slot, usually the first with weights."""
        return next(i for i, layer in enumerate(self.layers) if layer.first)

    def text(self) -> str:
        """Stable text, one row per layer."""
        first = self.layers[self.first]
        marked = f"{'first weights in' if LAYERS[first.kind].has_weights else 'input copied by'} {first.name}"
        lines = [f"ArchPlan: {len(self.layers)} layers, input {self.input}, {self.num_classes} classes, {marked}"]
        shapes = [f"{layer.input} -> {layer.output}" for layer in self.layers]
        kind_width = max(KIND_WIDTH, *(len(layer.kind.name) for layer in self.layers))
        name_width = max(NAME_WIDTH, *(len(layer.name) for layer in self.layers))
        shapes_width = max(SHAPES_WIDTH, *map(len, shapes))
        for i, (layer, shape) in enumerate(zip(self.layers, shapes, strict=True)):
            attrs = " ".join(f"{k}={v}" for k, v in layer.attrs.items())
            row = f"  {i:>3} {layer.kind.name:<{kind_width}} {layer.name:<{name_width}} {shape:<{shapes_width}} {attrs}"
            lines.append(f"{row}{' [FIRST]' * layer.first}".rstrip())
        return "\n".join(lines) + "\n"


def build_arch_plan(blueprint: BluePrint, input_shape: Shape, num_classes: int) -> ArchPlan:
    """All steps for a model whose samples are ``input_shape`` (its N is ignored).

    Raises ShapeError when layers do not fit together or the last one not the ``num_classes``, ValueRejected when the
    model has no weights or a residual sum no stem.
    """
    sample = input_shape.with_n(1)
    layers = normalize_flattens(append_loss(expand(blueprint, sample)), sample)
    layers = infer_shapes(decide_bn_kinds(normalize_identities(layers), sample), sample)
    check_loss(layers, num_classes)
    return ArchPlan(sample, num_classes, mark_first(merge_activations(merge_conv_bn(layers))))
