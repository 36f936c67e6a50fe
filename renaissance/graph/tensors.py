"""The compiler's tensor table (one declaration per tensor, shapes for all six variants) and the step scalars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from renaissance.core.dtype import DType
from renaissance.core.errors import GraphError
from renaissance.core.region import PERSISTENT_REGIONS, Region
from renaissance.core.shape import Shape
from renaissance.graph.ids import Variant
from renaissance.graph.memory_plan import INPUT_REGIONS, MemoryPlan, PlanGates
from renaissance.graph.model import BatchNorm, Parameter
from renaissance.graph.ops import Place, TensorType
from renaissance.graph.request import CompileRequest
from renaissance.graph.storage import Storage
from renaissance.tensor.dtensor import slot_bytes
from renaissance.tensor.init import ONES, ZEROS, InitConfig

ONE = Shape()


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """One tensor before it is placed; ``shapes`` has one entry per Variant."""

    name: str
    region: Region
    dtype: DType
    shapes: tuple[Shape, ...]
    init: InitConfig | None = None

    @property
    def slot(self) -> int:
        """Bytes of the slot: the largest over the variants, so that offsets agree in all six plans."""
        return max(slot_bytes(shape, self.dtype) for shape in set(self.shapes))


class TensorTable:
    """Declarations in id order. Names are unique; asking for a name again with the same facts gives the same id."""

    def __init__(self) -> None:
        self.decls: list[TensorDecl] = []
        self._ids: dict[str, int] = {}

    def add(self, decl: TensorDecl) -> int:
        """Id of ``decl``. Raises GraphError when its name stands for something else already."""
        known = self._ids.get(decl.name)
        if known is not None:
            if self.decls[known] != decl:
                raise GraphError(f"tensor {decl.name!r} is declared twice: {self.decls[known]} and {decl}")
            return known
        self._ids[decl.name] = len(self.decls)
        self.decls.append(decl)
        return len(self.decls) - 1

    def fixed(self, name: str, region: Region, dtype: DType, shape: Shape = ONE, init: InitConfig | None = None) -> int:
        """A tensor with the same shape in all variants."""
        return self.add(TensorDecl(name, region, dtype, (shape,) * len(Variant), init))

    def type(self, tensor: int, variant: Variant) -> TensorType:
        decl = self.decls[tensor]
        return TensorType(decl.shapes[variant], decl.dtype)

    def region(self, tensor: int) -> Region:
        return self.decls[tensor].region

    def restrict(self, tensor: int, variants: Collection[Variant]) -> None:
        """Say that only programs of ``variants`` use ``tensor``: its slot need not be larger than theirs.

        In the other plans it gets the shape of the first of them.
        """
        decl = self.decls[tensor]
        first = decl.shapes[min(variants)]
        self.decls[tensor] = replace(decl, shapes=tuple(decl.shapes[v] if v in variants else first for v in Variant))

    @property
    def slots(self) -> tuple[int, ...]:
        """Bytes of the slot of every tensor."""
        return tuple(d.slot for d in self.decls)

    def prune(self, keep: Collection[int]) -> Mapping[int, int]:
        """Drop all other declarations; returns old id -> new id."""
        remap = {old: new for new, old in enumerate(sorted(keep))}
        self.decls = [self.decls[old] for old in sorted(keep)]
        self._ids = {decl.name: i for i, decl in enumerate(self.decls)}
        return remap

    def plan(self, variant: Variant, request: CompileRequest, storage: Storage) -> MemoryPlan:
        """The finalized plan of one variant; ``storage`` says where the values lie in their regions."""
        external = INPUT_REGIONS if request.external_inputs else ()
        gates = PlanGates(half=request.half, optimizer=request.optimizer, has_ema=request.ema)
        plan = MemoryPlan(gates, name=variant.name.lower(), external=external)
        for i, (d, slot) in enumerate(zip(self.decls, self.slots, strict=True)):
            region, at = storage.regions.get(i, d.region), storage.offsets.get(i)
            plan.alloc(d.name, d.shapes[variant], d.dtype, region, slot=slot, init=d.init, at=at)
        plan.finalize(storage.live)
        return plan


def place_region(place: Place, dtype: DType) -> Region:
    """The region of a new output."""
    half = dtype.is_half
    match place:
        case Place.FEATURE:
            return Region.F_FEATURE_FP16 if half else Region.F_FEATURE_FP32
        case Place.GRADIENT:
            return Region.F_GRAD_SLOT_FP16 if half else Region.F_GRAD_SLOT_FP32
        case Place.MASK:
            return Region.S_MASK
        case Place.PREDICTED:
            return Region.R_PREDICTED_LABEL
        case Place.TEMP:
            temps = {DType.FP32: Region.T_TEMP_FP32, DType.INT32: Region.T_TEMP_INT32, DType.INT8: Region.T_TEMP_INT8}
            return Region.T_TEMP_FP16 if half else temps[dtype]
        case Place.STATE:
            raise GraphError("an output with place STATE is never allocated; pass an existing tensor")


@dataclass(frozen=True, slots=True)
class ScalarDef:
    """One step scalar. ``region`` gives its dtype."""

    name: str
    region: Region
    initial: int | float


def scalar_defs(request: CompileRequest) -> tuple[ScalarDef, ...]:
    """The step scalars of a profile in allocation order (spec/framework 3.3), with their values before step 1.

    ``beta`` is the momentum of the SGD and LARS kinds and beta1 of the Adam kinds. The host writes ``lr`` and
    ``batch_valid``, the number of rows of the batch that count, before every step; ``seed_low`` and ``seed_high``, the
    halves of the run's seed, once; ``first_frozen`` when it starts to launch programs without the first layer's
    backward pass.
    """
    fp32, int32 = Region.S_SCALAR_FP32, Region.S_SCALAR_INT32
    result, accumulated = Region.R_RESULT, Region.R_RESULT_ACCUMULATED
    defs = [
        ScalarDef("has_nan", int32, 0),
        ScalarDef("lr", fp32, 0.0),
        ScalarDef("scaling", fp32, request.initial_loss_scale),
        ScalarDef("label_smoothing", fp32, request.label_smoothing),
        ScalarDef("loss", result, 0.0),
        ScalarDef("top1", result, 0.0),
        ScalarDef("top5", result, 0.0),
        ScalarDef("batch_valid", int32, request.train_batch),
        ScalarDef("accum_loss", accumulated, 0.0),
        ScalarDef("accum_top1", accumulated, 0.0),
        ScalarDef("accum_top5", accumulated, 0.0),
        ScalarDef("accum_count", accumulated, 0.0),
        ScalarDef("wd", fp32, request.weight_decay),
        ScalarDef("seed_low", int32, 0),
        ScalarDef("seed_high", int32, 0),
        ScalarDef("dropout_step", int32, 0),
    ]
    if request.has_momentum:
        defs.append(ScalarDef("beta", fp32, request.beta))
    if request.is_adam:
        defs += [
            ScalarDef("beta2", fp32, request.beta2),
            ScalarDef("eps", fp32, request.eps),
            ScalarDef("step", int32, 0),
            ScalarDef("bias_corr1", fp32, 1.0),
            ScalarDef("bias_corr2", fp32, 1.0),
        ]
    if request.is_lars:
        defs += [ScalarDef("trust", fp32, request.trust_coefficient), ScalarDef("eps", fp32, request.eps)]
    if request.ema:
        defs.append(ScalarDef("ema_decay", fp32, request.ema_decay))
    if request.freeze_first_layer:
        defs += [ScalarDef("first_frozen", int32, 0), ScalarDef("skip_first", int32, 0)]
    if request.has_loss_scaling:
        defs.append(ScalarDef("good_steps", int32, 0))
    return tuple(defs)


PERSISTENT_SCALARS = frozenset(
    {"scaling", "good_steps", "step", "dropout_step", "accum_loss", "accum_top1", "accum_top5", "accum_count"}
)
"""Scalars that a step changes and a later step reads; the others are inputs or recomputed."""


def state_tensors(table: TensorTable, scalars: Mapping[str, int]) -> tuple[int, ...]:
    """The tensors a checkpoint holds, in id order."""
    tensors = {i for i, d in enumerate(table.decls) if d.region in PERSISTENT_REGIONS}
    return tuple(sorted(tensors | {i for name, i in scalars.items() if name in PERSISTENT_SCALARS}))


@dataclass(frozen=True, slots=True)
class ParamKind:
    """A kind of parameter: the suffix of its regions in all series (W_FC_BIAS, G_FC_BIAS, ...).

    A weight decays, has a half copy with AMP and a trust ratio with LARS; the others are used in fp32 by all profiles.
    """

    regions: str
    is_weight: bool

    def region(self, series: str, half: bool = False) -> Region:
        """The region of one series, e.g. "G"; ``half``: of its half copy."""
        return Region[f"{series}_{self.regions}{'_FP16' * half}"]


PARAMETER_KINDS: Mapping[str, ParamKind] = {
    "bn_bias": ParamKind("BN_BIAS", is_weight=False),
    "bn_weight": ParamKind("BN_WEIGHT", is_weight=False),
    "fc_bias": ParamKind("FC_BIAS", is_weight=False),
    "conv_bias": ParamKind("FC_BIAS", is_weight=False),
    "fc_weight": ParamKind("FC_WEIGHT", is_weight=True),
    "first_conv": ParamKind("FIRST_CONV", is_weight=True),
    "deep_conv": ParamKind("DEEP_CONV", is_weight=True),
}


def declare_parameter(
    table: TensorTable, request: CompileRequest, ordinal: int, name: str, kind: str, shape: Shape, init: InitConfig
) -> Parameter:
    """Declare a parameter with everything the profile keeps for it.

    All its tensors at once, so that paired regions have the same order.
    """
    p, half = PARAMETER_KINDS[kind], request.half

    def declare(suffix: str, region: Region, wanted: bool = True, size: Shape = shape) -> int | None:
        return table.fixed(name + suffix, region, region.dtype(half), size) if wanted else None

    has_half = p.is_weight and half is not None
    return Parameter(
        ordinal=ordinal,
        name=name,
        shape=shape,
        init=init,
        decay=p.is_weight,
        weight=table.fixed(name, p.region("W"), DType.FP32, shape, init),
        grad=table.fixed(f"{name}.grad", p.region("G"), DType.FP32, shape),
        half=declare(".half", p.region("A"), True) if has_half else None,
        m=declare(".m", p.region("M"), request.has_momentum),
        v=declare(".v", p.region("V"), request.is_adam),
        ema=declare(".ema", p.region("E"), request.ema),
        ema_half=declare(".ema_half", p.region("E", half=True)) if request.ema and has_half else None,
        ratio=declare(".ratio", p.region("N"), size=ONE) if request.is_lars and p.is_weight else None,
    )


def declare_batch_norm(table: TensorTable, name: str, gamma: Parameter, beta: Parameter, eps: float) -> BatchNorm:
    """Declare what a batch norm layer keeps besides its two parameters."""

    def declare(suffix: str, region: Region, init: InitConfig | None = None) -> int:
        return table.fixed(f"{name}.{suffix}", region, DType.FP32, gamma.shape, init)

    return BatchNorm(
        name=name,
        gamma=gamma.weight,
        beta=beta.weight,
        prev_mean=declare("running_mean", Region.B_PREV_MEAN, ZEROS),
        prev_var=declare("running_var", Region.B_PREV_VAR, ONES),
        next_mean=declare("next_mean", Region.B_NEXT_MEAN),
        next_var=declare("next_var", Region.B_NEXT_VAR),
        eq_scale=declare("eq_scale", Region.W_EQ_SCALE),
        eq_bias=declare("eq_bias", Region.W_EQ_BIAS),
        eps=eps,
        ema_gamma=gamma.ema,
        ema_beta=beta.ema,
    )


def regions_of(decls: Sequence[TensorDecl]) -> tuple[Region, ...]:
    """The region of every tensor id."""
    return tuple(d.region for d in decls)
