"""Stable text and DOT of a compiled model, for reading, diffing and golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from renaissance.core.enums import CompileInfo
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import data_predecessors
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.graph.model import CompiledModel


def graph_text(graph: ComputationGraph, plan: MemoryPlan) -> str:
    """One block per graph id in launch order, one row per node: op, attributes, reads -> writes, control edges."""
    lines = [f"ComputationGraph {graph.name}: {len(graph.nodes)} nodes in {len(graph.graph_ids)} graphs"]
    last = None
    for node in graph.nodes:
        if node.graph is not last:
            lines.append(f"  {node.graph.name} ({node.graph.stream.name})")
            last = node.graph
        lines.append("    " + _row(node, plan))
    return "\n".join(lines) + "\n"


def _row(node: Node, plan: MemoryPlan) -> str:
    def listed(tensors: tuple[int, ...], spans: tuple[object, ...]) -> str:
        return ", ".join([*(plan.tensor(i).name for i in tensors), *(f"[{s}]" for s in spans)])

    attrs = "".join(f" {k}={v}" for k, v in node.attrs.items())
    after = f" after {' '.join(f'#{i}' for i in node.after)}" if node.after else ""
    reads, writes = listed(node.inputs, node.spans_in), listed(node.outputs, node.spans_out)
    return f"#{node.index:<3} {node.op}{attrs}: {reads + ' ' if reads else ''}-> {writes}{after}"


def graph_dot(graph: ComputationGraph, plan: MemoryPlan) -> str:
    """Graphviz source: a cluster per graph id, data edges solid, control edges dashed."""
    lines = [f'digraph "{graph.name}" {{', "  rankdir=TB;", '  node [shape=box, fontname="Helvetica"];']
    for graph_id in graph.graph_ids:
        lines.append(f'  subgraph "cluster_{graph_id.name}" {{ label="{graph_id.name}";')
        lines += [f'    n{n.index} [label="#{n.index} {n.op}"];' for n in graph.bucket(graph_id)]
        lines.append("  }")
    lines += [f"  n{a} -> n{b};" for a, b in data_edges(graph, plan)]
    lines += [f"  n{a} -> n{n.index} [style=dashed];" for n in graph.nodes for a in n.after]
    return "\n".join([*lines, "}"]) + "\n"


def data_edges(graph: ComputationGraph, plan: MemoryPlan) -> list[tuple[int, int]]:
    """(defining node, reading node) over all programs, sorted."""
    regions = tuple(t.region for t in plan.tensors)
    found = set()
    for ids in graph.programs:
        for reader, before in data_predecessors(graph.program(ids), regions).items():
            found |= {(b, reader) for b in before}
    return sorted(found)


def model_text(model: CompiledModel, info: CompileInfo = CompileInfo.ALL) -> str:
    """The parts of a compiled model that ``info`` asks for, separated by blank lines; the atlas with both graphs."""
    return "\n".join(_parts(model, info))


def _parts(model: CompiledModel, info: CompileInfo) -> Iterator[str]:
    plan = model.plans[0]
    if CompileInfo.ARCH_PLAN in info:
        yield model.arch_plan.text()
    if CompileInfo.MEMORY_PLAN in info:
        yield plan.dump_layout()
    if CompileInfo.TRAIN_GRAPH in info:
        yield graph_text(model.training, plan)
    if CompileInfo.INFER_GRAPH in info:
        yield graph_text(model.inference, plan)
    if CompileInfo.TRAIN_GRAPH | CompileInfo.INFER_GRAPH in info:
        yield model.atlas.text()
