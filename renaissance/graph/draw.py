"""Drawings of an ArchPlan and of a ComputationGraph: Graphviz source, and SVG that needs no other program.

The SVG of a graph shows one step on input slot A: the forward pass downwards on the left; the backward pass upwards
beside it, every node in the row of the one that it differentiates; the rest as lists. Graphs that differ in nothing but
the input slot are drawn once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from renaissance.graph.arch_layers import MARKERS, ArchLayer, LayerKind
from renaissance.graph.arch_plan import ArchPlan
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import data_predecessors
from renaissance.graph.ids import GraphId
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.graph.picture import Band, Box, Edge, EdgeStyle, Panel, Picture, lanes, ranks
from renaissance.graph.svg import svg

FORWARD, BACKWARD = 0, 1
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "convolution": ("CONV", "CBR"),
    "normalisation": ("BN",),
    "pooling": ("MAXPOOL", "AVGPOOL", "GAP"),
    "fully connected": ("FC",),
    "sum": ("ADD", "GRAD_SUM", "MEAN"),
    "loss": ("SOFTMAX",),
    "activation": ("ACT_", "RELU", "TANH", "SILU", "LEAKY", "HARDSWISH", "ELU", "SIGMOID"),
}
"""First letters of the ops and layer kinds of each family; first match."""
GRADIENT_SUFFIXES = frozenset({"grad", "grad2", "pre_grad", "half"})


def graph_dot(graph: ComputationGraph, plan: MemoryPlan) -> str:
    """Graphviz source: a cluster per graph id, data edges solid, control edges dashed."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB;", '  node [shape=box, fontname="Helvetica"];']
    for graph_id in graph.graph_ids:
        lines.append(f'  subgraph "cluster_{graph_id.name}" {{ label="{graph_id.name}";')
        lines += [f"    n{n.index} [label={_quoted(f'#{n.index} {n.op}')}];" for n in graph.bucket(graph_id)]
        lines.append("  }")
    lines += [f"  n{a} -> n{b};" for a, b in data_edges(graph, plan)]
    lines += [f"  n{a} -> n{n.index} [style=dashed];" for n in graph.nodes for a in n.after]
    return "\n".join([*lines, "}"]) + "\n"


def plan_dot(plan: ArchPlan) -> str:
    """Graphviz source of the layers; the markers of residual sums become edges."""
    lines = ['digraph "ArchPlan" {', "  rankdir=TB;", '  node [shape=box, fontname="Helvetica"];']
    layers = _drawn(plan)
    lines += [f"  l{i} [label={_quoted(f'{x.name} {x.kind.name}')}];" for i, x in layers.items()]
    lines += [f"  l{a} -> l{b};" for a, b in layer_edges(plan)]
    return "\n".join([*lines, "}"]) + "\n"


def graph_svg(graph: ComputationGraph, plan: MemoryPlan, title: str = "") -> str:
    """The picture of one step as SVG."""
    return svg(graph_picture(graph, plan, title))


def plan_svg(plan: ArchPlan, title: str = "") -> str:
    """The picture of the layers as SVG."""
    return svg(plan_picture(plan, title))


def data_edges(graph: ComputationGraph, plan: MemoryPlan) -> list[tuple[int, int]]:
    """(defining node, reading node) over all programs, sorted."""
    regions = tuple(t.region for t in plan.tensors)
    found = set()
    for ids in graph.programs:
        for reader, before in data_predecessors(graph.program(ids), regions).items():
            found |= {(b, reader) for b in before}
    return sorted(found)


def layer_edges(plan: ArchPlan) -> list[tuple[int, int]]:
    """(index of a layer, index of a layer that reads its result), in order; markers but the end of a sum left out.

    The value that a sum's branches read is an edge to each; an identity shortcut leads straight to the sum.
    """
    edges: list[tuple[int, int]] = []
    last: int | None = None
    opened: list[tuple[int | None, int | None]] = []  # what the branches read, and the end of the shortcut
    drawn = _drawn(plan)
    for i, layer in enumerate(plan.layers):
        if layer.kind is LayerKind.ADD2_START:
            opened.append((last, None))
        elif layer.kind is LayerKind.ADD2_SHORTCUT_END:
            source, _ = opened.pop()
            opened.append((source, last))
            last = source
        elif i in drawn:
            shortcut = opened.pop()[1] if layer.kind is LayerKind.ADD2_END else None
            edges += [(source, i) for source in (shortcut, last) if source is not None]
            last = i
    return edges


def _drawn(plan: ArchPlan) -> dict[int, ArchLayer]:
    hidden = (MARKERS - {LayerKind.ADD2_END}) | {LayerKind.IDENTITY}
    return {i: layer for i, layer in enumerate(plan.layers) if layer.kind not in hidden or layer.first}


def plan_picture(plan: ArchPlan, title: str = "") -> Picture:
    """The layers in one column, the shortcuts beside it."""
    drawn, edges = _drawn(plan), layer_edges(plan)
    row = ranks(drawn, edges)
    lane = lanes(list(drawn), row, edges)
    boxes = tuple(
        Box(
            key=i,
            title=f"{layer.name} {layer.kind.name}",
            detail=_layer_detail(layer),
            family=family(layer.kind.name),
            column=FORWARD,
            row=row[i],
            lane=lane[i],
            hint=_layer_hint(layer),
        )
        for i, layer in drawn.items()
    )
    return Picture(title or "ArchPlan", ("layers",), boxes, tuple(Edge(a, b) for a, b in edges))


def _layer_hint(layer: ArchLayer) -> str:
    attrs = "".join(f" {k}={v}" for k, v in layer.attrs.items())
    return f"{layer.name} {layer.kind.name}{attrs}\n{layer.input} -> {layer.output}"


def _layer_detail(layer: ArchLayer) -> str:
    attrs = layer.attrs
    words = [str(layer.output)]
    if "kernel" in attrs:
        words.append(f"k{attrs['kernel']} s{attrs['stride']}")
    if attrs.get("groups", 1) != 1:
        words.append(f"g{attrs['groups']}")
    if attrs.get("activation", "none") != "none":
        words.append(str(attrs["activation"]))
    return " ".join(words)


def graph_picture(graph: ComputationGraph, plan: MemoryPlan, title: str = "") -> Picture:
    """One step on slot A of a compiled graph ("train" or "infer")."""
    program = graph.program(graph.programs[0])
    nodes = {n.index: n for n in program if n.graph.stream.name.startswith("COMP") and n.op != "LABEL_COPY"}
    nodes = {i: n for i, n in nodes.items() if not n.graph.shape_invariant}
    loss = next((i for i, n in nodes.items() if n.op.startswith("SOFTMAX_CE") and not n.op.endswith("BWD")), None)
    order = list(nodes)
    split = order.index(loss) + 1 if loss is not None else len(order)
    forward, backward = order[:split], order[split:]
    regions = tuple(t.region for t in plan.tensors)
    found = data_predecessors(program, regions)
    edges = [(a, b) for b in order for a in sorted(found[b]) if a in nodes]

    row = _rows(nodes, forward, backward, edges, plan)
    lane = {**lanes(forward, row, edges), **lanes(backward, row, edges)}
    boxes = tuple(
        Box(
            key=i,
            title=f"{node.op} #{i}",
            detail=_node_detail(node, plan),
            family=family(node.op),
            column=FORWARD if i in set(forward) else BACKWARD,
            row=row[i],
            lane=lane[i],
            hint=_node_hint(node, plan),
        )
        for i, node in nodes.items()
    )
    passes = (set(forward), set(backward))
    drawn = tuple(
        Edge(a, b, EdgeStyle.SAVED if a in passes[0] and b in passes[1] else EdgeStyle.DATA) for a, b in edges
    )
    columns = ("forward", "backward") if backward else ("forward",)
    bands, panels = tuple(_graph_bands(boxes, nodes)), _side_lists(graph, plan, nodes)
    return Picture(title or graph.name, columns, boxes, drawn, bands, panels)


def _rows(
    nodes: Mapping[int, Node],
    forward: Sequence[int],
    backward: Sequence[int],
    edges: Sequence[tuple[int, int]],
    plan: MemoryPlan,
) -> Mapping[int, int]:
    """Forward nodes by the longest way to them, backward nodes beside their counterparts.

    What comes before a counterpart's own gradients (sums of gradients of its value, the mask of an activation that it
    computes) stands below them, in rows of its own, the later ones higher.
    """
    place = {i: (rank, 0) for i, rank in ranks(forward, edges).items()}
    before: dict[int, list[int]] = {}
    for i in backward:
        counterpart = _counterpart(nodes[i], [nodes[f] for f in forward], plan)
        place[i] = place[counterpart]
        if nodes[counterpart].op != _forward_op(nodes[i]):
            before.setdefault(counterpart, []).append(i)
    for counterpart, below in before.items():
        place |= {i: (place[counterpart][0], len(below) - n) for n, i in enumerate(below)}
    dense = {key: row for row, key in enumerate(sorted(set(place.values())))}
    return {i: dense[key] for i, key in place.items()}


def _graph_bands(boxes: Sequence[Box], nodes: Mapping[int, Node]) -> Iterable[Band]:
    """A band for every run of rows of a column with nodes of one graph alone; shared rows belong to the later graph."""
    for column in (FORWARD, BACKWARD):
        rows: dict[GraphId, list[int]] = {}
        for box in boxes:
            if box.column == column:
                rows.setdefault(nodes[box.key].graph, []).append(box.row)
        for graph_id, taken in rows.items():
            yield Band(graph_id.name, column, min(taken), max(taken))


LIKE: Mapping[GraphId, str] = {
    GraphId.FIRST_LAYER_FWD_B: "as FIRST_LAYER_FWD_A, on slot B",
    GraphId.FIRST_LAYER_BWD_B: "as FIRST_LAYER_BWD_A, on slot B",
    GraphId.INF_MAIN_B: "as INF_MAIN_A, on slot B",
    GraphId.INF_EMA_A: "as INF_MAIN_A, with the averaged weights",
    GraphId.INF_EMA_B: "as INF_MAIN_A, on slot B, with the averaged weights",
}
"""Graphs that differ from one of the step in their input slot or weights only."""


def _side_lists(graph: ComputationGraph, plan: MemoryPlan, drawn: Mapping[int, Node]) -> tuple[Panel, ...]:
    """Everything that is not drawn, by graph: first what the step launches, in order, then the rest."""
    step = graph.programs[0]
    panels = []
    for graph_id in (*step, *(g for g in graph.graph_ids if g not in step)):
        lines = tuple(_panel_line(n, plan) for n in graph.bucket(graph_id) if n.index not in drawn)
        if lines:
            lines = (LIKE[graph_id],) if graph_id in LIKE else lines
            panels.append(Panel(graph_id.name if graph_id in step else f"{graph_id.name} (not in this step)", lines))
    return tuple(panels)


def _panel_line(node: Node, plan: MemoryPlan) -> str:
    attrs = "".join(f" {k}={v}" for k, v in node.attrs.items())
    written = ", ".join([*(plan.tensor(t).name for t in node.outputs), *(f"[{s}]" for s in node.spans_out)])
    return f"#{node.index} {node.op}{attrs} -> {written}"


def _counterpart(node: Node, forward: Sequence[Node], plan: MemoryPlan) -> int:
    """The forward node that a backward node belongs to: of its op's family, with the most tensors in common.

    A node without such a family, such as a sum of gradients, belongs to the one that gives the value.
    """
    mine = {_base(plan.tensor(t).name) for t in (*node.inputs, *node.outputs)}
    results = {_base(plan.tensor(t).name) for t in node.outputs}

    def shared(other: Node) -> tuple[bool, int, int]:
        names = {_base(plan.tensor(t).name) for t in (*other.inputs, *other.outputs)}
        gives = {_base(plan.tensor(t).name) for t in other.outputs}
        return other.op == _forward_op(node), len(results & gives) if "_BWD" not in node.op else 0, len(mine & names)

    return max(forward, key=shared).index


def _forward_op(node: Node) -> str:
    return node.op.split("_BWD")[0] + "_FWD"


def _base(name: str) -> str:
    """The name of a value or parameter without what says that it is its gradient or its half copy."""
    stem, _, suffix = name.rpartition(".")
    return stem if suffix in GRADIENT_SUFFIXES else name


def _node_detail(node: Node, plan: MemoryPlan) -> str:
    if not node.outputs:
        return ""
    tensor = plan.tensor(node.outputs[0])
    return f"{tensor.name} {tensor.shape}"


def _node_hint(node: Node, plan: MemoryPlan) -> str:
    def listed(tensors: Iterable[int]) -> str:
        return ", ".join(f"{t.name} {t.shape} {t.dtype.name}" for t in map(plan.tensor, tensors))

    attrs = "".join(f" {k}={v}" for k, v in node.attrs.items())
    return f"{node.label}{attrs}\nreads {listed(node.inputs)}\nwrites {listed(node.outputs)}"


def family(op: str) -> str:
    """Which family of ops or layers a name belongs to."""
    return next((name for name, starts in FAMILIES.items() if op.startswith(starts)), "other")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
