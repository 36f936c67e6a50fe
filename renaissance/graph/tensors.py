"""The compiler's tensor table (one declaration per tensor, shapes for all six variants) and the step scalars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from renaissance.core.dtype import DType
from renaissance.core.errors import GraphError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.ids import Variant
from renaissance.graph.memory_plan import INPUT_REGIONS, MemoryPlan, PlanGates
from renaissance.graph.ops import Place, TensorType
from renaissance.graph.request import INITIAL_LOSS_SCALE, CompileRequest
from renaissance.tensor.dtensor import slot_bytes
from renaissance.tensor.init import InitConfig

ONE = Shape()


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """One tensor before it is placed; ``shapes`` has one entry per Variant."""

    name: str
    region: Region
    dtype: DType
    shapes: tuple[Shape, ...]
    init: InitConfig | None = None
    share: int | None = None

    def slot(self, backend: str) -> int:
        """Bytes of the slot: the largest over the variants, so that offsets agree in all six plans."""
        return max(slot_bytes(shape, self.dtype, self.region, backend) for shape in self.shapes)


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

    def set_share(self, tensor: int, owner: int) -> None:
        """Let ``tensor`` use the storage of ``owner``."""
        self.decls[tensor] = replace(self.decls[tensor], share=owner)

    def prune(self, keep: Collection[int]) -> Mapping[int, int]:
        """Drop all other declarations; returns old id -> new id."""
        remap = {old: new for new, old in enumerate(sorted(keep))}
        self.decls = [self.decls[old] for old in sorted(keep)]
        self._ids = {decl.name: i for i, decl in enumerate(self.decls)}
        return remap

    def plan(self, variant: Variant, request: CompileRequest) -> MemoryPlan:
        """The finalized plan of one variant."""
        external = INPUT_REGIONS if request.external_inputs else ()
        gates = PlanGates(half=request.half, optimizer=request.optimizer)
        plan = MemoryPlan(gates, name=variant.name.lower(), external=external, backend=request.backend)
        for d in self.decls:
            slot = d.slot(request.backend)
            plan.alloc(d.name, d.shapes[variant], d.dtype, d.region, slot=slot, init=d.init, share=d.share)
        plan.finalize()
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

    ``beta`` is the momentum of the SGD kinds and beta1 of the Adam kinds. ``batch_valid`` is the number of rows of the
    batch that count; the host writes it and ``lr`` before every step.
    """
    fp32, int32 = Region.S_SCALAR_FP32, Region.S_SCALAR_INT32
    result, accumulated = Region.R_RESULT, Region.R_RESULT_ACCUMULATED
    defs = [
        ScalarDef("has_nan", int32, 0),
        ScalarDef("lr", fp32, 0.0),
        ScalarDef("scaling", fp32, INITIAL_LOSS_SCALE if request.has_loss_scaling else 1.0),
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
    if request.has_loss_scaling:
        defs.append(ScalarDef("good_steps", int32, 0))
    return tuple(defs)


PERSISTENT_SCALARS = frozenset(
    {"scaling", "good_steps", "step", "accum_loss", "accum_top1", "accum_top5", "accum_count"}
)
"""Scalars that a step changes and a later step reads; the others are inputs or recomputed."""


@dataclass(frozen=True, slots=True)
class ParamRegions:
    """Where a kind of parameter and what belongs to it live; ``half`` None: used in fp32 also with AMP."""

    weight: Region
    grad: Region
    m: Region
    v: Region
    half: Region | None
    decay: bool


PARAMETER_KINDS: Mapping[str, ParamRegions] = {
    "fc_weight": ParamRegions(
        Region.W_FC_WEIGHT, Region.G_FC_WEIGHT, Region.M_FC_WEIGHT, Region.V_FC_WEIGHT, Region.A_FC_WEIGHT, True
    ),
    "fc_bias": ParamRegions(Region.W_FC_BIAS, Region.G_FC_BIAS, Region.M_FC_BIAS, Region.V_FC_BIAS, None, False),
}


def regions_of(decls: Sequence[TensorDecl]) -> tuple[Region, ...]:
    """The region of every tensor id."""
    return tuple(d.region for d in decls)
