"""Batch normalisation over [N,H,W] per channel; rows past ``batch_valid`` count for nothing.

Those rows come out as zeros: scaled like the others they could grow without bound from layer to layer (their spread is
not part of the variance), and an Inf there would meet a zero gradient in the next weight gradient and give NaN.
"""

from __future__ import annotations

import numpy as np

from renaissance.backend.reference.operands import Op, Operands, activate, passed


def bn_fwd(op: Operands) -> None:
    """y = act(gamma (x - mean) inv_std + beta (+ residual)), with biased variance; running = (1-m) prev + m statistic,
    where the variance is unbiased. Without a valid row the running statistics stay as they are."""
    x_id, gamma, beta, prev_mean, prev_var, valid_id, *residual = op.node.inputs
    y_id, saved_mean, saved_inv_std, next_mean, next_var = op.node.outputs
    x, valid = op.read(x_id), int(op.number(valid_id))
    seen = x[:valid]
    count = seen.size // x.shape[3]
    old_mean, old_var = op.read(prev_mean), op.read(prev_var)
    mean, var = (seen.mean(axis=(0, 1, 2)), seen.var(axis=(0, 1, 2))) if count else (old_mean, old_var)
    inv_std = 1 / np.sqrt(var + op.attr("eps", 1e-5))
    y = np.zeros_like(x)
    y[:valid] = (seen - mean) * inv_std * op.read(gamma) + op.read(beta)
    if residual:
        y[:valid] += op.read(residual[0])[:valid]
    op.write(y_id, activate(y, str(op.node.attrs["activation"])))
    op.write(saved_mean, mean)
    op.write(saved_inv_std, inv_std)
    m = op.attr("momentum", 0.1) if count else 0.0
    op.write(next_mean, (1 - m) * old_mean + m * mean)
    op.write(next_var, (1 - m) * old_var + m * var * (count / (count - 1) if count > 1 else 1))


def bn_bwd(op: Operands) -> None:
    """g = (dy + dy2) where the activation let x through; dresidual = g; dgamma = sum g xhat; dbeta = sum g;
    dx = gamma inv_std (g - dbeta / n - xhat dgamma / n)."""
    dy, x_id, gamma_id, mean_id, inv_std_id, valid_id, *rest = op.node.inputs
    dx, dgamma, dbeta, *dresidual = op.node.outputs
    activation, valid = str(op.node.attrs["activation"]), int(op.number(valid_id))
    g = op.read(dy)[:valid]
    if activation != "none":
        y = op.read(rest.pop(0))[:valid]
    if op.node.attrs["dys"] == 2:
        g = g + op.read(rest.pop(0))[:valid]
    if activation != "none":
        g = np.where(passed(y, activation), g, 0.0)
    x, inv_std, gamma = op.read(x_id)[:valid], op.read(inv_std_id), op.read(gamma_id)
    normal = (x - op.read(mean_id)) * inv_std
    count = max(x.size // x.shape[3], 1)
    to_gamma, to_beta = (g * normal).sum(axis=(0, 1, 2)), g.sum(axis=(0, 1, 2))
    op.write(dgamma, to_gamma)
    op.write(dbeta, to_beta)
    outputs = [(dx, gamma * inv_std * (g - to_beta / count - normal * to_gamma / count))]
    if op.node.attrs["residual"]:
        outputs.append((dresidual[0], g))
    for out, values in outputs:
        whole = np.zeros(op.shape(out))
        whole[:valid] = values
        op.write(out, whole)


def bn_inf(op: Operands) -> None:
    """y = act(x eq_scale + eq_bias (+ residual))."""
    x, scale, shift, *residual = (op.read(i) for i in op.node.inputs)
    y = x * scale + shift
    for r in residual:
        y += r
    op.write(op.node.outputs[0], activate(y, str(op.node.attrs["activation"])))


def bn_update_eq_params(op: Operands) -> None:
    """eq_scale = gamma / sqrt(var + eps), eq_bias = beta - mean eq_scale."""
    gamma, beta, mean, var = (op.read(i) for i in op.node.inputs)
    scale = gamma / np.sqrt(var + op.attr("eps", 1e-5))
    op.write(op.node.outputs[0], scale)
    op.write(op.node.outputs[1], beta - mean * scale)


OPS: dict[str, Op] = {
    "BN_FWD": bn_fwd,
    "BN_BWD": bn_bwd,
    "BN_INF": bn_inf,
    "BN_UPDATE_EQ_PARAMS": bn_update_eq_params,
}
