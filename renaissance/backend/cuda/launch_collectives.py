"""Launcher of the one collective: the mean of a span over the ranks (NCCL).

All collectives of a program are on the node's stream, UPDATE, in the order of the program, which is the same on every
rank: that is what keeps the ranks' calls in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from renaissance.backend.cuda.calls import CudaCall, CudaContext, LibraryCall
from renaissance.backend.registry import OpRegistry, label
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError
from renaissance.graph.computation_graph import Node


def launch_mean(node: Node, ctx: CudaContext) -> Sequence[CudaCall]:
    """RANGE_MEAN_ALLREDUCE: ``spans_out[0]``, all float32, becomes its mean over the ranks in place.

    An empty span needs no call; it is empty on every rank. Raises DTypeError for a span that is not float32 and
    DeviceError when there is one rank.
    """
    (span,) = node.spans_out
    others = [r.name for r in span.regions if r.dtype(ctx.half) is not DType.FP32]
    if others:
        raise DTypeError(
            f"{label(node)}: region {others[0]} of the span is not float32; a mean over ranks is of float32"
        )
    values = ctx.span(span)
    if not values.nbytes:
        return []
    return [LibraryCall(partial(ctx.collectives.mean, values=values), label(node))]


def register(registry: OpRegistry) -> None:
    """Add the launcher of this module to ``registry``."""
    registry.register("RANGE_MEAN_ALLREDUCE", "cuda", launch_mean)
