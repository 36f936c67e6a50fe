"""The update part of a model: all-reduce, NaN check, metrics, statistics, optimizer, EMA, loss scale, casts.

Nothing here depends on the layers, only on the parameters and batch norms that lowering has declared. Law 5: every node
that changes something persistent reads the flag that the NaN check has set, so a skipped step leaves no trace.
"""

from __future__ import annotations

from renaissance.core.errors import ValueRejected
from renaissance.core.region import (
    ACCUMULATED_SPAN,
    BIAS_SPAN,
    BUCKET_DEEP,
    BUCKET_FIRST,
    EMA_SPAN,
    EMA_WEIGHT_SPAN,
    HALF_EMA_SPAN,
    HALF_WEIGHT_SPAN,
    NAN_SPAN,
    NEXT_STATS_SPAN,
    PREV_STATS_SPAN,
    RESULT_SPAN,
    TRAINED_SPAN,
    WEIGHT_SPAN,
    Region,
    Span,
)
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.ids import GraphId
from renaissance.graph.lowering import METRICS
from renaissance.graph.request import SCALE_FLOOR, UPDATE_OPS

GROWTH_INTERVAL = 2000
BACKOFF = 0.5

ACCUMULATORS = ("accum_loss", "accum_top1", "accum_top5", "accum_count")
LARS_GRAPHS = {
    Region.W_FC_WEIGHT: GraphId.LARS_FC_OPT,
    Region.W_FIRST_CONV: GraphId.LARS_FIRST_CONV_OPT,
    Region.W_DEEP_CONV: GraphId.LARS_DEEP_CONV_OPT,
}


def emit_update(b: GraphBuilder) -> None:
    """Everything a training step does after the backward pass. Raises ValueRejected for a layer that cannot freeze."""
    _emit_communication(b)
    _emit_nan_check(b)
    emit_metrics(b, training=True)
    if b.batch_norms:
        b.graph, b.scope = GraphId.UPDATE_STATS, "statistics"
        b.emit("RANGE_COPY", (b.scalar("has_nan"),), spans_in=(NEXT_STATS_SPAN,), spans_out=(PREV_STATS_SPAN,))
    if b.request.is_lars:
        _emit_lars(b)
    _emit_optimizer(b)
    if b.request.ema:
        b.graph, b.scope = GraphId.EMA_UPDATE, "ema"
        scalars = (b.scalar("ema_decay"), b.scalar("has_nan"))
        b.emit("RANGE_EMA_UPDATE", scalars, spans_in=(TRAINED_SPAN,), spans_out=(EMA_SPAN,))
    emit_weight_cast(b)


def _emit_communication(b: GraphBuilder) -> None:
    """Mean all-reduce of the two gradient buckets and of the batch statistics; nothing for one rank."""
    if b.request.world_size > 1:
        b.scope = "communication"
        reduced = [(GraphId.DEEP_COMM, BUCKET_DEEP), (GraphId.FIRST_COMM, BUCKET_FIRST)]
        if b.batch_norms:
            reduced.append((GraphId.STATS_COMM, NEXT_STATS_SPAN))
        for graph, span in reduced:
            b.graph = graph
            b.emit("RANGE_MEAN_ALLREDUCE", spans_out=(span,))


def _emit_nan_check(b: GraphBuilder) -> None:
    """The flag, from the gradients, the loss and the statistics of the batch."""
    b.graph, b.scope = GraphId.NAN_CHECK_AND_GRAD_SCALING, "nan check"
    clip = max(float(b.request.grad_clip), 0.0)
    watched = (RESULT_SPAN, *((NEXT_STATS_SPAN,) if b.batch_norms else ()))
    b.emit(
        "RANGE_CHECK_NAN",
        (b.scalar("scaling"),),
        (b.scalar("has_nan"),),
        {"clip": clip},
        spans_in=(NAN_SPAN, *watched),
        spans_out=(NAN_SPAN,) if clip > 0 else (),
    )
    if b.request.freeze_first_layer:
        _require_freezable(b)
        flags = (b.scalar("has_nan"), b.scalar("first_frozen"))
        b.emit("FLAG_OR", flags, (b.scalar("skip_first"),))


def _require_freezable(b: GraphBuilder) -> None:
    """Raise ValueRejected unless the first layer's backward pass gives the gradient of W_FIRST_CONV and nothing else:
    only that region has an update of its own to skip."""
    gradients = {p.grad: p for p in b.parameters}
    given = [gradients[i] for n in b.nodes if n.graph is GraphId.FIRST_LAYER_BWD_A for i in n.outputs if i in gradients]
    others = [p.name for p in given if b.table.region(p.grad) is not Region.G_FIRST_CONV]
    if others or not given:
        names = ", ".join(others) or "nothing (the model begins with a residual sum)"
        raise ValueRejected(
            f"freeze_first_layer: the first layer trains {names}; expected a convolution without a bias of its own "
            "(bias=False), whose weight alone can be frozen"
        )


def _weight_spans(b: GraphBuilder) -> list[tuple[Span, bool, str]]:
    """(span, decay, flag) of every span update; with freezing the first convolution is a span of its own."""
    biases = (BIAS_SPAN, False, "has_nan")
    if b.request.is_lars:
        return [biases]
    if not b.request.freeze_first_layer:
        return [(WEIGHT_SPAN, True, "has_nan"), biases]
    first = Region.W_FIRST_CONV
    alone = [Span(r, r) for r in WEIGHT_SPAN.regions]
    return [*((s, True, "skip_first" if s.first is first else "has_nan") for s in alone), biases]


def _emit_optimizer(b: GraphBuilder) -> None:
    """Updates of whole spans, the loss scale, and the step of the dropout counter.

    The loss scale changes last: the updates divide by the scale of their gradients.
    """
    request, scalar = b.request, b.scalar
    b.graph, b.scope = GraphId.OPTIMIZER, "optimizer"
    names = ["lr", "wd"] + ["beta"] * request.has_momentum
    if request.is_adam:
        names += ["beta2", "eps", "bias_corr1", "bias_corr2"]
        b.emit(
            "ADAM_STEP",
            tuple(scalar(n) for n in ("has_nan", "step", "beta", "beta2")),
            tuple(scalar(n) for n in ("step", "bias_corr1", "bias_corr2")),
        )
    for span, decay, flag in _weight_spans(b):
        if any(b.table.region(p.weight) in span.regions for p in b.parameters):
            half = (_paired(span, "A"),) if decay and request.half is not None else ()
            b.emit(
                UPDATE_OPS[request.optimizer],
                tuple(scalar(n) for n in (*names, "scaling", flag)),
                attrs={"decay": decay},
                spans_in=(_paired(span, "G"), *_moments(b, span)),
                spans_out=(span, *half),
            )
    if any(n.op == "DROPOUT_FWD" for n in b.nodes):
        counter = scalar("dropout_step")
        b.emit("DROPOUT_ADVANCE", (scalar("has_nan"), counter), (counter,))
    if request.has_loss_scaling:
        pair = (scalar("scaling"), scalar("good_steps"))
        attrs = {"growth_interval": GROWTH_INTERVAL, "backoff": BACKOFF, "floor": SCALE_FLOOR}
        b.emit("GRAD_SCALING", (scalar("has_nan"), *pair), pair, attrs)


def _emit_lars(b: GraphBuilder) -> None:
    """One update for each weight, with its own trust ratio."""
    nesterov = UPDATE_OPS[b.request.optimizer] == "RANGE_UPDATE_NESTEROV"
    for p in b.parameters:
        if p.ratio is None:
            continue
        region = b.table.region(p.weight)
        b.graph, b.scope = LARS_GRAPHS[region], p.name
        freezes = b.request.freeze_first_layer and region is Region.W_FIRST_CONV
        names = ("lr", "wd", "beta", "trust", "eps", "scaling", "skip_first" if freezes else "has_nan")
        outputs = (p.weight, p.m, p.ratio, *((p.half,) if p.half is not None else ()))
        b.emit("LARS_UPDATE", (*(b.scalar(n) for n in names), p.grad), outputs, {"nesterov": nesterov})


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
    b.emit("RANGE_CLEAR", spans_out=(ACCUMULATED_SPAN,))
    if not training and b.request.world_size > 1:
        b.graph = GraphId.VAL_RESULT_COMM
        b.emit("RANGE_MEAN_ALLREDUCE", spans_out=(ACCUMULATED_SPAN,))


def emit_weight_cast(b: GraphBuilder) -> None:
    """Half copies of the weights, for the time before the first update; with AMP only."""
    if b.request.half is not None:
        b.graph, b.scope = GraphId.CAST_MAIN_FP32_TO_FP16, "cast"
        b.emit("RANGE_CAST_FP32_TO_HALF", spans_in=(WEIGHT_SPAN,), spans_out=(HALF_WEIGHT_SPAN,))


def emit_inference_preparation(b: GraphBuilder) -> None:
    """What a validation pass needs before its first step: folded batch norm, half copies of the averaged weights."""
    b.graph, b.scope = GraphId.UPDATE_BN_INF_PARAMS, "folded batch norm"
    for bn in b.batch_norms.values():
        _emit_folding(b, bn.name, (bn.gamma, bn.beta))
    if not b.request.ema:
        return
    b.graph, b.scope = GraphId.CAST_EMA_FP32_TO_FP16, "averaged weights"
    if b.request.half is not None:
        b.emit("RANGE_CAST_FP32_TO_HALF", spans_in=(EMA_WEIGHT_SPAN,), spans_out=(HALF_EMA_SPAN,))
    for bn in b.batch_norms.values():
        if bn.ema_gamma is not None and bn.ema_beta is not None:
            _emit_folding(b, bn.name, (bn.ema_gamma, bn.ema_beta))


def _emit_folding(b: GraphBuilder, name: str, affine: tuple[int, int]) -> None:
    bn = b.batch_norms[name]
    inputs = (*affine, bn.prev_mean, bn.prev_var)
    b.emit("BN_UPDATE_EQ_PARAMS", inputs, (bn.eq_scale, bn.eq_bias), {"eps": bn.eps})
