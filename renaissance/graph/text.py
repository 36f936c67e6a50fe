"""Stable text of a compiled model, for reading, diffing and golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from renaissance.core.enums import CompileInfo
from renaissance.graph.computation_graph import ComputationGraph, Node
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
