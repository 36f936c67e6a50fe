"""Hand-made nodes for the tests of passes (no tests here)."""

from collections.abc import Sequence

from renaissance.core.enums import StreamKind
from renaissance.core.region import Region, Span
from renaissance.graph import GraphId, Node
from renaissance.graph.ops import op_def


def node(
    index: int,
    op: str,
    inputs: Sequence[int] = (),
    outputs: Sequence[int] = (),
    *,
    graph: GraphId = GraphId.DEEP_FWD_BWD,
    spans_in: Sequence[Span] = (),
    spans_out: Sequence[Span] = (),
    **attrs: str | bool | float,
) -> Node:
    """A node with its arguments in this order, for readable lists of nodes."""
    stream = op_def(op).stream or StreamKind.COMP_1
    return Node(index, op, attrs, tuple(inputs), tuple(outputs), tuple(spans_in), tuple(spans_out), graph, stream)


def one(region: Region) -> Span:
    """A region as a span."""
    return Span(region, region)
