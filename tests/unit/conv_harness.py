"""One convolution in a bench: operands of any shape and type, the four ops, and the same in float64."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from backend_kernels_harness import Bench, node

from renaissance.backend.cpu import conv
from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.cpu.threads import configure
from renaissance.backend.registry import Call, NativeCall, OpRegistry
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.shape import Shape

REGISTRY = OpRegistry()
conv.register(REGISTRY)

Array = npt.NDArray[Any]
Exact = npt.NDArray[np.float64]
FLOAT_EPS = 2.0**-23
EPS = {DType.FP32: FLOAT_EPS, DType.BF16: 2.0**-8}
DTYPES = [DType.FP32, DType.BF16]
UNWRITTEN = np.float32(3e30)


def store(values: Array, dtype: DType) -> Array:
    return bf16_from_fp32(values) if dtype is DType.BF16 else values


def load(stored: Array, dtype: DType) -> Exact:
    return (fp32_from_bf16(stored) if dtype is DType.BF16 else stored).astype(np.float64)


class ConvBench(Bench):
    """A ``CaptureContext`` that keeps shared memory and prepared calls, as the executor does."""

    validating = False

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.prepared: dict[Hashable, list[Call]] = {}
        self._shared: dict[Hashable, int] = {}

    def shared(self, key: Hashable, nbytes: int) -> int:
        return self._shared.setdefault((key, nbytes), self.private(nbytes))

    def prepare(self, key: Hashable, calls: Sequence[Call]) -> None:
        self.prepared.setdefault(key, list(calls))


class Conv:
    """Operands x, w, b, dy, residual, scale, eq_bias with values, and y, dx, dw, db that hold ``UNWRITTEN``."""

    def __init__(
        self,
        n: int,
        h: int,
        w: int,
        c: int,
        k: int,
        r: int,
        stride: int = 1,
        pad: int = 0,
        groups: int = 1,
        *,
        dtype: DType = DType.FP32,
        threads: int = 2,
        s: int | None = None,
    ) -> None:
        configure(threads)
        s = r if s is None else s
        self.attrs: dict[str, int | str | bool] = {"stride": stride, "pad": pad, "groups": groups}
        self.kernel, self.dtype, self.bench = r, dtype, ConvBench(threads)
        self.ids: dict[str, int] = {}
        self.exact: dict[str, Exact] = {}
        self.types: dict[str, DType] = {}
        ho, wo = (h + 2 * pad - r) // stride + 1, (w + 2 * pad - s) // stride + 1
        rng = np.random.default_rng((n, h, c, k, r))
        x, y, weights, per_channel = (n, h, w, c), (n, ho, wo, k), (k, r, s, c // groups), (1, 1, 1, k)
        for name, dims, kind in (
            ("x", x, dtype), ("w", weights, dtype), ("dy", y, dtype), ("residual", y, dtype),
            ("b", per_channel, DType.FP32), ("scale", per_channel, DType.FP32), ("eq_bias", per_channel, DType.FP32),
        ):  # fmt: skip
            self.add(name, rng.standard_normal(dims).astype(np.float32), kind)
        for name, dims, kind in (
            ("y", y, dtype), ("dx", x, dtype), ("dw", weights, DType.FP32), ("db", per_channel, DType.FP32)
        ):  # fmt: skip
            self.add(name, np.full(dims, UNWRITTEN, np.float32), kind)

    def add(self, name: str, values: Array, dtype: DType) -> None:
        stored = store(values, dtype)
        self.ids[name] = self.bench.add(name, stored, dtype, Shape(*values.shape))
        self.exact[name], self.types[name] = load(stored, dtype), dtype

    def calls(self, op: str, inputs: str, outputs: str, **attrs: int | str | bool) -> list[NativeCall]:
        ids = [tuple(self.ids[name] for name in names.split()) for names in (inputs, outputs)]
        self.bench.validating = self.bench.validating or op == "CONV_INF"
        made = REGISTRY.launcher(op, "cpu")(node(op, *ids, **(self.attrs | attrs)), self.bench)
        return [c for c in made if isinstance(c, NativeCall)]

    def run(self, op: str, inputs: str, outputs: str, **attrs: int | str | bool) -> None:
        queue = NativeQueue(self.calls(op, inputs, outputs, **attrs))
        self.prepare()
        queue.launch()

    def prepare(self) -> None:
        for calls in self.bench.prepared.values():
            NativeQueue([c for c in calls if isinstance(c, NativeCall)]).launch()

    def forward(self, activation: str = "none") -> None:
        self.run("CONV_FWD", "x w b", "y", activation=activation)

    def backward_data(self) -> None:
        self.run("CONV_BWD_DATA", "dy w", "dx")

    def backward_weight(self, outputs: str = "dw db") -> None:
        self.run("CONV_BWD_WEIGHT", "dy x", outputs, kernel=self.kernel)

    def infer(self, activation: str = "none", *, bias: bool = True, residual: bool = True) -> None:
        inputs = "x w scale eq_bias" + " b" * bias + " residual" * residual
        self.run("CONV_INF", inputs, "y", activation=activation, bias=bias, residual=residual)

    def get(self, name: str) -> Exact:
        return load(self.bench.array(self.ids[name]), self.types[name])

    def check(self, name: str, want: Exact, magnitude: Exact, terms: int, tile: float = 0) -> None:
        """The tensor is within the error of fp32 accumulation of ``terms`` terms, plus one rounding of the result; and
        where results come in tiles plus ``tile`` times the largest sum of magnitudes."""
        allowed = (terms + 8) * FLOAT_EPS * magnitude + EPS[self.types[name]] * np.abs(want) + 1e-37
        allowed += tile * magnitude.max()
        worst = float(np.max(np.abs(self.get(name) - want) / allowed))
        assert worst <= 1, f"{name}: error is {worst:.2f} of what is allowed"


def patches(c: Conv, values: Exact) -> Exact:
    """[N,Ho,Wo,R,S,C] view of padded images."""
    pad, stride = int(c.attrs["pad"]), int(c.attrs["stride"])
    _, r, s, _ = c.exact["w"].shape
    padded = np.pad(values, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (r, s), axis=(1, 2))
    return windows[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)


def per_group(c: Conv) -> list[tuple[slice, slice]]:
    groups = int(c.attrs["groups"])
    k, channels = c.exact["w"].shape[0] // groups, c.exact["w"].shape[3]
    return [(slice(g * k, (g + 1) * k), slice(g * channels, (g + 1) * channels)) for g in range(groups)]


def forward_exact(c: Conv, x: Exact, w: Exact) -> Exact:
    p, y = patches(c, x), np.zeros(c.exact["y"].shape)
    for k, channels in per_group(c):
        y[..., k] = np.tensordot(p[..., channels], w[k], axes=([3, 4, 5], [1, 2, 3]))
    return y


def weight_exact(c: Conv, x: Exact, dy: Exact) -> Exact:
    p, dw = patches(c, x), np.zeros(c.exact["w"].shape)
    for k, channels in per_group(c):
        dw[k] = np.tensordot(dy[..., k], p[..., channels], axes=([0, 1, 2], [0, 1, 2]))
    return dw


def data_exact(c: Conv, dy: Exact, w: Exact) -> Exact:
    pad, stride = int(c.attrs["pad"]), int(c.attrs["stride"])
    n, h, width, channels = c.exact["x"].shape
    _, r, s, _ = w.shape
    ho, wo = dy.shape[1:3]
    padded = np.zeros((n, h + 2 * pad, width + 2 * pad, channels))
    for k, ins in per_group(c):
        for i in range(r):
            for j in range(s):
                rows, columns = slice(i, i + ho * stride, stride), slice(j, j + wo * stride, stride)
                padded[:, rows, columns, ins] += dy[..., k] @ w[k, i, j]
    return padded[:, pad : pad + h, pad : pad + width]


def check_all(c: Conv, tile: float = 0) -> None:
    """Forward, with and without ReLU, and both gradients against float64; ``tile`` as in ``Conv.check``."""
    x, w, b, dy = (c.exact[name] for name in ("x", "w", "b", "dy"))
    terms, magnitude = w[0].size, forward_exact(c, np.abs(x), np.abs(w)) + np.abs(b)
    for activation in ("none", "relu"):
        c.forward(activation)
        want = forward_exact(c, x, w) + b
        c.check("y", np.maximum(want, 0) if activation == "relu" else want, magnitude, terms, tile)
    c.backward_weight()
    pixels = dy[..., 0].size
    c.check("dw", weight_exact(c, x, dy), weight_exact(c, np.abs(x), np.abs(dy)), pixels, tile)
    c.check("db", dy.sum((0, 1, 2), keepdims=True), np.abs(dy).sum((0, 1, 2), keepdims=True), pixels)
    c.backward_data()
    taps = w[:, :, :, 0].size
    c.check("dx", data_exact(c, dy, w), data_exact(c, np.abs(dy), np.abs(w)), taps, tile)


def infer_exact(c: Conv, activation: str, *, bias: bool, residual: bool) -> tuple[Exact, Exact]:
    """The result and what bounds its rounding errors."""
    x, w, scale = (c.exact[name] for name in ("x", "w", "scale"))
    rest = c.exact["eq_bias"] + (c.exact["b"] * scale if bias else 0) + (c.exact["residual"] if residual else 0)
    want = forward_exact(c, x, w) * scale + rest
    if activation != "none":
        want = np.clip(want, 0, 6 if activation == "relu6" else None)
    return want, forward_exact(c, np.abs(x), np.abs(w)) * np.abs(scale) + np.abs(rest) + np.abs(c.exact["b"] * scale)
