"""The op table: every op is declared once, here. A new op is a new entry.

An entry says which tensors and region spans the op reads and writes (by role), its attributes, its shape and dtype
rule, where its outputs live, its stream, and how it is differentiated. Kernels are registered by the backends.

Role names ending in "?" may be absent; absent roles are trailing, except that a role in ``when`` is there exactly when
its attribute says so. Images are NHWC; "f" below is the float of the model (FP32, or FP16/BF16 with AMP); per-channel
vectors are FP32 [1,1,1,C]. FC ops read ``x`` as [N, H*W*C]: a flatten of a compact tensor is no op. Formulas:
spec/framework 3.9, 4.1, 4.2; softmax is plain log-sum-exp without the 1e-8 guard.
"""

from __future__ import annotations

from collections.abc import Mapping

from renaissance.core.enums import StreamKind
from renaissance.core.errors import MissingKernelError
from renaissance.graph import gradients as grad
from renaissance.graph import op_types as rule
from renaissance.graph import op_types_image as image
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_schema import AttrRules, OpDef, Output, Place, SpanRole, check_arity, check_types, roles_for
from renaissance.graph.op_types import SAVES_INPUT, TensorType

__all__ = [
    "ACTIVATIONS",
    "GRADIENT_LIMIT",
    "OPS",
    "SAVES_INPUT",
    "OpDef",
    "Output",
    "Place",
    "SpanRole",
    "TensorType",
    "check_arity",
    "check_types",
    "named_inputs",
    "named_outputs",
    "op_def",
    "require_supported",
    "roles_for",
]

GRADIENT_LIMIT = 2.0**63
"""See RANGE_CHECK_NAN."""


def _state(*roles: str, accumulates: bool = False) -> tuple[Output, ...]:
    return tuple(Output(r, Place.STATE, accumulates) for r in roles)


def _update(kind: str, scalars: tuple[str, ...], moments: tuple[str, ...]) -> OpDef:
    """One optimizer: all kinds take master weights and an optional half copy, which the same pass writes."""
    return OpDef(
        f"RANGE_UPDATE_{kind}",
        StreamKind.UPDATE,
        inputs=(*scalars, "scaling", "has_nan"),
        spans_in=(SpanRole("grad", True, False), *(SpanRole(m, True, True) for m in moments)),
        spans_out=(SpanRole("weight", True, True), SpanRole("half?", False, True)),
        attrs={"decay": (True, False)},
    )


def _read(role: str) -> tuple[SpanRole]:
    return (SpanRole(role, True, False),)


def _written(role: str) -> tuple[SpanRole]:
    return (SpanRole(role, False, True),)


def _both(role: str) -> tuple[SpanRole]:
    return (SpanRole(role, True, True),)


_CE = ("logits", "label", "label_smoothing", "batch_valid")
_ADAM = ("lr", "wd", "beta", "beta2", "eps", "bias_corr1", "bias_corr2")
_LARS = ("lr", "wd", "beta", "trust", "eps", "scaling", "has_nan")
_SEED = ("seed_low", "seed_high", "dropout_step")
_C1, _C2, _C3, _UP = StreamKind.COMP_1, StreamKind.COMP_2, StreamKind.COMP_3, StreamKind.UPDATE

ACTIVATIONS = ("relu", "tanh", "silu", "relu6", "leaky_relu", "hardswish", "elu", "sigmoid")
_NONE_RELU = ("none", "relu")
_NONE_RELU6 = ("none", "relu", "relu6")
_BOOL = (True, False)
_CONV: AttrRules = {"stride": int, "pad": int, "groups": int}
_POOL: AttrRules = {"kernel": int, "stride": int, "pad": int}
_AVERAGE: AttrRules = {**_POOL, "count_include_pad": _BOOL}

_Y = (Output("y", Place.FEATURE),)
_DX = (Output("dx", Place.GRADIENT),)

_PRODUCTS = (
    # y = act(x * w^T + b); without a bias the role is absent.
    OpDef(
        "FC_FWD",
        _C1,
        inputs=("x", "w", "b?"),
        outputs=_Y,
        attrs={"activation": _NONE_RELU},
        types=rule.fc_fwd,
        gradient=grad.grad_fc,
    ),
    # dw = dy^T * x, db = column sums of dy; fp32, overwritten.
    OpDef("FC_BWD_WEIGHT", _C1, inputs=("dy", "x"), outputs=_state("dw", "db?"), types=rule.fc_bwd_weight),
    # dx = dy * w, with mask "relu" zeroed where y_prev <= 0.
    OpDef(
        "FC_BWD_DATA",
        _C3,
        inputs=("dy", "w", "y_prev?"),
        outputs=_DX,
        attrs={"mask": _NONE_RELU},
        types=rule.fc_bwd_data,
        fits=rule.fc_bwd_data_fits,
        when={"y_prev": ("mask", ("relu",))},
    ),
    # x f[N,H,W,C], w f[K,R,S,C/groups], b fp32: cross-correlation with zero padding, y = act(conv + b) f[N,Ho,Wo,K].
    OpDef(
        "CONV_FWD",
        _C1,
        inputs=("x", "w", "b?"),
        outputs=_Y,
        attrs={**_CONV, "activation": _NONE_RELU},
        types=image.conv_fwd,
        gradient=grad.grad_conv,
    ),
    # dw, db fp32, overwritten.
    OpDef(
        "CONV_BWD_WEIGHT",
        _C1,
        inputs=("dy", "x"),
        outputs=_state("dw", "db?"),
        attrs={"kernel": int, **_CONV},
        types=image.conv_bwd_weight,
    ),
    OpDef(
        "CONV_BWD_DATA",
        _C3,
        inputs=("dy", "w"),
        outputs=_DX,
        attrs=_CONV,
        types=image.given_shape,
        fits=image.conv_bwd_data_fits,
    ),
    # y = act((conv(x, w) + b) * eq_scale + eq_bias + residual).
    OpDef(
        "CONV_INF",
        _C1,
        inputs=("x", "w", "eq_scale", "eq_bias", "b?", "residual?"),
        outputs=_Y,
        attrs={**_CONV, "activation": _NONE_RELU6, "bias": _BOOL, "residual": _BOOL},
        types=image.conv_inf,
        when={"b": ("bias", (True,)), "residual": ("residual", (True,))},
    ),
)

_NORMS = (
    # Mean and biased variance over the first batch_valid samples; y = act(gamma (x - mean) inv_std + beta + residual);
    # next = (1 - momentum) prev + momentum stat, the variance unbiased. Rows past batch_valid: any finite y.
    OpDef(
        "BN_FWD",
        _C2,
        inputs=("x", "gamma", "beta", "prev_mean", "prev_var", "batch_valid", "residual?"),
        outputs=(
            *_Y,
            Output("saved_mean", Place.TEMP),
            Output("saved_inv_std", Place.TEMP),
            *_state("next_mean", "next_var"),
        ),
        attrs={"momentum": float, "eps": float, "activation": _NONE_RELU6},
        types=image.bn_fwd,
        gradient=grad.grad_bn,
    ),
    # g = (dy + dy2) where the activation of y was open; dresidual = g. Rows past batch_valid of dx, dresidual are 0.
    OpDef(
        "BN_BWD",
        _C2,
        inputs=("dy", "x", "gamma", "saved_mean", "saved_inv_std", "batch_valid", "y?", "dy2?"),
        outputs=(*_DX, *_state("dgamma", "dbeta"), Output("dresidual?", Place.GRADIENT)),
        attrs={"activation": _NONE_RELU6, "dys": (1, 2), "residual": _BOOL},
        types=image.bn_bwd,
        when={
            "y": ("activation", ("relu", "relu6")),
            "dy2": ("dys", (2,)),
            "dresidual": ("residual", (True,)),
        },
    ),
    # y = act(x * eq_scale + eq_bias + residual).
    OpDef(
        "BN_INF",
        _C2,
        inputs=("x", "eq_scale", "eq_bias", "residual?"),
        outputs=_Y,
        attrs={"activation": _NONE_RELU6},
        types=image.bn_inf,
    ),
    # eq_scale = gamma / sqrt(var + eps), eq_bias = beta - mean * eq_scale.
    OpDef(
        "BN_UPDATE_EQ_PARAMS",
        _UP,
        inputs=("gamma", "beta", "mean", "var"),
        outputs=_state("eq_scale", "eq_bias"),
        attrs={"eps": float},
        types=image.bn_update_eq_params,
    ),
)

_ELEMENTWISE = (
    OpDef(
        "ACT_FWD",
        _C3,
        inputs=("x",),
        outputs=_Y,
        attrs={"kind": ACTIVATIONS},
        types=rule.elementwise("ACT_FWD"),
        gradient=grad.grad_act,
    ),
    # saved = x for the kinds of SAVES_INPUT, y for the others.
    OpDef(
        "ACT_BWD",
        _C3,
        inputs=("dy", "saved"),
        outputs=_DX,
        attrs={"kind": ACTIVATIONS},
        types=rule.elementwise("ACT_BWD"),
    ),
    OpDef(
        "ADD_FWD",
        _C1,
        inputs=("a", "b"),
        outputs=_Y,
        attrs={"activation": _NONE_RELU},
        types=rule.elementwise("ADD_FWD"),
        gradient=grad.grad_add,
    ),
    # The sum of two gradients of one value.
    OpDef("GRAD_SUM", _C1, inputs=("a", "b"), outputs=_DX, types=rule.elementwise("GRAD_SUM")),
    # No mask is stored: keep or drop follows from (seed, layer, step, element), see docs/random-numbers.md.
    OpDef(
        "DROPOUT_FWD",
        _C2,
        inputs=("x", *_SEED),
        outputs=_Y,
        attrs={"p": float, "layer": int},
        types=rule.dropout("DROPOUT_FWD"),
        gradient=grad.grad_dropout,
    ),
    OpDef(
        "DROPOUT_BWD",
        _C2,
        inputs=("dy", *_SEED),
        outputs=_DX,
        attrs={"p": float, "layer": int},
        types=rule.dropout("DROPOUT_BWD"),
    ),
    # Copies rows without their channel padding, or gives another shape to an op that looks at H and W.
    OpDef("FLATTEN_FWD", _C1, inputs=("x",), outputs=_Y, types=rule.flatten, gradient=grad.grad_flatten),
    OpDef(
        "FLATTEN_BWD",
        _C1,
        inputs=("dy",),
        outputs=_DX,
        types=image.given_shape,
        fits=image.inverse_of("FLATTEN_BWD", rule.flatten),
    ),
    # Zeros in new channels, up to a multiple of 8.
    OpDef(
        "CHANNEL_PADDING_FWD",
        _C1,
        inputs=("x",),
        outputs=_Y,
        types=image.channel_padding,
        gradient=grad.grad_channel_padding,
    ),
    OpDef(
        "CHANNEL_PADDING_BWD",
        _C1,
        inputs=("dy",),
        outputs=_DX,
        types=image.given_shape,
        fits=image.inverse_of("CHANNEL_PADDING_BWD", image.channel_padding),
    ),
    # y[n,h,w] = x[n,h+dy,w'+dx], w' from the right when flipped; edge pixels are replicated outside the image.
    OpDef(
        "INPUT_VIEW",
        _C1,
        inputs=("x",),
        outputs=_Y,
        attrs={"flip": _BOOL, "dy": int, "dx": int},
        types=rule.elementwise("INPUT_VIEW"),
    ),
    # The mean of up to MAX_VIEWS logits, in fp32 arithmetic.
    OpDef(
        "MEAN_LOGITS",
        _C1,
        inputs=("l1", "l2?", "l3?", "l4?", "l5?"),
        outputs=_Y,
        types=rule.elementwise("MEAN_LOGITS"),
    ),
)

_POOLING = (
    # The first maximum in scan order wins, a NaN over everything; padding never wins. index: kh * kernel + kw, one
    # unsigned byte up to ONE_BYTE_KERNEL, else two (the mask then has twice the channels).
    OpDef(
        "MAXPOOL_FWD",
        _C2,
        inputs=("x",),
        outputs=(*_Y, Output("index", Place.MASK)),
        attrs=_POOL,
        types=image.maxpool_fwd,
        gradient=grad.grad_maxpool,
    ),
    OpDef("MAXPOOL_INF", _C2, inputs=("x",), outputs=_Y, attrs=_POOL, types=image.pool("MAXPOOL_INF")),
    # Gather form: fp32 sum, rounded once.
    OpDef(
        "MAXPOOL_BWD",
        _C2,
        inputs=("dy", "index"),
        outputs=_DX,
        attrs=_POOL,
        types=image.given_shape,
        fits=image.maxpool_bwd_fits,
    ),
    OpDef(
        "AVGPOOL_FWD",
        _C2,
        inputs=("x",),
        outputs=_Y,
        attrs=_AVERAGE,
        types=image.pool("AVGPOOL_FWD"),
        gradient=grad.grad_avgpool,
    ),
    OpDef(
        "AVGPOOL_BWD",
        _C2,
        inputs=("dy",),
        outputs=_DX,
        attrs=_AVERAGE,
        types=image.given_shape,
        fits=image.avgpool_bwd_fits,
    ),
    OpDef("GAP_FWD", _C2, inputs=("x",), outputs=_Y, types=image.gap_fwd, gradient=grad.grad_gap),
    OpDef(
        "GAP_BWD",
        _C2,
        inputs=("dy",),
        outputs=_DX,
        types=image.given_shape,
        fits=image.inverse_of("GAP_BWD", image.gap_fwd),
    ),
)

_LOSS = (
    OpDef("LABEL_COPY", _C1, inputs=("label",), outputs=_state("label_smce"), types=rule.label_copy),
    # loss = sum over valid rows / batch_valid; rows with label -1 are masked.
    OpDef(
        "SOFTMAX_CE_FWD",
        _C1,
        inputs=_CE,
        outputs=(Output("probs", Place.TEMP), Output("loss_partials", Place.TEMP), *_state("loss")),
        types=rule.softmax_fwd,
        gradient=grad.grad_softmax_ce,
    ),
    OpDef(
        "SOFTMAX_CE_BWD",
        _C1,
        inputs=("probs", "label", "label_smoothing", "batch_valid", "scaling"),
        outputs=(Output("dlogits", Place.GRADIENT),),
        types=rule.softmax_bwd,
    ),
    # top1, top5 are rates over batch_valid; ties go to the lower class; with fewer than 5 classes top5 = top1.
    OpDef(
        "SOFTMAX_CE_INF",
        _C1,
        inputs=_CE,
        outputs=(
            Output("predicted", Place.PREDICTED),
            Output("probs", Place.TEMP),
            Output("loss_partials", Place.TEMP),
            *_state("loss", "top1", "top5"),
        ),
        types=rule.softmax_inf,
    ),
)

_SCALARS = (
    # step += 1 and c_i = 1 / (1 - beta_i^step), unless has_nan.
    OpDef(
        "ADAM_STEP",
        _UP,
        inputs=("has_nan", "step", "beta", "beta2"),
        outputs=(*_state("step", accumulates=True), *_state("bias_corr1", "bias_corr2", accumulates=True)),
    ),
    # dropout_step += 1, unless has_nan: a step tried again draws the same masks.
    OpDef(
        "DROPOUT_ADVANCE",
        _UP,
        inputs=("has_nan", "dropout_step"),
        outputs=_state("dropout_step", accumulates=True),
    ),
    # either = a or b, as flags.
    OpDef("FLAG_OR", _UP, inputs=("a", "b"), outputs=_state("either")),
    # accum += batch_valid * value and count += batch_valid, unless has_nan.
    OpDef(
        "ACCUM_METRICS",
        _UP,
        inputs=("batch_valid", "loss", "top1", "top5", "has_nan?"),
        outputs=_state("accum_loss", "accum_top1", "accum_top5", "accum_count", accumulates=True),
    ),
    # On overflow scaling *= backoff (not below floor); after growth_interval clean steps scaling *= 2.
    OpDef(
        "GRAD_SCALING",
        _UP,
        inputs=("has_nan", "scaling", "good_steps"),
        outputs=_state("scaling", "good_steps", accumulates=True),
        attrs={"growth_interval": int, "backoff": float, "floor": float},
    ),
)

_RANGES = (
    # has_nan := 1 if a span has a NaN or an Inf or, in the gradients without clipping, a magnitude whose square is not
    # finite (from GRADIENT_LIMIT on): it would leave an Inf in Adam's second moment. clip > 0 limits elements of the
    # unscaled gradient to +-clip. The watched spans (loss, new BN statistics) are only looked at.
    OpDef(
        "RANGE_CHECK_NAN",
        _UP,
        inputs=("scaling",),
        outputs=_state("has_nan"),
        spans_in=(*_read("grad"), *_read("watched?"), *_read("watched_more?")),
        spans_out=_both("clipped?"),
        attrs={"clip": float},
    ),
    OpDef("RANGE_CLEAR", _UP, spans_out=_written("span")),
    # With has_nan: copies only when it is 0.
    OpDef("RANGE_COPY", _UP, inputs=("has_nan?",), spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_CAST_FP32_TO_HALF", _UP, spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_CAST_HALF_TO_FP32", _UP, spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_MEAN_ALLREDUCE", _UP, spans_out=_both("span")),
    # ema = decay * ema + (1 - decay) * weight, unless has_nan.
    OpDef(
        "RANGE_EMA_UPDATE",
        _UP,
        inputs=("ema_decay", "has_nan"),
        spans_in=_read("weight"),
        spans_out=_both("ema"),
    ),
    _update("SGD", ("lr", "wd"), ()),
    _update("MOMENTUM", ("lr", "wd", "beta"), ("m",)),
    _update("NESTEROV", ("lr", "wd", "beta"), ("m",)),
    _update("ADAM", _ADAM, ("m", "v")),
    _update("ADAMW", _ADAM, ("m", "v")),
    # One tensor; its stream is that of its graph (fc, first conv, deep conv). ratio is for reading only.
    OpDef(
        "LARS_UPDATE",
        None,
        inputs=(*_LARS, "grad"),
        outputs=(*_state("weight", "m", accumulates=True), *_state("ratio", "half?")),
        attrs={"nesterov": _BOOL},
        types=rule.lars_update,
    ),
)

_DEFINITIONS = (*_PRODUCTS, *_NORMS, *_ELEMENTWISE, *_POOLING, *_LOSS, *_SCALARS, *_RANGES)

OPS: Mapping[str, OpDef] = {d.name: d for d in _DEFINITIONS}


def op_def(name: str) -> OpDef:
    """The declaration of ``name``; raises MissingKernelError for an op that is not in the table."""
    try:
        return OPS[name]
    except KeyError:
        raise MissingKernelError(f"op {name} is not in the op table; known: {', '.join(sorted(OPS))}") from None


def require_supported(ops: frozenset[str], supported: frozenset[str] | None) -> None:
    """Raise MissingKernelError that names every op the backend cannot run (a missing kernel is never a no-op)."""
    missing = sorted(ops - supported) if supported is not None else []
    if missing:
        raise MissingKernelError(f"the backend has no kernel for: {', '.join(missing)}; use another backend or model")


def named_inputs(node: Node) -> Mapping[str, int]:
    """Role (without "?") -> tensor id of the inputs that a node has."""
    definition = op_def(node.op)
    roles = roles_for(definition, definition.inputs, node.attrs)
    return {r.removesuffix("?"): i for r, i in zip(roles, node.inputs, strict=False)}


def named_outputs(node: Node) -> Mapping[str, int]:
    """Role (without "?") -> tensor id of the outputs that a node has."""
    definition = op_def(node.op)
    roles = roles_for(definition, [o.role for o in definition.outputs], node.attrs)
    return {r.removesuffix("?"): i for r, i in zip(roles, node.outputs, strict=False)}
