"""Fusion: passes that let one kernel do what several nodes do, so that a value crosses memory fewer times.

Each takes a list of nodes in order and returns one with the same results; none needs another one to have run, but the
order in which ``compiler`` applies them decides how much each finds.

before differentiation   fuse_residuals       BN_FWD, BN_INF or CONV_INF, then ADD_FWD -> the sum and its ReLU inside
inference                fold_batch_norms     CONV_FWD, then BN_INF -> CONV_INF
after differentiation    mask_before_pools    MAXPOOL_BWD, then the mask of an activation -> the mask first
                         fuse_gradient_sums   GRAD_SUM, then BN_BWD -> BN_BWD that reads both gradients
                         fuse_relu_backward   FC_BWD_DATA, then ACT_BWD of a ReLU -> the mask inside

A node is fused into another only when nobody else reads what is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from renaissance.core.enums import StreamKind
from renaissance.graph.computation_graph import Node
from renaissance.graph.op_types import SAVES_INPUT

Declare = Callable[[int], int]
"""Declares a new gradient of a value; returns its tensor."""

RESIDUAL_INPUTS = {"BN_FWD": 6, "BN_INF": 3, "CONV_INF": 4}
"""Inputs of the ops that can add a residual, without it and without a bias."""


class _Uses:
    """Who defines and who reads each tensor, as positions in a list of nodes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.definition: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for at, node in enumerate(nodes):
            for tensor in node.outputs:
                self.definition.setdefault(tensor, at)
            for tensor in node.inputs:
                self.readers.setdefault(tensor, []).append(at)

    def only_reader(self, tensor: int) -> int | None:
        """Position of the node that alone reads ``tensor``, and reads it once."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 else None

    def private_source(self, tensor: int, reader: int) -> int | None:
        """Position of the node in the same graph whose first output ``tensor`` is, when only ``reader`` reads it."""
        at = self.definition.get(tensor)
        if at is None or self.only_reader(tensor) != reader:
            return None
        node = self.nodes[at]
        same_graph = node.graph is self.nodes[reader].graph
        return at if node.outputs[0] == tensor and same_graph else None


def _apply(nodes: Sequence[Node], replaced: dict[int, Node], dropped: set[int]) -> list[Node]:
    return [replaced.get(at, node) for at, node in enumerate(nodes) if at not in dropped]


def fuse_residuals(nodes: Sequence[Node]) -> list[Node]:
    """Let a batch norm or folded convolution without an activation add the other term of its ADD_FWD.

    Where both terms could, the one that is computed last does. The fused node stands where the sum stood.
    """
    uses = _Uses(nodes)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for at, add in enumerate(nodes):
        if add.op != "ADD_FWD":
            continue
        terms = [(uses.private_source(term, at), term) for term in add.inputs]
        sources = [(source, term) for source, term in terms if source is not None and _takes_residual(nodes[source])]
        if sources:
            source, term = max(sources)
            other = add.inputs[1] if term == add.inputs[0] else add.inputs[0]
            replaced[at] = _with_residual(nodes[source], other, add)
            dropped.add(source)
    return _apply(nodes, replaced, dropped)


def _takes_residual(node: Node) -> bool:
    if node.op not in RESIDUAL_INPUTS or node.attrs["activation"] != "none":
        return False
    bias = 1 if node.attrs.get("bias") else 0
    return len(node.inputs) == RESIDUAL_INPUTS[node.op] + bias


def _with_residual(node: Node, residual: int, add: Node) -> Node:
    attrs = {**node.attrs, "activation": add.attrs["activation"]}
    if node.op == "CONV_INF":
        attrs["residual"] = True
    outputs = (add.outputs[0], *node.outputs[1:])
    return replace(node, inputs=(*node.inputs, residual), outputs=outputs, attrs=attrs)


def fold_batch_norms(nodes: Sequence[Node]) -> list[Node]:
    """CONV_FWD without an activation whose only reader is a BN_INF -> CONV_INF in its place."""
    uses = _Uses(nodes)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for at, bn in enumerate(nodes):
        source = uses.private_source(bn.inputs[0], at) if bn.op == "BN_INF" else None
        if source is None or nodes[source].op != "CONV_FWD" or nodes[source].attrs["activation"] != "none":
            continue
        conv = nodes[source]
        x, w, *bias = conv.inputs
        _, scale, shift, *residual = bn.inputs
        attrs = {**conv.attrs, "activation": bn.attrs["activation"], "bias": bool(bias), "residual": bool(residual)}
        inputs = (x, w, scale, shift, *bias, *residual)
        replaced[at] = replace(conv, op="CONV_INF", inputs=inputs, outputs=bn.outputs, attrs=attrs)
        dropped.add(source)
    return _apply(nodes, replaced, dropped)


def mask_before_pools(nodes: Sequence[Node], declare: Declare) -> list[Node]:
    """Let gradients be masked before a max pool's backward pass instead of after it, on the smaller side.

    A gradient reaches only the winner of its window, whose value is the pool's output, and the derivative of these
    activations follows from that value: masking by the pool's output is the same. A ReLU after a convolution then costs
    a pass over the pooled image only, a batch norm need not read its output again, and nobody needs that output after
    the forward pass.
    """
    uses = _Uses(nodes)
    result: list[Node] = []
    masked: dict[int, Node | None] = {}
    for at, pool in enumerate(nodes):
        if at in masked:
            result += [node for node in (masked[at],) if node is not None]
            continue
        reader = uses.only_reader(pool.outputs[0]) if pool.op == "MAXPOOL_BWD" else None
        source = uses.definition.get(pool.inputs[1]) if reader is not None else None
        if reader is None or source is None or int(pool.attrs["stride"]) < 2:
            result.append(pool)
            continue
        after, forward = nodes[reader], nodes[source]
        kind = _mask_of(after, gradient=pool.outputs[0], output=forward.inputs[0])
        if kind is None:
            result.append(pool)
            continue
        dy, y = pool.inputs[0], forward.outputs[0]
        closed = declare(y)
        mask = replace(
            pool, op="ACT_BWD", inputs=(dy, y), outputs=(closed,), attrs={"kind": kind}, stream=StreamKind.COMP_3
        )
        is_act = after.op == "ACT_BWD"
        outputs = after.outputs if is_act else pool.outputs
        result += [mask, replace(pool, inputs=(closed, pool.inputs[1]), outputs=outputs)]
        masked[reader] = None if is_act else _without_activation(after)
    return result


def _mask_of(node: Node, gradient: int, output: int) -> str | None:
    """The activation that ``node`` masks ``gradient`` with by its ``output``; None when it does something else."""
    if node.op == "ACT_BWD" and node.inputs == (gradient, output) and node.attrs["kind"] not in SAVES_INPUT:
        return str(node.attrs["kind"])
    is_norm = node.op == "BN_BWD" and node.attrs["activation"] != "none" and node.attrs["dys"] == 1
    if is_norm and (node.inputs[0], node.inputs[6]) == (gradient, output):
        return str(node.attrs["activation"])
    return None


def _without_activation(bn: Node) -> Node:
    return replace(bn, inputs=bn.inputs[:6], attrs={**bn.attrs, "activation": "none"})


def fuse_gradient_sums(nodes: Sequence[Node]) -> list[Node]:
    """GRAD_SUM that only a BN_BWD reads, as its dy -> BN_BWD with ``dys`` 2, which adds while it reads."""
    uses = _Uses(nodes)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for at, bn in enumerate(nodes):
        source = uses.private_source(bn.inputs[0], at) if bn.op == "BN_BWD" and bn.attrs["dys"] == 1 else None
        if source is not None and nodes[source].op == "GRAD_SUM":
            first, second = nodes[source].inputs
            replaced[at] = replace(bn, inputs=(first, *bn.inputs[1:], second), attrs={**bn.attrs, "dys": 2})
            dropped.add(source)
    return _apply(nodes, replaced, dropped)


def fuse_relu_backward(nodes: Sequence[Node]) -> list[Node]:
    """Let FC_BWD_DATA zero its result where the ReLU was closed, instead of an ACT_BWD that reads it again."""
    uses = _Uses(nodes)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for at, node in enumerate(nodes):
        reader = (
            uses.only_reader(node.outputs[0]) if node.op == "FC_BWD_DATA" and node.attrs["mask"] == "none" else None
        )
        if reader is None:
            continue
        act = nodes[reader]
        if act.op == "ACT_BWD" and act.attrs["kind"] == "relu" and act.inputs[0] == node.outputs[0]:
            inputs = (*node.inputs, act.inputs[1])
            replaced[at] = replace(node, inputs=inputs, outputs=act.outputs, attrs={"mask": "relu"})
            dropped.add(reader)
    return _apply(nodes, replaced, dropped)
