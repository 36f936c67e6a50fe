"""The op table: every op is declared once, here. A new op is a new entry.

An entry says which tensors and region spans the op reads and writes (by role), its attributes, its shape and dtype
rule, where its outputs live, its stream, and how it is differentiated. Kernels are registered by the backends.

Role names ending in "?" may be absent; absent roles are trailing. FC ops read ``x`` as [N, H*W*C]: a flatten of a
compact tensor is no op. Formulas: spec/framework 3.9, 4.1, 4.2; softmax is plain log-sum-exp without the 1e-8 guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from renaissance.core.dtype import DType
from renaissance.core.enums import StreamKind
from renaissance.core.errors import DTypeError, GraphError, MissingKernelError, ShapeError
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue
from renaissance.graph.gradients import (
    GradientRule,
    grad_fc,
    grad_flatten,
    grad_relu,
    grad_softmax_ce,
)

FLOATS = (DType.FP32, DType.FP16, DType.BF16)


class Place(IntEnum):
    """Where an output lives; the compiler turns it and the dtype into a region."""

    STATE = 0
    """A tensor that exists already: weight, gradient of a weight, scalar, label."""
    FEATURE = 1
    GRADIENT = 2
    TEMP = 3
    MASK = 4
    PREDICTED = 5


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of one tensor in one variant. ``dtype`` None in a rule: any float, the caller's choice."""

    shape: Shape
    dtype: DType | None

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.name if self.dtype is not None else 'float'}"


@dataclass(frozen=True, slots=True)
class Output:
    """One output role."""

    role: str
    place: Place
    accumulates: bool = False
    """True when the old contents are read too: the op does not fully overwrite the tensor."""


@dataclass(frozen=True, slots=True)
class SpanRole:
    """One region span an op works on. A span may be read, written or both, whichever list of the node holds it."""

    role: str
    reads: bool
    writes: bool


Types = Sequence[TensorType]
TypeRule = Callable[[Types, Mapping[str, AttrValue]], tuple[TensorType, ...]]


GRADIENT_LIMIT = 2.0**63
"""See RANGE_CHECK_NAN."""


@dataclass(frozen=True, slots=True)
class OpDef:
    """Declaration of one op."""

    name: str
    stream: StreamKind
    inputs: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    spans_in: tuple[SpanRole, ...] = ()
    spans_out: tuple[SpanRole, ...] = ()
    attrs: Mapping[str, tuple[AttrValue, ...] | type] = field(default_factory=dict)
    """Attribute -> allowed values, or the type of a free value. All are required."""
    types: TypeRule | None = None
    """Types of the outputs from those of the inputs; None: all tensors are step scalars."""
    gradient: GradientRule | None = None
    flat: bool = False
    """True when outputs may have any shape with the same N and number of elements (the op sees rows of bytes)."""


def required(roles: Sequence[str]) -> int:
    """Number of roles that must be present."""
    return sum(not r.endswith("?") for r in roles)


def _fail(op: str, text: str) -> ShapeError:
    return ShapeError(f"{op}: {text}")


def _features(t: TensorType) -> int:
    return t.shape.numel // t.shape.n


def _same_float(op: str, types: Types) -> DType:
    dtype = types[0].dtype
    if dtype not in FLOATS or any(t.dtype is not dtype for t in types):
        raise DTypeError(f"{op}: element types {[str(t) for t in types]}; expected one floating type")
    return dtype


def _fc_fwd(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    x, w = ts[:2]
    if _features(x) != w.shape.c:
        raise _fail("FC_FWD", f"input {x.shape} has {_features(x)} values per sample, the weight reads {w.shape.c}")
    if len(ts) > 2 and ts[2] != TensorType(Shape.of(w.shape.n), DType.FP32):
        raise _fail("FC_FWD", f"bias is {ts[2]}; expected {Shape.of(w.shape.n)} FP32")
    return (TensorType(Shape(x.shape.n, 1, 1, w.shape.n), _same_float("FC_FWD", (x, w))),)


def _fc_bwd_weight(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    dy, x = ts
    _same_float("FC_BWD_WEIGHT", ts)
    if dy.shape.n != x.shape.n:
        raise _fail("FC_BWD_WEIGHT", f"gradient {dy.shape} and input {x.shape} have different batch sizes")
    return (
        TensorType(Shape(_features(dy), 1, 1, _features(x)), DType.FP32),
        TensorType(Shape.of(_features(dy)), DType.FP32),
    )


def _fc_bwd_data(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    dy, w = ts[:2]
    if _features(dy) != w.shape.n:
        raise _fail("FC_BWD_DATA", f"gradient {dy.shape} does not fit the weight {w.shape}")
    if (attrs["mask"] == "relu") != (len(ts) == 3):
        raise _fail("FC_BWD_DATA", f"mask {attrs['mask']!r} with {len(ts)} inputs; y_prev belongs to mask 'relu'")
    if len(ts) == 3 and _features(ts[2]) != w.shape.c:
        raise _fail("FC_BWD_DATA", f"mask {ts[2].shape} does not fit the weight {w.shape}")
    return (TensorType(Shape(dy.shape.n, 1, 1, w.shape.c), _same_float("FC_BWD_DATA", ts)),)


def _same_as_first(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    return (TensorType(ts[0].shape, _same_float("element-wise op", ts)),)


def _relu_bwd(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    if ts[0].shape != ts[1].shape:
        raise _fail("RELU_BWD", f"gradient {ts[0].shape} and output {ts[1].shape} differ")
    return _same_as_first(ts, attrs)


def _flatten(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    return (TensorType(Shape(ts[0].shape.n, 1, 1, _features(ts[0])), _same_float("FLATTEN", ts)),)


def _flatten_bwd(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    return (TensorType(ts[0].shape, _same_float("FLATTEN_BWD", ts)),)


def _label_copy(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    if ts[0].dtype is not DType.INT32:
        raise DTypeError(f"LABEL_COPY: labels are {ts[0]}; expected INT32")
    return (ts[0],)


SCALAR = TensorType(Shape(), DType.FP32)


def _check_logits(op: str, logits: TensorType, label: TensorType) -> Shape:
    shape = logits.shape
    if shape.h != 1 or shape.w != 1 or label != TensorType(Shape(shape.n), DType.INT32):
        raise _fail(op, f"logits {logits} with labels {label}; expected [N,1,1,K] and [N,1,1,1] INT32")
    return shape


def _softmax_fwd(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    shape = _check_logits("SOFTMAX_CE_FWD", ts[0], ts[1])
    return TensorType(shape, DType.FP32), TensorType(Shape(shape.n), DType.FP32), SCALAR


def _softmax_bwd(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    return (TensorType(_check_logits("SOFTMAX_CE_BWD", ts[0], ts[1]), None),)


def _softmax_inf(ts: Types, attrs: Mapping[str, AttrValue]) -> tuple[TensorType, ...]:
    shape = _check_logits("SOFTMAX_CE_INF", ts[0], ts[1])
    column = Shape(shape.n)
    predicted = TensorType(column, DType.INT32)
    return predicted, TensorType(shape, DType.FP32), TensorType(column, DType.FP32), SCALAR, SCALAR, SCALAR


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
_C1, _C2, _C3, _UP = StreamKind.COMP_1, StreamKind.COMP_2, StreamKind.COMP_3, StreamKind.UPDATE

_DEFINITIONS = (
    # y = act(x * w^T + b); without a bias the role is absent.
    OpDef(
        "FC_FWD",
        _C1,
        inputs=("x", "w", "b?"),
        outputs=(Output("y", Place.FEATURE),),
        attrs={"activation": ("none", "relu")},
        types=_fc_fwd,
        gradient=grad_fc,
    ),
    # dw = dy^T * x, db = column sums of dy; fp32, overwritten.
    OpDef("FC_BWD_WEIGHT", _C1, inputs=("dy", "x"), outputs=_state("dw", "db?"), types=_fc_bwd_weight),
    # dx = dy * w, with mask "relu" zeroed where y_prev <= 0.
    OpDef(
        "FC_BWD_DATA",
        _C3,
        inputs=("dy", "w", "y_prev?"),
        outputs=(Output("dx", Place.GRADIENT),),
        attrs={"mask": ("none", "relu")},
        types=_fc_bwd_data,
        flat=True,
    ),
    OpDef(
        "RELU_FWD",
        _C3,
        inputs=("x",),
        outputs=(Output("y", Place.FEATURE),),
        types=_same_as_first,
        gradient=grad_relu,
    ),
    OpDef("RELU_BWD", _C3, inputs=("dy", "y"), outputs=(Output("dx", Place.GRADIENT),), types=_relu_bwd),
    # Copies rows without their channel padding; only for tensors that have some.
    OpDef(
        "FLATTEN_FWD",
        _C1,
        inputs=("x",),
        outputs=(Output("y", Place.FEATURE),),
        types=_flatten,
        gradient=grad_flatten,
    ),
    OpDef("FLATTEN_BWD", _C1, inputs=("dy",), outputs=(Output("dx", Place.GRADIENT),), types=_flatten_bwd, flat=True),
    OpDef("LABEL_COPY", _C1, inputs=("label",), outputs=(Output("label_smce", Place.STATE),), types=_label_copy),
    # loss = sum over valid rows / batch_valid; rows with label -1 are masked.
    OpDef(
        "SOFTMAX_CE_FWD",
        _C1,
        inputs=_CE,
        outputs=(Output("probs", Place.TEMP), Output("loss_partials", Place.TEMP), *_state("loss")),
        types=_softmax_fwd,
        gradient=grad_softmax_ce,
    ),
    OpDef(
        "SOFTMAX_CE_BWD",
        _C1,
        inputs=("probs", "label", "label_smoothing", "batch_valid", "scaling"),
        outputs=(Output("dlogits", Place.GRADIENT),),
        types=_softmax_bwd,
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
        types=_softmax_inf,
    ),
    # step += 1 and c_i = 1 / (1 - beta_i^step), unless has_nan.
    OpDef(
        "ADAM_STEP",
        _UP,
        inputs=("has_nan", "step", "beta", "beta2"),
        outputs=(*_state("step", accumulates=True), *_state("bias_corr1", "bias_corr2", accumulates=True)),
    ),
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
    # has_nan := 1 if the span has a NaN, an Inf or, without clipping, a magnitude whose square is not finite (from
    # GRADIENT_LIMIT on): it would leave an Inf in Adam's second moment. clip > 0 limits elements of the unscaled
    # gradient to +-clip.
    OpDef(
        "RANGE_CHECK_NAN",
        _UP,
        inputs=("scaling",),
        outputs=_state("has_nan"),
        spans_in=_read("grad"),
        spans_out=_both("clipped?"),
        attrs={"clip": float},
    ),
    OpDef("RANGE_CLEAR", _UP, spans_out=_written("span")),
    OpDef("RANGE_COPY", _UP, spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_CAST_FP32_TO_HALF", _UP, spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_CAST_HALF_TO_FP32", _UP, spans_in=_read("source"), spans_out=_written("target")),
    OpDef("RANGE_MEAN_ALLREDUCE", _UP, spans_out=_both("span")),
    _update("SGD", ("lr", "wd"), ()),
    _update("MOMENTUM", ("lr", "wd", "beta"), ("m",)),
    _update("NESTEROV", ("lr", "wd", "beta"), ("m",)),
    _update("ADAM", _ADAM, ("m", "v")),
    _update("ADAMW", _ADAM, ("m", "v")),
)

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


def check_arity(label: str, what: str, given: int, roles: Sequence[str]) -> None:
    """Raise GraphError unless ``given`` fits the roles."""
    if not required(roles) <= given <= len(roles):
        raise GraphError(f"{label}: {given} {what}; expected {', '.join(roles) or 'none'}")
