"""NumPy reference of every op: the golden model for tests, and what runs where oneDNN has no wheel.

Plain and readable comes first. Storage is what the tensors say (float32, int32, bfloat16 or float16), arithmetic is
float64, and each result is rounded once when it is stored. Semantics: spec/framework 3.9, 3.11, 4.1, 4.2, with what
spec 10 lists as wrong done right: a flagged step leaves no trace, rows past the valid count count for nothing,
clipping acts on unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from renaissance.backend.reference import convolution, elementwise, loss, normalisation, pooling, products, update
from renaissance.backend.reference.operands import Op, Operands
from renaissance.backend.registry import Call, CaptureContext, Launcher, OpRegistry, PythonCall, label
from renaissance.graph.computation_graph import Node

OPS: dict[str, Op] = {
    **products.OPS,
    **convolution.OPS,
    **normalisation.OPS,
    **pooling.OPS,
    **elementwise.OPS,
    **loss.OPS,
    **update.OPS,
}


def _launcher(function: Op) -> Launcher:
    def launch(node: Node, ctx: CaptureContext) -> Sequence[Call]:
        op = Operands(node, ctx)
        return [PythonCall(lambda: function(op), label(node))]

    return launch


def register(registry: OpRegistry) -> None:
    """Add every op of this package to ``registry`` as backend "reference"."""
    for name, function in OPS.items():
        registry.register(name, "reference", _launcher(function))
