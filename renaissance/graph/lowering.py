"""Lowering: layers of the ArchPlan to forward nodes, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from renaissance.core.errors import ShapeError
from renaissance.core.shape import Shape
from renaissance.graph.arch_plan import ArchLayer, ArchPlan, LayerKind
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.ids import GraphId, Variant

LowerRule = Callable[[GraphBuilder, ArchLayer, int], int]

METRICS = ("loss", "top1", "top5")


def lower_fc(b: GraphBuilder, layer: ArchLayer, x: int) -> int:
    if not b.is_row(x):
        x = b.emit("FLATTEN_FWD", (x,), name=f"{layer.name}.flat")[0]
    features = {v: b.table.type(x, v).shape.numel // b.table.type(x, v).shape.n for v in Variant}
    if len(set(features.values())) > 1:
        raise ShapeError(
            f"layer {layer.name} reads a different number of values at each resolution "
            f"({', '.join(f'{v.name} {n}' for v, n in features.items())}); use one resolution"
        )
    out = int(layer.attrs["out"])
    weight = b.parameter("weight", "fc_weight", Shape(out, 1, 1, features[Variant.TRAIN_BASE]))
    bias = [b.parameter("bias", "fc_bias", Shape.of(out))] if layer.attrs["bias"] else []
    return b.emit("FC_FWD", (x, weight, *bias), attrs={"activation": layer.attrs["activation"]})[0]


def lower_relu(b: GraphBuilder, layer: ArchLayer, x: int) -> int:
    return b.emit("RELU_FWD", (x,))[0]


def lower_flatten(b: GraphBuilder, layer: ArchLayer, x: int) -> int:
    """Nothing for a tensor without gaps: its consumers read rows of values."""
    return x if b.is_row(x) else b.emit("FLATTEN_FWD", (x,))[0]


LOWERING: Mapping[LayerKind, LowerRule] = {
    LayerKind.FC: lower_fc,
    LayerKind.RELU: lower_relu,
    LayerKind.FLATTEN: lower_flatten,
}


def lower_layers(b: GraphBuilder, plan: ArchPlan, prefix: GraphId, rest: GraphId) -> int:
    """Emit the layers before the loss, reading input slot A; returns the logits.

    The label copy and everything up to the first weight-bearing layer go to ``prefix``, so that only ``prefix``
    depends on the input slot; the rest goes to ``rest``.
    """
    b.graph, b.scope = prefix, "labels"
    b.emit("LABEL_COPY", (b.inputs[0].label,), (b.label,))
    x = b.inputs[0].data
    for layer in plan.layers[:-1]:
        b.scope = layer.name
        x = LOWERING[layer.kind](b, layer, x)
        if layer.first:
            b.graph = rest
    b.scope = plan.layers[-1].name
    return x


def emit_loss(b: GraphBuilder, logits: int, op: str) -> tuple[int, ...]:
    """The loss layer: "SOFTMAX_CE_FWD" for training or "SOFTMAX_CE_INF" for validation; returns its outputs."""
    inputs = (logits, b.label, b.scalar("label_smoothing"), b.scalar("batch_valid"))
    if op == "SOFTMAX_CE_FWD":
        return b.emit(op, inputs, (None, None, b.scalar("loss")))
    return b.emit(op, inputs, (None, None, None, *(b.scalar(m) for m in METRICS)))
