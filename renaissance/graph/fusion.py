"""Fusion: passes that let one kernel do what several nodes do, so that a value crosses memory fewer times.

Each takes a list of nodes in order and returns one with the same results; none needs another one to have run, but the
order in which ``compiler`` applies them decides how much each finds.

before differentiation   fuse_residuals       BN_FWD, BN_INF or CONV_INF, then ADD_FWD -> the sum and its ReLU inside
inference                fold_batch_norms     CONV_FWD, then BN_INF -> CONV_INF
after differentiation    fuse_gradient_sums   GRAD_SUM, then BN_BWD -> BN_BWD that reads both gradients
                         fuse_relu_backward   FC_BWD_DATA, then ACT_BWD of a ReLU -> the mask inside

A node is fused into another only when nobody else reads what is between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from renaissance.graph.computation_graph import Node

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
