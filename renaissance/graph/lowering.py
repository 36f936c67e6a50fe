"""Lowering: layers of the ArchPlan to forward nodes, and the update part every model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from renaissance.core.errors import ShapeError
from renaissance.core.region import (
    BIAS_SPAN,
    BUCKET_DEEP,
    BUCKET_FIRST,
    HALF_WEIGHT_SPAN,
    NAN_SPAN,
    WEIGHT_SPAN,
    Region,
    Span,
)
from renaissance.core.shape import Shape
from renaissance.graph.arch_plan import ArchLayer, ArchPlan, LayerKind
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.ids import GraphId, Variant
from renaissance.graph.request import UPDATE_OPS

LowerRule = Callable[[GraphBuilder, ArchLayer, int], int]

GROWTH_INTERVAL = 2000
BACKOFF = 0.5
SCALE_FLOOR = 1.0

ACCUMULATORS = ("accum_loss", "accum_top1", "accum_top5", "accum_count")
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


def emit_communication(b: GraphBuilder) -> None:
    """Mean all-reduce of the two gradient buckets; nothing for one rank."""
    if b.request.world_size > 1:
        b.scope = "communication"
        for graph, span in ((GraphId.DEEP_COMM, BUCKET_DEEP), (GraphId.FIRST_COMM, BUCKET_FIRST)):
            b.graph = graph
            b.emit("RANGE_MEAN_ALLREDUCE", spans_out=(span,))


def emit_optimizer(b: GraphBuilder) -> None:
    """The NaN check, the optimizer and the reaction of the loss scale.

    The loss scale changes after the update, not with the check: the update divides by the scale of its gradients.
    """
    request, scalar = b.request, b.scalar
    b.graph, b.scope = GraphId.NAN_CHECK_AND_GRAD_SCALING, "nan check"
    clip = max(float(request.grad_clip), 0.0)
    clipped = (NAN_SPAN,) if clip > 0 else ()
    b.emit(
        "RANGE_CHECK_NAN",
        (scalar("scaling"),),
        (scalar("has_nan"),),
        {"clip": clip},
        spans_in=(NAN_SPAN,),
        spans_out=clipped,
    )
    b.graph, b.scope = GraphId.OPTIMIZER, "optimizer"
    names = ["lr", "wd"] + ["beta"] * request.has_momentum
    if request.is_adam:
        names += ["beta2", "eps", "bias_corr1", "bias_corr2"]
        b.emit(
            "ADAM_STEP",
            tuple(scalar(n) for n in ("has_nan", "step", "beta", "beta2")),
            tuple(scalar(n) for n in ("step", "bias_corr1", "bias_corr2")),
        )
    scalars = tuple(scalar(n) for n in (*names, "scaling", "has_nan"))
    for span, decay in ((WEIGHT_SPAN, True), (BIAS_SPAN, False)):
        if any(b.table.region(p.weight) in span.regions for p in b.parameters):
            half = (HALF_WEIGHT_SPAN,) if decay and request.half is not None else ()
            b.emit(
                UPDATE_OPS[request.optimizer],
                scalars,
                attrs={"decay": decay},
                spans_in=(_paired(span, "G"), *_moments(b, span)),
                spans_out=(span, *half),
            )
    if request.has_loss_scaling:
        pair = (scalar("scaling"), scalar("good_steps"))
        attrs = {"growth_interval": GROWTH_INTERVAL, "backoff": BACKOFF, "floor": SCALE_FLOOR}
        b.emit("GRAD_SCALING", (scalar("has_nan"), *pair), pair, attrs)


def _moments(b: GraphBuilder, span: Span) -> tuple[Span, ...]:
    series = "M" * b.request.has_momentum + "V" * b.request.is_adam
    return tuple(_paired(span, s) for s in series)


def _paired(span: Span, series: str) -> Span:
    """The span of another series that belongs to a weight or bias span, e.g. G for W."""
    first, last = (Region[f"{series}_{r.name.partition('_')[2]}"] for r in (span.first, span.last))
    return Span(first, last)


def emit_metrics(b: GraphBuilder, training: bool) -> None:
    """Accumulate and clear the epoch's metrics; in training a skipped step is not counted (law 5)."""
    b.graph, b.scope = GraphId.ACCUM_METRICS, "metrics"
    inputs = ["batch_valid", *METRICS] + ["has_nan"] * training
    b.emit("ACCUM_METRICS", [b.scalar(n) for n in inputs], [b.scalar(n) for n in ACCUMULATORS])
    b.graph = GraphId.CLEAR_METRICS
    accumulated = Span(Region.R_RESULT_ACCUMULATED, Region.R_RESULT_ACCUMULATED)
    b.emit("RANGE_CLEAR", spans_out=(accumulated,))
    if not training and b.request.world_size > 1:
        b.graph = GraphId.VAL_RESULT_COMM
        b.emit("RANGE_MEAN_ALLREDUCE", spans_out=(accumulated,))


def emit_weight_cast(b: GraphBuilder) -> None:
    """Half copies of the weights, for the time before the first update; with AMP only."""
    if b.request.half is not None:
        b.graph, b.scope = GraphId.CAST_MAIN_FP32_TO_FP16, "cast"
        b.emit("RANGE_CAST_FP32_TO_HALF", spans_in=(WEIGHT_SPAN,), spans_out=(HALF_WEIGHT_SPAN,))
