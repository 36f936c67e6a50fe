"""CompiledModel: the result of a compilation, frozen plain data that backends and tasks read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from renaissance.core.errors import ValueRejected
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import ComputationGraph
from renaissance.graph.ids import Variant
from renaissance.graph.request import CompileRequest
from renaissance.tensor.dtensor import DTensor
from renaissance.tensor.init import InitConfig

if TYPE_CHECKING:
    from renaissance.graph.arch_plan import ArchPlan
    from renaissance.graph.atlas import GraphAtlas
    from renaissance.graph.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained tensor with everything that belongs to it; ids are tensor ids, None where the profile has none.

    ``ordinal`` is the position among the parameters: the stream id of its initial values.
    """

    ordinal: int
    name: str
    shape: Shape
    init: InitConfig
    decay: bool
    weight: int
    grad: int
    half: int | None = None
    m: int | None = None
    v: int | None = None
    ema: int | None = None
    ema_half: int | None = None
    ratio: int | None = None
    """The trust ratio of the last step (LARS kinds, weights only)."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tensors of the parameter."""
        every = (self.weight, self.grad, self.half, self.m, self.v, self.ema, self.ema_half, self.ratio)
        return tuple(i for i in every if i is not None)

    def renamed(self, ids: Mapping[int, int]) -> Parameter:
        """The parameter after its tensors got new ids."""
        return _renamed(self, ("weight", "grad", "half", "m", "v", "ema", "ema_half", "ratio"), ids)


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """What a batch norm layer keeps besides its parameters; all are fp32 [1,1,1,C].

    A step reads the running statistics in ``prev`` and writes ``next``, which UPDATE_STATS copies back when the step
    counts. ``eq_scale`` and ``eq_bias`` are the folded form that inference uses, made from gamma, beta and ``prev``.
    """

    name: str
    gamma: int
    beta: int
    prev_mean: int
    prev_var: int
    next_mean: int
    next_var: int
    eq_scale: int
    eq_bias: int
    eps: float
    ema_gamma: int | None = None
    ema_beta: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All tensors of the layer that are not its parameters'."""
        return (self.prev_mean, self.prev_var, self.next_mean, self.next_var, self.eq_scale, self.eq_bias)

    def renamed(self, ids: Mapping[int, int]) -> BatchNorm:
        """The layer after its tensors got new ids."""
        return _renamed(self, [f.name for f in fields(self) if f.name not in ("name", "eps")], ids)


Owner = TypeVar("Owner", Parameter, BatchNorm)


def _renamed(owner: Owner, names: Iterable[str], ids: Mapping[int, int]) -> Owner:
    old = {name: getattr(owner, name) for name in names}
    changes: dict[str, Any] = {name: ids[i] for name, i in old.items() if i is not None}
    return replace(owner, **changes)


@dataclass(frozen=True, slots=True)
class InputSlot:
    """The tensors a dataserver slot is bound to: labels INT32 [N,1,1,1], images NHWC."""

    label: int
    data: int


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """What ``compile_model`` returns. ``plans`` is indexed by Variant; tensor ids are the same in all six plans."""

    request: CompileRequest
    arch_plan: ArchPlan
    plans: tuple[MemoryPlan, ...]
    training: ComputationGraph
    inference: ComputationGraph
    atlas: GraphAtlas
    parameters: tuple[Parameter, ...]
    batch_norms: tuple[BatchNorm, ...]
    scalars: Mapping[str, int]
    """Step scalars by name -> tensor id."""
    scalar_init: Mapping[str, int | float]
    """Value of every scalar before the first step."""
    inputs: tuple[InputSlot, InputSlot]
    """Input slots A and B."""
    logits: int
    """Of the training steps; those of the validation steps are ``val_logits``."""
    probs: int
    predicted: int
    val_logits: int
    val_probs: int
    values: tuple[int, ...]
    """Tensors that hold nothing between programs and may be overwritten with anything before each: activations,
    gradients of activations, masks and temporaries, in id order. Logits, probabilities and predicted labels are among
    them and can be read until the next program starts."""
    live_bytes: Mapping[Region, int]
    """For each region of values the most bytes that are alive at once: no layout of it is smaller."""
    state: tuple[int, ...]
    """Tensors (not half copies) whose bytes a checkpoint must hold for an exact resume, in id order."""

    def tensor(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> DTensor:
        """Descriptor of a tensor in the plan of ``variant``."""
        return self.plans[variant].tensor(tensor_id)

    def scalar(self, name: str) -> int:
        """Tensor id of a step scalar; raises ValueRejected with the known names."""
        try:
            return self.scalars[name]
        except KeyError:
            raise ValueRejected(f"no scalar {name!r}; this model has: {', '.join(self.scalars)}") from None

    @property
    def arena_bytes(self) -> int:
        """Bytes of the one allocation that serves all variants."""
        return max(plan.total_bytes for plan in self.plans)
