"""The eight activations and their derivatives as float32 formulas (spec/framework 3.9), the same bits on every host.

``exp`` is a polynomial of fixed operations, no call of the C library; results are within 2.5 units in the last place.
Nothing overflows on the way: sigmoid(-inf) = 0, silu(-inf) = -0, tanh(+-inf) = +-1, elu(-inf) = -1. A NaN stays one.
Each formula is a loop of its own, free of branches, so that it vectorises.
"""

from __future__ import annotations

import numpy as np

from renaissance.backend.cpu.streams import compiled, load, store, store_light

KINDS = ("relu", "relu6", "leaky_relu", "hardswish", "tanh", "sigmoid", "silu", "elu")
"""The index is the number of a kind in a kernel's words."""
SAVES_INPUT = ("hardswish", "silu")
"""Kinds whose derivative is computed from x; that of the others from y."""

_F = np.float32
ZERO, HALF, ONE, TWO, THREE, SIX = _F(0), _F(0.5), _F(1), _F(2), _F(3), _F(6)
LEAK, SIXTH = _F(0.01), _F(1 / 6)
LOG2_E = _F(1.4426950408889634)
LN2_HIGH, LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
"""ln 2 in two parts; whole multiples of the first are exact."""
SMALLEST = _F(-87.0)
"""exp of less is no normal float32."""
LARGEST = _F(88.0)
"""exp of 88.8 is no float32."""
FAR = _F(128)
"""From here on sigmoid is 0 or 1; keeps Inf out of products with 0."""
E2, E3, E4, E5, E6, E7 = (_F(1 / 2), _F(1 / 6), _F(1 / 24), _F(1 / 120), _F(1 / 720), _F(1 / 5040))


@compiled
def exp_parts(x):  # type: ignore[no-untyped-def]  # float32 in [SMALLEST, 88] -> float32 s, e: exp(x) = s (1 + e), s a power of two
    n = np.floor(x * LOG2_E + HALF)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = ((((E7 * r + E6) * r + E5) * r + E4) * r + E3) * r + E2
    exponent = np.int32(np.int32(n) + np.int32(127))
    return np.int32(exponent << np.int32(23)).view(np.float32), p * (r * r) + r


@compiled
def one_plus_exp(x):  # type: ignore[no-untyped-def]  # float32 -> float32, limits instead of 0 and Inf; finite for a NaN
    at = x if x > SMALLEST else SMALLEST
    at = at if at < LARGEST else LARGEST
    s, e = exp_parts(at)
    return ONE + s * (ONE + e)  # s * e alone may be too small for a normal number


@compiled
def sigmoid(x):  # type: ignore[no-untyped-def]  # float32 -> float32
    value = ONE / one_plus_exp(-x)
    value = ZERO if x < SMALLEST else value
    return value if x == x else x


@compiled
def expm1(x):  # type: ignore[no-untyped-def]  # float32 <= 0 -> float32
    at = x if x > SMALLEST else SMALLEST
    s, e = exp_parts(at)
    value = s * e + (s - ONE)
    return value if x == x else x


@compiled
def tanh(x):  # type: ignore[no-untyped-def]  # float32 -> float32
    size = -x if x > ZERO else x
    t = expm1(TWO * size)
    value = t / (t + TWO)
    return -value if x > ZERO else value


@compiled
def silu(x):  # type: ignore[no-untyped-def]  # float32 -> float32
    return -ZERO if x < SMALLEST else x / one_plus_exp(-x)


@compiled
def forward(stream, kind, x, y, n):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 index of KINDS; int64 addresses of n elements
    """y = act(x); y may be x."""
    if kind == 0:
        for i in range(n):
            v = load(stream, x, i)
            store_light(stream, y, i, ZERO if v <= ZERO else v)
    elif kind == 1:
        for i in range(n):
            v = load(stream, x, i)
            v = ZERO if v <= ZERO else v
            store_light(stream, y, i, SIX if v > SIX else v)
    elif kind == 2:
        for i in range(n):
            v = load(stream, x, i)
            store_light(stream, y, i, v if v > ZERO else LEAK * v)
    elif kind == 3:
        for i in range(n):
            v = load(stream, x, i)
            w = v * (v + THREE) * SIXTH
            w = ZERO if v <= -THREE else w
            store_light(stream, y, i, v if v >= THREE else w)
    elif kind == 4:
        for i in range(n):
            store(stream, y, i, tanh(load(stream, x, i)))
    elif kind == 5:
        for i in range(n):
            store(stream, y, i, sigmoid(load(stream, x, i)))
    elif kind == 6:
        for i in range(n):
            store(stream, y, i, silu(load(stream, x, i)))
    else:
        for i in range(n):
            v = load(stream, x, i)
            w = expm1(ZERO if v > ZERO else v)
            store(stream, y, i, v if v > ZERO else w)


@compiled
def backward(stream, kind, dy, saved, dx, n):  # type: ignore[no-untyped-def]  # FP32 or BF16; int64 index of KINDS; int64 addresses of n elements
    """dx = dy times the derivative; dx may be dy or saved."""
    if kind == 0:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, ZERO if y <= ZERO else g)
    elif kind == 1:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, ZERO if (y <= ZERO) | (y >= SIX) else g)
    elif kind == 2:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, g if y > ZERO else LEAK * g)
    elif kind == 3:
        for i in range(n):
            g, x = load(stream, dy, i), load(stream, saved, i)
            v = g * ((TWO * x + THREE) * SIXTH)
            v = ZERO if x <= -THREE else v
            store_light(stream, dx, i, g if x >= THREE else v)
    elif kind == 4:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, g * ((ONE - y) * (ONE + y)))
    elif kind == 5:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, g * (y * (ONE - y)))
    elif kind == 6:
        for i in range(n):
            g, x = load(stream, dy, i), load(stream, saved, i)
            at = -FAR if x < -FAR else x
            at = FAR if at > FAR else at
            s = sigmoid(x)
            store(stream, dx, i, g * (s * (ONE + at * (ONE - s))))
    else:
        for i in range(n):
            g, y = load(stream, dy, i), load(stream, saved, i)
            store_light(stream, dx, i, g if y > ZERO else g * (y + ONE))
