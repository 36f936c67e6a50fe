"""Gradient rules: how the backward nodes of an op are emitted. The op table points here.

A rule gets the forward node and the gradient ``dy`` of its first output (None for a loss, whose gradient is 1), emits
backward nodes through the builder, and hands the gradients of its inputs back with ``add_gradient``. Gradients of
parameters go straight into their G tensors (``parameter_gradient``). The weight gradient of a layer is emitted before
its data gradient, so that the two stand side by side and dy can go as soon as both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from renaissance.core.errors import GraphError
from renaissance.graph.computation_graph import AttrValue, Node
from renaissance.graph.op_types import SAVES_INPUT


class GradientBuilder(Protocol):
    """What a gradient rule may use."""

    def needs_gradient(self, tensor: int) -> bool:
        """True when ``tensor`` depends on a parameter."""

    def parameter_gradient(self, tensor: int) -> int:
        """The G tensor of a parameter, given its master or half tensor."""

    def scalar(self, name: str) -> int:
        """A step scalar."""

    def kernel_size(self, weight: int) -> int:
        """R of a convolution weight [K,R,S,C]."""

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

    def emit_gradients(
        self,
        op: str,
        inputs: tuple[int, ...],
        wrt: tuple[int, ...],
        existing: tuple[int, ...],
        attrs: Mapping[str, AttrValue],
    ) -> tuple[int, ...]:
        """Emit a node that gives a new gradient of each tensor in ``wrt`` (the first, and those after the outputs
        ``existing``); returns the new ones."""

    def add_gradient(self, tensor: int, gradient: int) -> None:
        """Declare ``gradient`` a gradient of ``tensor``; several are summed. One tensor may be that of several."""


GradientRule = Callable[[GradientBuilder, Node, int | None], None]


def _given(node: Node, dy: int | None) -> int:
    if dy is None:
        raise GraphError(f"{node.label}: gradient rule called without the gradient of its output")
    return dy


def _before_activation(b: GradientBuilder, node: Node, dy: int | None) -> int:
    """The gradient before the activation that is part of the node."""
    dz, y = _given(node, dy), node.outputs[0]
    kind = node.attrs["activation"]
    return dz if kind == "none" else b.emit_gradient("ACT_BWD", (dz, y), y, {"kind": kind}, suffix="pre_grad")


def _one_input(op: str, *attrs: str, saved: int = 0) -> GradientRule:
    """The rule of an op with one data input: ``op`` reads dy, the forward outputs 1 to ``saved`` and the other inputs
    of the forward node; its attributes are those named."""

    def rule(b: GradientBuilder, node: Node, dy: int | None) -> None:
        x, *others = node.inputs
        inputs = (_given(node, dy), *node.outputs[1 : 1 + saved], *others)
        if b.needs_gradient(x):
            b.add_gradient(x, b.emit_gradient(op, inputs, wrt=x, attrs={a: node.attrs[a] for a in attrs}))

    return rule


def grad_fc(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dw = dyᵀx, db = Σdy, dx = dy·w; through a fused ReLU first. The fusion pass merges the mask back."""
    dz = _before_activation(b, node, dy)
    x, w, *bias = node.inputs
    b.emit_into("FC_BWD_WEIGHT", (dz, x), tuple(b.parameter_gradient(p) for p in (w, *bias)))
    if b.needs_gradient(x):
        b.add_gradient(x, b.emit_gradient("FC_BWD_DATA", (dz, w), wrt=x, attrs={"mask": "none"}))


def grad_conv(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dw and db, and dx where somebody wants it; through a fused ReLU first."""
    dz = _before_activation(b, node, dy)
    x, w, *bias = node.inputs
    attrs = {a: node.attrs[a] for a in ("stride", "pad", "groups")}
    gradients = tuple(b.parameter_gradient(p) for p in (w, *bias))
    b.emit_into("CONV_BWD_WEIGHT", (dz, x), gradients, {"kernel": b.kernel_size(w), **attrs})
    if b.needs_gradient(x):
        b.add_gradient(x, b.emit_gradient("CONV_BWD_DATA", (dz, w), wrt=x, attrs=attrs))


def grad_bn(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dγ, dβ, dx, and the masked gradient for a residual; without an activation the residual's gradient is dy."""
    dz, activation = _given(node, dy), node.attrs["activation"]
    x, gamma, beta, _, _, valid, *residual = node.inputs
    y, mean, inv_std = node.outputs[:3]
    inputs = (dz, x, gamma, mean, inv_std, valid, *([y] if activation != "none" else []))
    wanted = [r for r in residual if b.needs_gradient(r)]
    masked = wanted if activation != "none" else []
    existing = (b.parameter_gradient(gamma), b.parameter_gradient(beta))
    attrs = {"activation": activation, "dys": 1, "residual": bool(masked)}
    dx, *dresidual = b.emit_gradients("BN_BWD", inputs, (x, *masked), existing, attrs)
    if b.needs_gradient(x):
        b.add_gradient(x, dx)
    for tensor in wanted:
        b.add_gradient(tensor, dresidual[0] if dresidual else dz)


def grad_act(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """dy times the derivative of the activation."""
    x, kind = node.inputs[0], node.attrs["kind"]
    saved = x if kind in SAVES_INPUT else node.outputs[0]
    if b.needs_gradient(x):
        b.add_gradient(x, b.emit_gradient("ACT_BWD", (_given(node, dy), saved), wrt=x, attrs={"kind": kind}))


def grad_add(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """Both terms have the same gradient, one tensor."""
    dz = _before_activation(b, node, dy)
    for term in node.inputs:
        if b.needs_gradient(term):
            b.add_gradient(term, dz)


grad_flatten = _one_input("FLATTEN_BWD")
grad_channel_padding = _one_input("CHANNEL_PADDING_BWD")
grad_gap = _one_input("GAP_BWD")
grad_maxpool = _one_input("MAXPOOL_BWD", "kernel", "stride", "pad", saved=1)
grad_avgpool = _one_input("AVGPOOL_BWD", "kernel", "stride", "pad", "count_include_pad")
grad_dropout = _one_input("DROPOUT_BWD", "p", "layer")


def grad_softmax_ce(b: GradientBuilder, node: Node, dy: int | None) -> None:
    """(p − ε/K − (1−ε)[c = y]) · scaling / valid (spec/framework 4.1)."""
    logits, label, smoothing, valid = node.inputs
    probs = node.outputs[0]
    inputs = (probs, label, smoothing, valid, b.scalar("scaling"))
    b.add_gradient(logits, b.emit_gradient("SOFTMAX_CE_BWD", inputs, wrt=logits))
