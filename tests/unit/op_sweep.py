"""The cases of the op sweep: every op, forward and backward, on awkward shapes.

Odd sizes, one channel, one sample, one place, stride 3, groups, depthwise, and operands that are all ones (whose sums
are whole numbers, so that nothing may be lost at all). Random operands are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from op_cases import F64, Case, In, Out, scalar

from renaissance.core.region import Region

ACTIVATIONS = ("relu", "relu6", "tanh", "sigmoid", "silu", "leaky_relu", "hardswish", "elu")
SHAPES = ((1, 1, 1, 1), (1, 7, 5, 3), (3, 5, 9, 1), (2, 4, 4, 33), (5, 1, 1, 10), (2, 6, 7, 64))
"""[N,H,W,C] of element-wise ops and norms."""
CONVOLUTIONS = (
    # n, h, w, channels, out, kernel, stride, pad, groups
    (1, 1, 1, 1, 1, 1, 1, 0, 1),
    (2, 5, 7, 1, 3, 3, 1, 1, 1),
    (1, 9, 7, 3, 5, 3, 2, 1, 1),
    (3, 11, 10, 7, 13, 5, 3, 2, 1),
    (1, 7, 9, 4, 6, 3, 3, 1, 1),
    (2, 8, 8, 16, 32, 1, 1, 0, 1),
    (2, 9, 9, 16, 8, 1, 2, 0, 1),
    (2, 3, 3, 4, 6, 3, 1, 0, 1),
    (1, 5, 4, 2, 4, 2, 1, 1, 1),
    (2, 19, 17, 3, 16, 7, 2, 3, 1),
    (2, 7, 7, 64, 32, 3, 1, 1, 1),
    (4, 4, 4, 32, 64, 3, 2, 1, 1),
    (2, 7, 7, 8, 8, 3, 1, 1, 8),
    (1, 10, 9, 5, 5, 3, 2, 1, 5),
    (2, 8, 7, 32, 32, 5, 1, 2, 32),
    (2, 5, 5, 4, 8, 3, 1, 1, 4),
    (2, 6, 6, 8, 12, 3, 1, 1, 4),
    (1, 7, 6, 32, 32, 3, 2, 1, 2),
)
POOLS = (
    # n, h, w, c, kernel, stride, pad
    (1, 1, 1, 1, 1, 1, 0),
    (2, 6, 6, 3, 2, 2, 0),
    (1, 7, 9, 1, 3, 2, 1),
    (3, 10, 8, 5, 3, 3, 1),
    (2, 5, 5, 33, 3, 1, 1),
    (1, 8, 7, 16, 5, 3, 2),
    (2, 17, 18, 2, 16, 1, 1),
)
FULLY_CONNECTED = ((1, 1, 1), (1, 5, 3), (3, 1, 7), (2, 7, 1), (13, 129, 65), (64, 300, 10))
"""(batch, inputs, outputs)"""


class Draw:
    """Operands of one case: normally distributed, or all ones."""

    def __init__(self, *key: int, ones: bool = False) -> None:
        self._rng, self._ones = np.random.default_rng(key), ones

    def __call__(self, *shape: int, deviation: float = 1.0) -> F64:
        return np.ones(shape) if self._ones else deviation * self._rng.standard_normal(shape)

    def positive(self, *shape: int) -> F64:
        return np.abs(self(*shape)) + 0.1


def out_size(size: int, kernel: int, stride: int, pad: int) -> int:
    return (size + 2 * pad - kernel) // stride + 1


def convolutions() -> Iterator[Case]:
    for i, geometry in enumerate(CONVOLUTIONS):
        yield from convolution(geometry, Draw(1, i), activation=("none", "relu")[i % 2], bias=i % 3 > 0)
    yield from convolution((2, 6, 6, 8, 8, 3, 1, 1, 1), Draw(1, ones=True), activation="none", bias=True)


def convolution(geometry: tuple[int, ...], draw: Draw, *, activation: str, bias: bool) -> Iterator[Case]:
    n, h, w, c, k, kernel, stride, pad, groups = geometry
    ho, wo = (out_size(size, kernel, stride, pad) for size in (h, w))
    title = f"{n}x{h}x{w}x{c} {kernel}x{kernel} to {k}, stride {stride}, pad {pad}, groups {groups}"
    reads = kernel * kernel * c // groups
    x, weight = draw(n, h, w, c), draw(k, kernel, kernel, c // groups, deviation=reads**-0.5)
    dy, b = draw(n, ho, wo, k), draw(1, 1, 1, k)
    place: dict[str, int] = {"stride": stride, "pad": pad, "groups": groups}
    inputs = (In("x", x), In("w", weight), *((In("b", b, "fp32"),) if bias else ()))
    # a backend may round transformed operands (Winograd's algorithm), and weights that the scale is folded into
    y, folded_y = (Out("y", dy.shape, terms=reads, refits=r) for r in (1, 2))
    yield Case("CONV_FWD", title, inputs, (y,), place | {"activation": activation}, linear=True)
    grads = (
        Out("dw", weight.shape, "fp32", n * ho * wo, refits=1),
        *((Out("db", b.shape, "fp32", n * ho * wo),) if bias else ()),
    )
    yield Case("CONV_BWD_WEIGHT", title, (In("dy", dy), In("x", x)), grads, place | {"kernel": kernel}, linear=True)
    dx = Out("dx", x.shape, terms=kernel * kernel * k // groups, refits=1)
    yield Case("CONV_BWD_DATA", title, (In("dy", dy), In("w", weight)), (dx,), place, linear=True)
    folded = (In("scale", draw.positive(1, 1, 1, k), "fp32"), In("shift", draw(1, 1, 1, k), "fp32"))
    for residual, act in ((False, "relu6"), (True, "relu")):
        rest = (*inputs[2:], *((In("residual", draw(*dy.shape)),) if residual else ()))
        attrs = place | {"activation": act, "bias": bias, "residual": residual}
        yield Case("CONV_INF", title, (*inputs[:2], *folded, *rest), (folded_y,), attrs, linear=True)


def norms() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        for activation, residual in (("none", False), ("relu", True), ("relu6", False)):
            draw = Draw(2, i, residual)
            valid = max(1, shape[0] - (i % 2))
            yield norm_forward(shape, valid, draw(*shape) * 2 + 0.5, draw, activation, residual)
            for dys in (1, 2):
                yield norm_backward(shape, valid, draw, activation, residual, dys)
            yield norm_inference(shape, draw, activation, residual)
    far = Draw(2, 99)(4, 3, 5, 7) + 10_000
    yield norm_forward((4, 3, 5, 7), 4, far, Draw(2, 98), "none", False, title="4x3x5x7, mean 10000")


def norm_forward(
    shape: tuple[int, ...], valid: int, x: F64, draw: Draw, activation: str, residual: bool, title: str = ""
) -> Case:
    c, count = shape[3], valid * shape[1] * shape[2]
    channel = (1, 1, 1, c)
    gamma, beta, mean, var = draw(*channel), draw(*channel), draw(*channel), draw.positive(*channel)
    r = draw(*shape)
    x = np.asarray(x, np.float32).astype(np.float64)
    seen = x[:valid]
    inv_std = 1 / np.sqrt(seen.var(axis=(0, 1, 2)) + 1e-5)
    # the mean may be off by the roundings of its sum, and all of that enters y times inv_std
    size = np.abs(gamma) * inv_std * np.abs(seen).max(axis=(0, 1, 2)) + np.abs(beta) + np.abs(r).max() * residual
    spread = np.abs(seen - seen.mean(axis=(0, 1, 2))).max()
    outs = (
        Out("y", shape, terms=count, magnitude=size, rows=valid),
        Out("saved_mean", channel, "fp32", count, float(np.abs(seen).max())),
        Out("saved_inv_std", channel, "fp32", count, inv_std * (1 + inv_std * np.abs(seen).max())),
        Out("next_mean", channel, "fp32", count),
        Out("next_var", channel, "fp32", count, spread * (spread + float(np.abs(seen).max())) + 1),
    )
    vectors = zip(("gamma", "beta", "prev_mean", "prev_var"), (gamma, beta, mean, var), strict=True)
    inputs = (In("x", x), *(In(k, v, "fp32") for k, v in vectors), scalar("batch_valid", valid, "i32"))
    if residual:
        inputs += (In("residual", r),)
    attrs = {"momentum": 0.1, "eps": 1e-5, "activation": activation}
    return Case("BN_FWD", title or f"{shape}, {valid} valid, {activation}, residual {residual}", inputs, outs, attrs)


def norm_backward(shape: tuple[int, ...], valid: int, draw: Draw, activation: str, residual: bool, dys: int) -> Case:
    channel, count = (1, 1, 1, shape[3]), valid * shape[1] * shape[2]
    x, dy, dy2, gamma = draw(*shape), draw(*shape), draw(*shape), draw(*channel)
    x_hat_scale = draw.positive(*channel)
    mean = x[:valid].mean(axis=(0, 1, 2), keepdims=True)
    inputs = [In("dy", dy), In("x", x), In("gamma", gamma, "fp32"), In("mean", mean, "fp32")]
    inputs += [In("inv_std", x_hat_scale, "fp32"), scalar("batch_valid", valid, "i32")]
    if activation != "none":
        inputs.append(In("y", np.clip(draw(*shape) * 4, 0, 6 if activation == "relu6" else None)))
    if dys == 2:
        inputs.append(In("dy2", dy2))
    g = np.abs(dy) + np.abs(dy2) * (dys == 2)
    normal = np.abs(x - mean) * x_hat_scale
    to_gamma, to_beta = (g * normal)[:valid].sum(axis=(0, 1, 2)), g[:valid].sum(axis=(0, 1, 2))
    size = np.abs(gamma) * x_hat_scale * (g.max() + to_beta / count + normal.max() * to_gamma / count)
    # a backend may store the sum of two gradients, rounded, before it uses it
    outs = [Out("dx", shape, terms=count, magnitude=size, refits=int(dys == 2))]
    outs += [Out("dgamma", channel, "fp32", count, to_gamma), Out("dbeta", channel, "fp32", count, to_beta)]
    if residual:
        outs.append(Out("dresidual", shape, magnitude=float(g.max())))
    title = f"{shape}, {valid} valid, {activation}, residual {residual}, {dys} gradients"
    attrs = {"activation": activation, "dys": dys, "residual": residual}
    return Case("BN_BWD", title, tuple(inputs), tuple(outs), attrs)


def norm_inference(shape: tuple[int, ...], draw: Draw, activation: str, residual: bool) -> Case:
    channel = (1, 1, 1, shape[3])
    inputs = [In("x", draw(*shape)), In("scale", draw.positive(*channel), "fp32"), In("shift", draw(*channel), "fp32")]
    if residual:
        inputs.append(In("residual", draw(*shape)))
    title = f"{shape}, {activation}, residual {residual}"
    return Case("BN_INF", title, tuple(inputs), (Out("y", shape, terms=2),), {"activation": activation}, linear=True)


def folded_parameters() -> Iterator[Case]:
    for c in (1, 7, 64, 1000):
        draw, channel = Draw(3, c), (1, 1, 1, c)
        gamma, beta, mean, var = draw(*channel), draw(*channel), draw(*channel), draw.positive(*channel)
        size = np.abs(beta) + np.abs(mean * gamma) / np.sqrt(var)
        inputs = tuple(In(k, v, "fp32") for k, v in zip("gbmv", (gamma, beta, mean, var), strict=True))
        outs = (Out("eq_scale", channel, "fp32", 4), Out("eq_bias", channel, "fp32", 4, size))
        yield Case("BN_UPDATE_EQ_PARAMS", f"{c} channels", inputs, outs, {"eps": 1e-5})


def activations() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        for j, kind in enumerate(ACTIVATIONS):
            draw = Draw(4, i, j)
            x, dy = draw(*shape) * 3, draw(*shape)
            attrs = {"kind": kind}
            yield Case("ACT_FWD", f"{kind} {shape}", (In("x", x),), (Out("y", shape, terms=4),), attrs)
            saved = x if kind in ("silu", "hardswish") else np.tanh(x) if kind in ("tanh", "elu") else np.abs(x)
            saved = 1 / (1 + np.exp(-x)) if kind == "sigmoid" else np.minimum(saved, 6) if kind == "relu6" else saved
            yield Case(
                "ACT_BWD", f"{kind} {shape}", (In("dy", dy), In("saved", saved)), (Out("dx", shape, terms=8),), attrs
            )


def sums() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        draw = Draw(5, i)
        pair = (In("a", draw(*shape)), In("b", draw(*shape)))
        for activation in ("none", "relu"):
            attrs = {"activation": activation}
            yield Case("ADD_FWD", f"{activation} {shape}", pair, (Out("y", shape),), attrs, linear=True)
        yield Case("GRAD_SUM", str(shape), pair, (Out("dx", shape),), linear=True)
        for views in range(1, 6):
            logits = tuple(In(f"l{v}", draw(shape[0], 1, 1, shape[3])) for v in range(views))
            out = Out("y", (shape[0], 1, 1, shape[3]), terms=views + 1)
            yield Case("MEAN_LOGITS", f"{views} views {shape[0]}x{shape[3]}", logits, (out,), linear=True)


def pools() -> Iterator[Case]:
    for i, (n, h, w, c, kernel, stride, pad) in enumerate(POOLS):
        draw = Draw(6, i)
        ho, wo = (out_size(size, kernel, stride, pad) for size in (h, w))
        title = f"{n}x{h}x{w}x{c}, {kernel}x{kernel}, stride {stride}, pad {pad}"
        x, y_shape, dy = np.round(draw(n, h, w, c) * 4) / 4, (n, ho, wo, c), draw(n, ho, wo, c)  # with ties
        geometry = {"kernel": kernel, "stride": stride, "pad": pad}
        place = Out("index", (n, ho, wo, c * (1 if kernel <= 15 else 2)), "mask")
        overlap = math.ceil(kernel / stride) ** 2
        yield Case("MAXPOOL_FWD", title, (In("x", x),), (Out("y", y_shape), place), geometry)
        yield Case("MAXPOOL_INF", title, (In("x", x),), (Out("y", y_shape),), geometry)
        index = In("index", max_index(x, kernel, stride, pad), "mask")
        yield Case(
            "MAXPOOL_BWD", title, (In("dy", dy), index), (Out("dx", x.shape, terms=overlap),), geometry, linear=True
        )
        for whole in (True, False):
            attrs = geometry | {"count_include_pad": whole}
            padding = ", counts padding" if whole else ""
            y = Out("y", y_shape, terms=kernel**2)
            yield Case("AVGPOOL_FWD", title + padding, (In("x", x),), (y,), attrs, linear=True)
            dx = Out("dx", x.shape, terms=overlap)
            yield Case("AVGPOOL_BWD", title + padding, (In("dy", dy),), (dx,), attrs, linear=True)
    for i, shape in enumerate((*SHAPES, (2, 7, 7, 512))):
        x, dy = Draw(7, i)(*shape), Draw(8, i)(shape[0], 1, 1, shape[3])
        yield Case("GAP_FWD", str(shape), (In("x", x),), (Out("y", dy.shape, terms=shape[1] * shape[2]),), linear=True)
        yield Case("GAP_BWD", str(shape), (In("dy", dy),), (Out("dx", shape, terms=2),), linear=True)


def max_index(x: F64, kernel: int, stride: int, pad: int) -> npt.NDArray[np.uint8]:
    """The index tensor of max pooling by a plain loop: the first of equals in scan order."""
    n, h, w, c = x.shape
    ho, wo = (out_size(size, kernel, stride, pad) for size in (h, w))
    best = np.full((n, ho, wo, c), -np.inf)
    place = np.zeros((n, ho, wo, c), "u1" if kernel <= 15 else "<u2")
    for i in range(ho):
        for j in range(wo):
            for k in range(kernel * kernel):
                row, column = i * stride - pad + k // kernel, j * stride - pad + k % kernel
                if 0 <= row < h and 0 <= column < w:
                    wins = x[:, row, column] > best[:, i, j]
                    best[:, i, j][wins] = x[:, row, column][wins]
                    place[:, i, j][wins] = k
    return place.view(np.uint8)


def dropouts() -> Iterator[Case]:
    for i, shape in enumerate((*SHAPES, (3, 7, 7, 67))):
        for p in (0.0, 0.1, 0.5, 0.999):
            words = ((0x12345678, 0x1BCDEF01, 5), (0xFFFFFFFF, 0x80000001, 70_000))[i % 2]
            state = tuple(
                scalar(k, v, "i32") for k, v in zip(("seed_low", "seed_high", "dropout_step"), words, strict=True)
            )
            attrs = {"p": p, "layer": 3 + i}
            for op, role, result in (("DROPOUT_FWD", "x", "y"), ("DROPOUT_BWD", "dy", "dx")):
                values = Draw(9, i)(*shape)
                yield Case(op, f"p {p} {shape}", (In(role, values), *state), (Out(result, shape, terms=2),), attrs)
    for flag in (0, 1):
        inputs = (scalar("has_nan", flag, "i32"), scalar("dropout_step", 41, "i32"))
        yield Case("DROPOUT_ADVANCE", f"flag {flag}", inputs, (Out("dropout_step", (1, 1, 1, 1), "i32"),))


def views() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        x = Draw(10, i)(*shape)
        wide = (*shape[:3], -(-shape[3] // 8) * 8)
        yield Case("CHANNEL_PADDING_FWD", str(shape), (In("x", x),), (Out("y", wide),))
        yield Case("CHANNEL_PADDING_BWD", str(shape), (In("dy", Draw(11, i)(*wide)),), (Out("dx", shape),))
        for flip, dy, dx in ((False, 0, 0), (True, 0, 0), (False, 1, 0), (False, -1, 1), (True, 2, -3)):
            attrs = {"flip": flip, "dy": dy, "dx": dx}
            yield Case("INPUT_VIEW", f"flip {flip}, dy {dy}, dx {dx} {shape}", (In("x", x),), (Out("y", shape),), attrs)
        flat = (shape[0], 1, 1, math.prod(shape[1:]))
        yield Case("FLATTEN_FWD", str(shape), (In("x", x),), (Out("y", flat),))
        yield Case("FLATTEN_BWD", str(shape), (In("dy", x.reshape(flat)),), (Out("dx", shape),))


def products() -> Iterator[Case]:
    for i, (n, inputs, outputs) in enumerate(FULLY_CONNECTED):
        draw, title = Draw(12, i), f"{n}x{inputs} to {outputs}"
        x, w = In("x", draw(n, 1, 1, inputs)), In("w", draw(outputs, 1, 1, inputs))
        b, dy = In("b", draw(1, 1, 1, outputs), "fp32"), In("dy", draw(n, 1, 1, outputs))
        y = Out("y", dy.values.shape, terms=inputs)
        attrs = {"activation": ("none", "relu")[i % 2]}
        yield Case("FC_FWD", title, (x, w, *((b,) if i % 3 else ())), (y,), attrs, linear=True)
        grads = (Out("dw", w.values.shape, "fp32", n), Out("db", b.values.shape, "fp32", n))
        yield Case("FC_BWD_WEIGHT", title, (dy, x), grads, linear=True)
        dx = Out("dx", x.values.shape, terms=outputs)
        yield Case("FC_BWD_DATA", title, (dy, w), (dx,), {"mask": "none"}, linear=True)


def losses() -> Iterator[Case]:
    for i, (n, k) in enumerate(((1, 2), (3, 10), (17, 1000), (5, 1))):
        draw, one = Draw(13, i), (1, 1, 1, 1)
        logits = In("logits", draw(n, 1, 1, k) * 3)
        labels = np.arange(n).reshape(n, 1, 1, 1) % k
        if n > 1:
            labels[-1] = -1
        valid = max(n - 1, 1)
        shared = (In("label", labels, "i32"), scalar("smoothing", 0.1), scalar("batch_valid", valid, "i32"))
        probs, partials = Out("probs", (n, 1, 1, k), "fp32", k), Out("partials", (n, 1, 1, 1), "fp32", k)
        loss = Out("loss", one, "fp32", k + n)
        yield Case("SOFTMAX_CE_FWD", f"{n}x{k}", (logits, *shared), (probs, partials, loss))
        rates = (Out("top1", one, "fp32"), Out("top5", one, "fp32"))
        outs = (Out("predicted", (n, 1, 1, 1), "i32"), probs, partials, loss, *rates)
        yield Case("SOFTMAX_CE_INF", f"{n}x{k}", (logits, *shared), outs)
        p = np.exp(logits.values) / np.exp(logits.values).sum(axis=3, keepdims=True)
        inputs = (In("probs", p, "fp32"), *shared, scalar("scaling", 8.0))
        yield Case("SOFTMAX_CE_BWD", f"{n}x{k}", inputs, (Out("dlogits", (n, 1, 1, k), terms=4, magnitude=8 / valid),))


def updates() -> Iterator[Case]:
    regions = (Region.W_FC_WEIGHT, Region.A_FC_WEIGHT, Region.G_FC_WEIGHT, Region.M_FC_WEIGHT, Region.V_FC_WEIGHT)
    weight, half, grad, m, v = regions
    scalars = {"lr": 0.1, "wd": 0.05, "beta": 0.9, "beta2": 0.99, "eps": 1e-8, "c1": 2.0, "c2": 3.0}
    kinds = {"SGD": (2, 0), "MOMENTUM": (3, 1), "NESTEROV": (3, 1), "ADAM": (7, 2), "ADAMW": (7, 2)}
    for i, (kind, (count, moments)) in enumerate(kinds.items()):
        for flag in (0, 1):
            draw = Draw(14, i)
            n = 4096
            spans = {weight: draw(n), half: draw(n), grad: draw(n) * 8, m: draw(n), v: draw(n) ** 2}
            inputs = [scalar(k, x) for k, x in list(scalars.items())[:count]]
            inputs += [scalar("scaling", 8.0), scalar("has_nan", flag, "i32")]
            yield Case(
                f"RANGE_UPDATE_{kind}",
                f"{n}, flag {flag}",
                tuple(inputs),
                (),
                {"decay": i % 2 == 0},
                spans,
                (grad, m, v)[: 1 + moments],
                (weight, half),
            )


def averages() -> Iterator[Case]:
    for flag in (0, 1):
        draw = Draw(15, flag)
        spans = {Region.W_FC_WEIGHT: draw(5000), Region.E_FC_WEIGHT: draw(5000)}
        inputs = (scalar("ema_decay", 0.999), scalar("has_nan", flag, "i32"))
        reads, writes = (Region.W_FC_WEIGHT,), (Region.E_FC_WEIGHT,)
        yield Case("RANGE_EMA_UPDATE", f"5000, flag {flag}", inputs, (), {}, spans, reads, writes)


def trust_ratios() -> Iterator[Case]:
    shapes = ((1, 1, 1, 1), (3, 3, 3, 5), (10, 1, 1, 300), (64, 3, 3, 32))
    for i, shape in enumerate(shapes):
        for nesterov in (False, True):
            for flag in (0, 1):
                draw = Draw(16, i)
                scales = {"lr": 0.1, "wd": 1e-4, "beta": 0.9, "trust": 0.01 if i else 100.0, "eps": 1e-8}
                inputs = [scalar(k, v) for k, v in (scales | {"scaling": 8.0}).items()]
                inputs += [scalar("has_nan", flag, "i32"), In("grad", draw(*shape) * 8, "fp32")]
                outs = (
                    Out("weight", shape, "fp32", 8, start=draw(*shape)),
                    Out("m", shape, "fp32", 8, start=draw(*shape)),
                    Out("ratio", (1, 1, 1, 1), "fp32", 8, start=np.ones((1, 1, 1, 1))),
                    Out("half", shape, "f", 8, start=draw(*shape)),
                )
                title = f"{shape}, flag {flag}, nesterov {nesterov}"
                yield Case("LARS_UPDATE", title, tuple(inputs), outs, {"nesterov": nesterov})


def flags() -> Iterator[Case]:
    for a in (0, 1):
        for b in (0, 1):
            inputs = (scalar("a", a, "i32"), scalar("b", b, "i32"))
            yield Case("FLAG_OR", f"{a} {b}", inputs, (Out("either", (1, 1, 1, 1), "i32"),))


FAMILIES = (
    convolutions,
    norms,
    folded_parameters,
    activations,
    sums,
    pools,
    dropouts,
    views,
    products,
    losses,
    updates,
    averages,
    trust_ratios,
    flags,
)
