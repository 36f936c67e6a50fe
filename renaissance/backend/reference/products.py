"""Fully connected layers: x is read as [N, H*W*C], w as [out, in]."""

from __future__ import annotations

import numpy as np

from renaissance.backend.reference.operands import Op, Operands


def fc_fwd(op: Operands) -> None:
    """y = act(x . w^T + b); the bias may be absent."""
    x, w, *bias = op.node.inputs
    y = op.rows(x) @ op.rows(w).T
    if bias:
        y += op.read(bias[0]).reshape(-1)
    if op.node.attrs.get("activation", "none") == "relu":
        y = np.where(y <= 0, 0.0, y)
    op.write(op.node.outputs[0], y)


def fc_bwd_weight(op: Operands) -> None:
    """dw = dy^T . x and (with a bias) db = sum of dy over the rows, both overwritten."""
    dy, x = (op.rows(i) for i in op.node.inputs)
    op.write(op.node.outputs[0], dy.T @ x)
    if len(op.node.outputs) > 1:
        op.write(op.node.outputs[1], dy.sum(axis=0))


def fc_bwd_data(op: Operands) -> None:
    """dx = dy . w, zeroed where the layer below was cut off by its ReLU."""
    dx = op.rows(op.node.inputs[0]) @ op.rows(op.node.inputs[1])
    if op.node.attrs.get("mask", "none") == "relu":
        dx = np.where(op.rows(op.node.inputs[2]) <= 0, 0.0, dx)
    op.write(op.node.outputs[0], dx)


OPS: dict[str, Op] = {"FC_FWD": fc_fwd, "FC_BWD_WEIGHT": fc_bwd_weight, "FC_BWD_DATA": fc_bwd_data}
