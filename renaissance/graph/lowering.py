"""Lowering: layers of the ArchPlan to forward nodes, for training and for inference.

One rule per kind of layer. The two modes differ where a layer behaves differently: batch norm is folded into a scale
and a bias, a max pool keeps no index, dropout is nothing. Which nodes become one kernel is decided later, by passes
over the nodes (``fusion``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from renaissance.core.enums import TTA
from renaissance.core.errors import GraphError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph.arch_layers import ArchLayer, Attrs, LayerKind
from renaissance.graph.arch_plan import ArchPlan
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.computation_graph import AttrValue
from renaissance.graph.ids import GraphId, Variant

METRICS = ("loss", "top1", "top5")

View = tuple[bool, int, int]
"""(mirrored, rows down, columns right) of a view of the input; see the op INPUT_VIEW."""
CENTRE: View = (False, 0, 0)
VIEWS: Mapping[TTA, tuple[View, ...]] = {
    TTA.DISABLED: (CENTRE,),
    TTA.LR: (CENTRE, (True, 0, 0)),
    TTA.SHIFT_1PX: (CENTRE, (False, -1, 0), (False, 1, 0), (False, 0, -1), (False, 0, 1)),
}

ACTIVATION_KINDS: Mapping[LayerKind, str] = {
    LayerKind.RELU: "relu",
    LayerKind.TANH: "tanh",
    LayerKind.SILU: "silu",
    LayerKind.RELU6: "relu6",
    LayerKind.LEAKY_RELU: "leaky_relu",
    LayerKind.HARDSWISH: "hardswish",
    LayerKind.ELU: "elu",
    LayerKind.SIGMOID: "sigmoid",
}
SHAPELESS = frozenset({*ACTIVATION_KINDS, LayerKind.DROPOUT, LayerKind.IDENTITY, LayerKind.FLATTEN})
"""Layers that do not care how the values of a sample are arranged."""


@dataclass(slots=True)
class Walk:
    """A walk over the layers: where it is, and the residual sums it is inside of.

    ``open_sums`` holds, per open sum, the value both branches read, and the shortcut's result after the middle marker.
    """

    b: GraphBuilder
    layers: Sequence[ArchLayer]
    training: bool
    at: int = 0
    open_sums: list[int] = field(default_factory=list)
    dropouts: int = 0

    @property
    def row_is_enough(self) -> bool:
        """True when the next layer that looks at shapes is an fc, which reads any gapless sample as a row."""
        following = (layer.kind for layer in self.layers[self.at + 1 :])
        return next((kind for kind in following if kind not in SHAPELESS), None) is LayerKind.FC

    @property
    def ends_block(self) -> bool:
        """True when the layer gives the last term of a residual sum."""
        return self.at + 1 < len(self.layers) and self.layers[self.at + 1].kind is LayerKind.ADD2_END


LowerRule = Callable[[Walk, ArchLayer, int], int]


def _in_all_variants(b: GraphBuilder, layer: ArchLayer, x: int, verb: str, flat: bool) -> int:
    """The channels of ``x``, with ``flat`` its values per sample, which the shape of a parameter depends on.

    Raises ShapeError when they differ between resolutions.
    """
    shapes = {v: b.table.type(x, v).shape for v in Variant}
    counts = {v: s.h * s.w * s.c if flat else s.c for v, s in shapes.items()}
    if len(set(counts.values())) > 1:
        raise ShapeError(
            f"layer {layer.name} {verb} a different number of values at each resolution "
            f"({', '.join(f'{v.name} {n}' for v, n in counts.items())}); put a gap() before it, which gives one "
            "value per channel at any resolution, or use one resolution"
        )
    return counts[Variant.TRAIN_BASE]


def lower_fc(walk: Walk, layer: ArchLayer, x: int) -> int:
    b = walk.b
    out = int(layer.attrs["out"])
    weight = b.parameter("weight", "fc_weight", Shape(out, 1, 1, _in_all_variants(b, layer, x, "reads", flat=True)))
    bias = [b.parameter("bias", "fc_bias", Shape.of(out))] if layer.attrs["bias"] else []
    return b.emit("FC_FWD", (x, weight, *bias), attrs={"activation": layer.attrs["activation"]})[0]


def _picked(attrs: Attrs, *names: str) -> dict[str, AttrValue]:
    return {name: attrs[name] for name in names}


def _conv(walk: Walk, layer: ArchLayer, x: int, activation: AttrValue) -> int:
    b, attrs = walk.b, layer.attrs
    channels, out, k, groups = (b.table.decls[x].shapes[0].c, *(int(attrs[a]) for a in ("out", "kernel", "groups")))
    kind = "first_conv" if layer.first else "deep_conv"
    weight = b.parameter("weight", kind, Shape(out, k, k, channels // groups))
    bias = [b.parameter("bias", "conv_bias", Shape.of(out))] if attrs["bias"] else []
    given = {**_picked(attrs, "stride", "pad", "groups"), "activation": activation}
    return b.emit("CONV_FWD", (x, weight, *bias), attrs=given)[0]


def lower_conv(walk: Walk, layer: ArchLayer, x: int) -> int:
    return _conv(walk, layer, x, layer.attrs["activation"])


def _bn(walk: Walk, layer: ArchLayer, x: int) -> int:
    b = walk.b
    attrs = _picked(layer.attrs, "activation")
    channels = _in_all_variants(b, layer, x, "normalises", flat=False)
    norm = b.batch_norm(channels, float(layer.attrs["eps"]), walk.ends_block)
    if not walk.training:
        return b.emit("BN_INF", (x, norm.eq_scale, norm.eq_bias), attrs=attrs)[0]
    inputs = (x, norm.gamma, norm.beta, norm.prev_mean, norm.prev_var, b.scalar("batch_valid"))
    outputs = (None, None, None, norm.next_mean, norm.next_var)
    return b.emit("BN_FWD", inputs, outputs, {**_picked(layer.attrs, "momentum", "eps"), **attrs})[0]


def lower_bn(walk: Walk, layer: ArchLayer, x: int) -> int:
    return _bn(walk, layer, x)


def lower_cbr(walk: Walk, layer: ArchLayer, x: int) -> int:
    """Convolution, then batch norm with the activation; only the convolution depends on the input slot."""
    b = walk.b
    y = _conv(walk, layer, x, "none")
    b.scope = f"{layer.name}.bn"
    end_of_prefix(walk, layer)
    return _bn(walk, layer, y)


def lower_activation(walk: Walk, layer: ArchLayer, x: int) -> int:
    return walk.b.emit("ACT_FWD", (x,), attrs={"kind": ACTIVATION_KINDS[layer.kind]})[0]


def lower_flatten(walk: Walk, layer: ArchLayer, x: int) -> int:
    """Nothing where the consumers read rows of values: a sample is one row without gaps."""
    return x if walk.row_is_enough else walk.b.emit("FLATTEN_FWD", (x,))[0]


def lower_dropout(walk: Walk, layer: ArchLayer, x: int) -> int:
    """Layers are numbered, so that each draws from its own counters."""
    number = walk.dropouts
    walk.dropouts += 1
    if not walk.training:
        return x
    seed = tuple(walk.b.scalar(name) for name in ("seed_low", "seed_high", "dropout_step"))
    return walk.b.emit("DROPOUT_FWD", (x, *seed), attrs={"p": layer.attrs["p"], "layer": number})[0]


def lower_maxpool(walk: Walk, layer: ArchLayer, x: int) -> int:
    op = "MAXPOOL_FWD" if walk.training else "MAXPOOL_INF"
    return walk.b.emit(op, (x,), attrs=layer.attrs)[0]


def lower_identity(walk: Walk, layer: ArchLayer, x: int) -> int:
    """Nothing, except that the input slot is copied where it ends the part that exists once per slot."""
    b = walk.b
    if not (walk.training and layer.first and x == b.inputs[0].data):
        return x
    return b.emit("INPUT_VIEW", (x,), attrs={"flip": False, "dy": 0, "dx": 0})[0]


def lower_add2_start(walk: Walk, layer: ArchLayer, x: int) -> int:
    walk.open_sums.append(x)
    return x


def lower_add2_middle(walk: Walk, layer: ArchLayer, x: int) -> int:
    source, walk.open_sums[-1] = walk.open_sums[-1], x
    return source


def lower_add2_end(walk: Walk, layer: ArchLayer, x: int) -> int:
    shortcut = walk.open_sums.pop()
    return walk.b.emit("ADD_FWD", (shortcut, x), attrs=_picked(layer.attrs, "activation"))[0]


def _plain(op: str) -> LowerRule:
    """The rule of a layer whose op has its attributes and one input."""

    def rule(walk: Walk, layer: ArchLayer, x: int) -> int:
        return walk.b.emit(op, (x,), attrs=layer.attrs)[0]

    return rule


LOWERING: Mapping[LayerKind, LowerRule] = {
    LayerKind.FC: lower_fc,
    LayerKind.CONV: lower_conv,
    LayerKind.CBR: lower_cbr,
    LayerKind.BN1D: lower_bn,
    LayerKind.BN2D: lower_bn,
    **dict.fromkeys(ACTIVATION_KINDS, lower_activation),
    LayerKind.FLATTEN: lower_flatten,
    LayerKind.DROPOUT: lower_dropout,
    LayerKind.MAXPOOL: lower_maxpool,
    LayerKind.AVGPOOL: _plain("AVGPOOL_FWD"),
    LayerKind.GAP: _plain("GAP_FWD"),
    LayerKind.CHANNEL_PADDING: _plain("CHANNEL_PADDING_FWD"),
    LayerKind.IDENTITY: lower_identity,
    LayerKind.ADD2_START: lower_add2_start,
    LayerKind.ADD2_SHORTCUT_END: lower_add2_middle,
    LayerKind.ADD2_END: lower_add2_end,
}


def end_of_prefix(walk: Walk, layer: ArchLayer) -> None:
    """After the first layer the rest of a training graph exists once for both input slots."""
    if layer.first and walk.training:
        walk.b.graph = GraphId.DEEP_FWD_BWD


def _network(b: GraphBuilder, plan: ArchPlan, x: int, training: bool) -> int:
    """The layers before the loss, from ``x`` on; returns the logits."""
    walk = Walk(b, plan.layers[:-1], training)
    for at, layer in enumerate(plan.layers[:-1]):
        walk.at, b.scope = at, layer.name
        x = LOWERING[layer.kind](walk, layer, x)
        end_of_prefix(walk, layer)
    if walk.open_sums:
        raise GraphError(f"{len(walk.open_sums)} residual sums are open at the end of the layers")
    b.scope = plan.layers[-1].name
    return x


def _copy_labels(b: GraphBuilder, graph: GraphId) -> None:
    b.graph, b.scope = graph, "labels"
    b.emit("LABEL_COPY", (b.inputs[0].label,), (b.label,))


def lower_training(b: GraphBuilder, plan: ArchPlan) -> int:
    """The forward pass of a training step on input slot A; returns the logits.

    The label copy and everything up to the first layer go to FIRST_LAYER_FWD_A, so that nothing else depends on the
    input slot; the rest goes to DEEP_FWD_BWD.
    """
    _copy_labels(b, GraphId.FIRST_LAYER_FWD_A)
    return _network(b, plan, b.inputs[0].data, training=True)


def lower_inference(b: GraphBuilder, plan: ArchPlan, ema: bool) -> int:
    """The forward pass of a validation step on input slot A, in INF_MAIN_A or INF_EMA_A; returns the logits.

    With test-time augmentation the network runs once per view of the input, and the logits are averaged.
    """
    _copy_labels(b, GraphId.INF_EMA_A if ema else GraphId.INF_MAIN_A)
    b.ema = ema
    logits = []
    for i, view in enumerate(VIEWS[b.request.tta]):
        x, b.scope = b.inputs[0].data, "input"
        b.view = f"view{i + 1}." if i else ""
        if view != CENTRE:
            x = b.emit("INPUT_VIEW", (x,), attrs=dict(zip(("flip", "dy", "dx"), view, strict=True)))[0]
        logits.append(_network(b, plan, x, training=False))
    b.view, b.ema = "", False
    return logits[0] if len(logits) == 1 else b.emit("MEAN_LOGITS", logits, names=("mean_logits",))[0]


def emit_loss(b: GraphBuilder, logits: int, op: str) -> tuple[int, ...]:
    """The loss layer: "SOFTMAX_CE_FWD" for training or "SOFTMAX_CE_INF" for validation; returns its outputs."""
    inputs = (logits, b.label, b.scalar("label_smoothing"), b.scalar("batch_valid"))
    if op == "SOFTMAX_CE_FWD":
        return b.emit(op, inputs, (None, None, b.scalar("loss")))
    return b.emit(op, inputs, (None, None, None, *(b.scalar(m) for m in METRICS)))
