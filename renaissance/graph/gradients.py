"""Gradient rules: how the backward nodes of an op are emitted. The op table points here.

A rule gets the forward node and the gradient ``dy`` of its first output (None for a loss, whose gradient is 1), emits
backward nodes through the builder, and hands the gradients of its inputs back with ``add_gradient``. Gradients of
parameters go straight into their G tensors (``parameter_gradient``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from renaissance.core.errors import GraphError
from renaissance.graph.computation_graph import AttrValue, Node


class GradientBuilder(Protocol):
    """What a gradient rule may use."""

    def needs_gradient(self, tensor: int) -> bool:
        """True when ``tensor`` depends on a parameter."""

    def parameter_gradient(self, tensor: int) -> int:
        """The G tensor of a parameter, given its master or half tensor."""

    def scalar(self, name: str) -> int:
        """A step scalar."""

    def emit_into(
        self, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], attrs: Mapping[str, AttrValue] | None = None
    ) -> None:
        """Emit a node that writes existing tensors."""

    def emit_gradient(
        self,
        op: str,
        inputs: tuple[int, ...],
        wrt: int,
        attrs: Mapping[str, AttrValue] | None = None,
        suffix: str = "grad",
    ) -> int:
        """Emit a node with one new output of the type of ``wrt``, named after it; returns the output."""

    def add_gradient(self, tensor: int, gradient: int) -> None:
        """Declare ``gradient`` a gradient of ``tensor``."""


GradientRule = Callable[[GradientBuilder, Node, int | None], None]


def _given(node: Node, dy: int | None) -> int:
    if dy is None:
        raise GraphError(f"{node.label}: gradient rule called without the gradient of its output")
    return dy


def grad_fc(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dw = dyᵀx, db = Σdy, dx = dy·w; through a fused ReLU first. The fusion pass merges the mask back."""
    dz = _given(node, dy)
    x, w, *bias = node.inputs
    if node.attrs["activation"] == "relu":
        dz = b.emit_gradient("RELU_BWD", (dz, node.outputs[0]), wrt=node.outputs[0], suffix="pre_grad")
    b.emit_into("FC_BWD_WEIGHT", (dz, x), tuple(b.parameter_gradient(p) for p in (w, *bias)))
    if b.needs_gradient(x):
        b.add_gradient(x, b.emit_gradient("FC_BWD_DATA", (dz, w), wrt=x, attrs={"mask": "none"}))


def grad_relu(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dx = dy where y > 0."""
    x = node.inputs[0]
    b.add_gradient(x, b.emit_gradient("RELU_BWD", (_given(node, dy), node.outputs[0]), wrt=x))


def grad_flatten(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """The inverse copy."""
    x = node.inputs[0]
    b.add_gradient(x, b.emit_gradient("FLATTEN_BWD", (_given(node, dy),), wrt=x))


def grad_softmax_ce(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """(p − ε/K − (1−ε)[c = y]) · scaling / valid (spec/framework 4.1)."""
    logits, label, smoothing, valid = node.inputs
    probs = node.outputs[0]
    inputs = (probs, label, smoothing, valid, b.scalar("scaling"))
    b.add_gradient(logits, b.emit_gradient("SOFTMAX_CE_BWD", inputs, wrt=logits))
