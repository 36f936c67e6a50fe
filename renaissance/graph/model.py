"""CompiledModel: the result of a compilation, frozen plain data that backends and tasks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from renaissance.core.errors import ValueRejected
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
    scalars: Mapping[str, int]
    """Step scalars by name -> tensor id."""
    scalar_init: Mapping[str, int | float]
    """Value of every scalar before the first step."""
    inputs: tuple[InputSlot, InputSlot]
    """Input slots A and B."""
    logits: int
    probs: int
    predicted: int
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
