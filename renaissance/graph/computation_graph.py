"""ComputationGraph: ops as nodes, dependences as edges, grouped by GraphId.

Two kinds of edges exist. A *data edge* leads from the one node that defines a value to every node that reads it; it
follows from tensor ids and region spans and is not stored. A *control edge* (``Node.after``) orders accesses to
storage that is written more than once: weights, moments, step scalars, and gradient slots that share memory.
A graph holds no shapes and no addresses: these are the MemoryPlan's, so one graph serves all variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from renaissance.core.enums import StreamKind
from renaissance.core.region import Span
from renaissance.graph.ids import GraphId, programs

AttrValue = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Node:
    """One op. ``index`` is its position in the whole graph; ``after`` holds the indices of nodes it must follow."""

    index: int
    op: str
    attrs: Mapping[str, AttrValue]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spans_in: tuple[Span, ...]
    spans_out: tuple[Span, ...]
    graph: GraphId
    stream: StreamKind
    after: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """How errors and dumps name the node, e.g. ``FC_FWD #3 (DEEP_FWD_BWD)``."""
        return f"{self.op} #{self.index} ({self.graph.name})"


@dataclass(frozen=True, slots=True)
class ComputationGraph:
    """The nodes of one mode ("train" or "infer"); ``nodes[i].index == i``, order within a GraphId is index order."""

    name: str
    nodes: tuple[Node, ...]
    freezes: bool = False
    """True when programs without the backward pass of the first layer are launched, too."""

    @property
    def programs(self) -> tuple[tuple[GraphId, ...], ...]:
        """Every launch sequence of the graph."""
        return programs(self.name, self.freezes)

    def bucket(self, graph: GraphId) -> tuple[Node, ...]:
        """The nodes of one GraphId in order; empty when the graph is absent."""
        return tuple(n for n in self.nodes if n.graph is graph)

    def program(self, graphs: Iterable[GraphId]) -> tuple[Node, ...]:
        """The nodes that a launch of ``graphs`` executes, in order."""
        return tuple(n for g in graphs for n in self.bucket(g))

    @property
    def graph_ids(self) -> tuple[GraphId, ...]:
        """The GraphIds that have nodes, ascending."""
        return tuple(sorted({n.graph for n in self.nodes}))

    @property
    def ops(self) -> frozenset[str]:
        """Names of the ops used."""
        return frozenset(n.op for n in self.nodes)
