"""The update part of a model: all-reduce, NaN check, metrics, optimizer, loss scale, casts.

Nothing here depends on the layers, only on the parameters that lowering has declared.
"""

from __future__ import annotations

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
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.ids import GraphId
from renaissance.graph.lowering import METRICS
from renaissance.graph.request import UPDATE_OPS

GROWTH_INTERVAL = 2000
BACKOFF = 0.5
SCALE_FLOOR = 1.0

ACCUMULATORS = ("accum_loss", "accum_top1", "accum_top5", "accum_count")


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
