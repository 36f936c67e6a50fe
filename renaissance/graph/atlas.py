"""GraphAtlas: the 6 x 33 table that says what each variant launches, and which launches share one capture.

Slots with the same (graph, graph id, shape id) share a capture index. Shape-invariant graphs use the base plan and the
shape id (0,0,0,0), so one capture serves all variants; variants with equal sizes collapse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from renaissance.core.enums import StreamKind
from renaissance.core.errors import GraphError
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.graph.request import CompileRequest

ShapeId = tuple[int, int, int, int]
INVARIANT: ShapeId = (0, 0, 0, 0)
ABSENT = -1
"""Capture index of a slot without nodes."""


@dataclass(frozen=True, slots=True)
class AtlasEntry:
    """One slot of the table. ``captured`` is the index of its capture, ABSENT when the graph has no nodes here."""

    variant: Variant
    graph_id: GraphId
    graph: ComputationGraph
    plan: MemoryPlan
    shape_id: ShapeId
    stream: StreamKind
    captured: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What the capture executes."""
        return self.graph.bucket(self.graph_id) if self.captured != ABSENT else ()


@dataclass(frozen=True, slots=True)
class GraphAtlas:
    """``entries[variant][graph_id]``."""

    entries: tuple[tuple[AtlasEntry, ...], ...]

    def entry(self, variant: Variant, graph_id: GraphId) -> AtlasEntry:
        return self.entries[variant][graph_id]

    @property
    def captures(self) -> tuple[AtlasEntry, ...]:
        """The first slot of every capture, in capture order: what has to be built."""
        first: dict[int, AtlasEntry] = {}
        for row in self.entries:
            for entry in row:
                if entry.captured != ABSENT:
                    first.setdefault(entry.captured, entry)
        return tuple(first[i] for i in sorted(first))

    def text(self) -> str:
        """Stable text: a row per graph id in use, the capture index per variant."""
        lines = [
            f"GraphAtlas: {len(self.captures)} captures",
            f"  {'':<28}" + "".join(f"{v.name:>19}" for v in Variant),
        ]
        for graph_id in GraphId:
            cells = [row[graph_id].captured for row in self.entries]
            if any(c != ABSENT for c in cells):
                row_text = "".join(f"{'-' if c == ABSENT else c:>19}" for c in cells)
                lines.append(f"  {graph_id.name:<28}{row_text}")
        return "\n".join(lines) + "\n"


def build_atlas(
    request: CompileRequest, plans: Sequence[MemoryPlan], training: ComputationGraph, inference: ComputationGraph
) -> GraphAtlas:
    """Fill the table and deduplicate it."""
    keys: dict[tuple[str, GraphId, ShapeId], int] = {}
    rows = []
    for variant in Variant:
        graph = training if variant.is_training else inference
        present = set(graph.graph_ids)
        sizes = (request.batch(variant), *request.size(variant), request.channels)
        row = []
        for graph_id in GraphId:
            invariant = graph_id.shape_invariant
            shape_id = INVARIANT if invariant else sizes
            plan = plans[Variant.TRAIN_BASE if invariant else variant]
            key = (graph.name, graph_id, shape_id)
            captured = keys.setdefault(key, len(keys)) if graph_id in present else ABSENT
            row.append(AtlasEntry(variant, graph_id, graph, plan, shape_id, graph_id.stream, captured))
        rows.append(tuple(row))
    return GraphAtlas(tuple(rows))


def verify_atlas(atlas: GraphAtlas) -> None:
    """Raise GraphError unless the table is complete and its captures are consistent."""
    if [len(row) for row in atlas.entries] != [len(GraphId)] * len(Variant):
        raise GraphError(
            f"atlas has rows of {[len(r) for r in atlas.entries]} slots; expected 6 rows of {len(GraphId)}"
        )
    owners: dict[int, AtlasEntry] = {}
    for variant, row in zip(Variant, atlas.entries, strict=True):
        for graph_id, entry in zip(GraphId, row, strict=True):
            where = f"atlas slot ({variant.name}, {graph_id.name})"
            if (entry.variant, entry.graph_id) != (variant, graph_id):
                raise GraphError(f"{where} holds ({entry.variant.name}, {entry.graph_id.name})")
            if (entry.captured == ABSENT) != (graph_id not in entry.graph.graph_ids):
                raise GraphError(f"{where}: capture {entry.captured}, but the graph has {len(entry.nodes)} nodes")
            if graph_id.shape_invariant != (entry.shape_id == INVARIANT):
                raise GraphError(f"{where}: shape id {entry.shape_id} does not fit a graph of its kind")
            if entry.captured == ABSENT:
                continue
            other = owners.setdefault(entry.captured, entry)
            same = (other.graph is entry.graph, other.graph_id is graph_id, other.shape_id == entry.shape_id)
            if not all(same):
                raise GraphError(f"{where} shares capture {entry.captured} with another graph or shape")
