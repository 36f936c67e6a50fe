"""MemoryPlan: where every tensor of one variant lies in the arena.

Tensors are appended region by region in the order of ``alloc``; ``finalize`` walks the 68 regions in order with one
cursor (spec/framework 3.7). All six plans of a model are built with the same slots, so a tensor id has the same offset
in each. Two additions to upstream's algorithm:

* A tensor may be given its offset in its region (``at``): values, which ``storage`` packs by lifetime. The region is as
  large as its last byte in use.
* External regions (the inputs on the CPU) take no arena memory: their tensors have offsets from the start of their own
  region, whose bytes are a shared slot that the backend binds.

``renaissance.graph.memory_checks`` verifies a finalized plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import MemoryPlanError, PhaseError
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph.request import ADAM_KINDS, LARS_KINDS
from renaissance.tensor.dtensor import DTensor, slot_bytes
from renaissance.tensor.init import InitConfig

INPUT_REGIONS = frozenset({Region.I_A_LABEL, Region.I_A_DATA, Region.I_B_LABEL, Region.I_B_DATA})
_AMP_ONLY = frozenset(
    {r for r in Region if r.series == "A"}
    | {r for r in Region if r.series in "GF" and r.name.endswith("_FP16")}
    | {Region.S_SCALAR_FP16}
)
_EMA_HALF = frozenset(r for r in Region if r.series == "E" and r.name.endswith("_FP16"))


@dataclass(frozen=True, slots=True)
class PlanGates:
    """The settings that open and close regions (spec/framework 1.5)."""

    half: DType | None = None
    optimizer: OptimizerKind = OptimizerKind.SGD
    has_ema: bool = False
    bn_folded: bool = True

    def is_open(self, region: Region) -> bool:
        """True when tensors may be put into ``region``."""
        amp = self.half is not None
        if region in (Region.W_EQ_BIAS, Region.W_EQ_SCALE):
            return self.bn_folded
        if region in (Region.F_FEATURE_FP32, Region.F_GRAD_SLOT_FP32):
            return not amp
        if region in _AMP_ONLY:
            return amp
        if region.series == "E":
            return self.has_ema and (amp or region not in _EMA_HALF)
        if region.series == "M":
            return self.optimizer is not OptimizerKind.SGD
        if region.series == "V":
            return self.optimizer in ADAM_KINDS
        if region.series == "N":
            return self.optimizer in LARS_KINDS
        return True


class MemoryPlan:
    """Layout of one variant: ``alloc`` tensors, ``finalize`` once, then read. All sizes and offsets are in bytes."""

    def __init__(self, gates: PlanGates, *, name: str = "plan", external: Iterable[Region] = ()) -> None:
        self.name = name
        self.gates = gates
        self.external = frozenset(external)
        self._tensors: list[DTensor] = []
        self._given: dict[int, int] = {}
        self._live: Mapping[Region, int] = {}
        self._by_region: dict[Region, list[int]] = {r: [] for r in Region}
        self._bounds: dict[Region, tuple[int, int]] = {}
        self._external_bytes: dict[Region, int] = {}
        self._total = -1

    def alloc(
        self,
        name: str,
        shape: Shape,
        dtype: DType,
        region: Region,
        *,
        slot: int | None = None,
        init: InitConfig | None = None,
        at: int | None = None,
    ) -> int:
        """Append a tensor to its region; returns its id (0, 1, 2, ...).

        ``slot`` is the size of its slot (default: from its shape), ``at`` its offset in its region (default: after the
        one before). Raises PhaseError after ``finalize``; MemoryPlanError for a closed region, a dtype the region does
        not hold, or a region that has tensors with and without an offset.
        """
        if self._bounds:
            raise PhaseError(f"{self.name}: alloc of {name!r} after finalize; a finalized plan cannot grow")
        if not self.gates.is_open(region):
            raise MemoryPlanError(
                f"{self.name}: tensor {name!r}: region {region.name} is closed with {self.gates}; "
                "expected AMP, EMA or another optimizer for it"
            )
        if dtype is not region.dtype(self.gates.half):
            raise MemoryPlanError(
                f"{self.name}: tensor {name!r} is {dtype.name}; region {region.name} holds "
                f"{region.dtype(self.gates.half).name}"
            )
        tensor_id = len(self._tensors)
        if any((i in self._given) != (at is not None) for i in self._by_region[region][:1]):
            raise MemoryPlanError(
                f"{self.name}: tensor {name!r} has {'an' if at is not None else 'no'} offset in {region.name}; "
                "expected all tensors of a region to have one, or none"
            )
        size = slot_bytes(shape, dtype) if slot is None else slot
        tensor = DTensor(tensor_id, name, shape, dtype, region, size, init=init)
        self._tensors.append(tensor)
        if at is not None:
            self._given[tensor_id] = at
        self._by_region[region].append(tensor_id)
        return tensor_id

    def finalize(self, live: Mapping[Region, int] | None = None) -> None:
        """Give every tensor its offset. ``live``: for packed regions the most bytes alive at once, which no layout can
        undercut; shown by ``dump_layout``. Raises PhaseError the second time."""
        if self._bounds:
            raise PhaseError(f"{self.name}: finalize was called twice")
        self._live = live or {}
        cursor = 0
        for region in Region:
            base = cursor
            at = end = 0 if region in self.external else base
            for i in self._by_region[region]:
                if i in self._given:
                    at = base + self._given[i]
                self._tensors[i] = self._tensors[i].at(at)
                at = self._tensors[i].end
                end = max(end, at)
            if region in self.external:
                self._external_bytes[region] = end
            else:
                cursor = end
            self._bounds[region] = (base, cursor - base)
        self._total = cursor

    @property
    def total_bytes(self) -> int:
        """Arena bytes of the plan; raises PhaseError before ``finalize``."""
        self._need_final("total_bytes")
        return self._total

    @property
    def tensors(self) -> tuple[DTensor, ...]:
        """All tensors, indexed by id."""
        return tuple(self._tensors)

    def tensor(self, tensor_id: int) -> DTensor:
        """The tensor with this id; raises MemoryPlanError for an unknown one."""
        if not 0 <= tensor_id < len(self._tensors):
            raise MemoryPlanError(f"{self.name}: no tensor #{tensor_id}; it has #0 to #{len(self._tensors) - 1}")
        return self._tensors[tensor_id]

    def ids(self, region: Region) -> tuple[int, ...]:
        """Tensor ids of a region in allocation order."""
        return tuple(self._by_region[region])

    def is_populated(self, region: Region) -> bool:
        """True when the region has a tensor."""
        return bool(self._by_region[region])

    def is_external(self, tensor_id: int) -> bool:
        """True when the tensor's bytes are not in the arena; its offset then counts from its region's own start."""
        return self.tensor(tensor_id).region in self.external

    def external_bytes(self, region: Region) -> int:
        """Bytes that an external region needs outside the arena (0 for other regions)."""
        self._need_final("external_bytes")
        return self._external_bytes.get(region, 0)

    def region_bounds(self, region: Region) -> tuple[int, int]:
        """(base, size) of a region in the arena."""
        self._need_final("region_bounds")
        return self._bounds[region]

    def resolve_span(self, span: Span) -> tuple[int, int]:
        """(offset, bytes) of a span of regions; (offset, 0) when none of them has a tensor in the arena."""
        self._need_final("resolve_span")
        base = self._bounds[span.first][0]
        last_base, last_size = self._bounds[span.last]
        return base, last_base + last_size - base

    def dump_layout(self) -> str:
        """Stable text: one row per populated region, one per tensor."""
        self._need_final("dump_layout")
        populated = [r for r in Region if self._by_region[r]]
        lines = [
            f"MemoryPlan {self.name}: {len(self._tensors)} tensors in {len(populated)} of {len(Region)} regions, "
            f"{self._total} bytes"
        ]
        for region in populated:
            base, size = self._bounds[region]
            dtype = region.dtype(self.gates.half).name
            external = self._external_bytes.get(region)
            where = f"@{base} +{size}" if external is None else f"external, {external} bytes"
            if region in self._live:
                where += f", {self._live[region]} alive at once"
            lines.append(f"  {region.value:>2} {region.name:<21} {dtype:<5} {where}")
            lines += [self._row(self._tensors[i]) for i in self._by_region[region]]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _row(tensor: DTensor) -> str:
        return f"     #{tensor.id:<3} {tensor.name:<24} {tensor.shape!s:<18} @{tensor.offset} +{tensor.slot_bytes}"

    def _need_final(self, what: str) -> None:
        if not self._bounds:
            raise PhaseError(f"{self.name}: {what} before finalize; finalize the plan first")
