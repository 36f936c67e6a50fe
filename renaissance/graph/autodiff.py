"""Automatic differentiation ahead of time: walks the forward nodes backwards and applies the op table's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from renaissance.core.errors import MissingKernelError
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.computation_graph import Node
from renaissance.graph.ids import GraphId
from renaissance.graph.ops import op_def

BACKWARD_BUCKET: Mapping[GraphId, GraphId] = {
    GraphId.FIRST_LAYER_FWD_A: GraphId.FIRST_LAYER_BWD_A,
    GraphId.DEEP_FWD_BWD: GraphId.DEEP_FWD_BWD,
}


def differentiate(builder: GraphBuilder, forward: Sequence[Node], loss: int) -> None:
    """Append the backward nodes of ``forward`` (topological order) for the scalar ``loss``.

    Works on any DAG of values. The gradients of a value with several consumers are added up as they come, the last
    consumer first, so the order of the sum follows from the model alone (law 2). A value that depends on no parameter
    gets no gradient. Raises MissingKernelError for an op without a gradient rule.
    """
    for node in reversed(forward):
        is_loss = loss in node.outputs
        dy = None if is_loss else builder.gradients.get(node.outputs[0])
        wanted = any(builder.needs_gradient(i) for i in node.inputs)
        if not wanted or (dy is None and not is_loss):
            continue
        rule = op_def(node.op).gradient
        if rule is None:
            raise MissingKernelError(f"{node.label} has no gradient rule; the model cannot be trained through it")
        builder.graph = BACKWARD_BUCKET[node.graph]
        rule(builder, node, dy)
