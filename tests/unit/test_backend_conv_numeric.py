"""Convolutions of the CPU backend against float64: dense, depthwise, grouped, any stride and padding, fp32 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
from conv_harness import FLOAT_EPS, UNWRITTEN, Conv, data_exact, forward_exact, store, weight_exact

from renaissance.backend.cpu import conv_algorithms, conv_choice
from renaissance.backend.cpu.intrinsics import FLUSH_DENORMALS, keep_denormals, restore_denormals
from renaissance.backend.cpu.onednn import onednn
from renaissance.backend.cpu.onednn_primitives import ConvShape
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected

DTYPES = [DType.FP32, DType.BF16]
SHAPES = [
    # n, h, w, c, k, r, stride, pad, groups
    (1, 1, 1, 1, 1, 1, 1, 0, 1),
    (2, 5, 7, 1, 3, 3, 1, 1, 1),
    (3, 9, 8, 3, 5, 3, 2, 1, 1),
    (2, 11, 11, 3, 16, 7, 2, 3, 1),
    (1, 7, 7, 16, 32, 1, 1, 0, 1),
    (2, 8, 6, 20, 12, 1, 2, 0, 1),
    (2, 10, 10, 7, 9, 3, 3, 0, 1),
    (2, 6, 6, 64, 64, 3, 1, 1, 1),
    (3, 8, 8, 32, 64, 3, 2, 1, 1),
    (1, 5, 5, 4, 4, 5, 1, 2, 1),
    (2, 6, 5, 8, 8, 2, 2, 0, 1),
    (2, 4, 4, 3, 4, 1, 1, 1, 1),
    (2, 9, 9, 5, 5, 3, 1, 1, 5),
    (2, 9, 7, 32, 32, 3, 2, 1, 32),
    (1, 6, 6, 40, 40, 5, 1, 2, 40),
    (2, 7, 7, 8, 12, 3, 1, 1, 4),
    (2, 5, 5, 32, 32, 3, 2, 1, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_both_gradients_equal_float64(dtype: DType) -> None:
    for size in SHAPES:
        c = Conv(*size, dtype=dtype)
        check_all(c)


WINOGRAD_SHAPES = [
    # n, h, w, c, k, r, stride, pad: whole tiles, cut tiles, several blocks of tiles, one tile, every pad
    (1, 4, 4, 32, 32, 3, 1, 1),
    (3, 7, 9, 32, 64, 3, 1, 1),
    (9, 9, 8, 96, 32, 3, 1, 1),
    (2, 6, 5, 64, 128, 3, 1, 0),
    (1, 5, 5, 160, 32, 3, 1, 2),
]
TILE_ERROR = {"winograd 4x4": 16 * FLOAT_EPS, "winograd 2x2": 2.0**-7}
"""Rounding errors of the transforms, in parts of the largest sum of magnitudes: F(2x2) rounds its operands to bf16 once
more."""


@pytest.mark.parametrize(("name", "dtype"), [("winograd 4x4", t) for t in DTYPES] + [("winograd 2x2", DType.BF16)])
def test_winograd_equals_float64(name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = conv_algorithms.Job(
        conv_algorithms.Direction.FORWARD, ConvShape(1, 4, 4, 32, 32, 3, 3, 1, 1, 1, 4, 4), dtype, 1, ""
    )
    if not [a for a in conv_choice.supported(probe) if a.name == name]:
        pytest.skip(f"{name} does not run on this CPU")
    monkeypatch.setattr(conv_choice, "_rank", lambda job, candidate: int(candidate != name))
    tile = TILE_ERROR[name]
    for size in WINOGRAD_SHAPES:
        c = Conv(*size, dtype=dtype)
        check_all(c, tile)
        for activation, residual in (("relu", True), ("none", False)):
            c.infer(activation, bias=True, residual=residual)
            want, magnitude = infer_exact(c, activation, bias=True, residual=residual)
            c.check("y", want, magnitude, 2**15, tile)


def test_winograd_gives_the_same_bits_for_every_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in (("winograd 4x4", DType.FP32), ("winograd 2x2", DType.BF16)):
        monkeypatch.setattr(conv_choice, "_rank", lambda job, candidate, name=name: int(candidate != name))
        results = []
        for threads in (1, 2, 3):
            c = Conv(5, 12, 12, 96, 64, 3, 1, 1, dtype=dtype, threads=threads)
            c.forward("relu")
            c.backward_weight()
            c.backward_data()
            results.append([c.bench.array(c.ids[operand]).tobytes() for operand in ("y", "dw", "db", "dx")])
        assert results[0] == results[1] == results[2]


def test_the_rule_takes_winograd_only_where_it_saves() -> None:
    def rule(dtype: DType, *, n: int = 32, h: int = 16, c: int = 64, r: int = 3, stride: int = 1) -> str:
        shape = ConvShape(n, h, h, c, c, r, r, stride, r // 2, 1, (h - 1) // stride + 1, (h - 1) // stride + 1)
        job = conv_algorithms.Job(conv_algorithms.Direction.WEIGHT, shape, dtype, 2, "")
        return str(conv_choice.supported(job)[0].name)

    isa = onednn().isa
    if not isa.startswith("avx512"):
        pytest.skip("no AVX-512")
    assert rule(DType.FP32) == "winograd 4x4"
    others = (rule(DType.FP32, n=1, h=4), rule(DType.FP32, h=2), rule(DType.FP32, r=1), rule(DType.FP32, stride=2))
    assert set(others) == {"onednn"}
    assert rule(DType.FP32, c=24) == "onednn"
    if "bf16" in isa:
        assert rule(DType.BF16) == "winograd 2x2"


def check_all(c: Conv, tile: float = 0) -> None:
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


def infer_exact(c: Conv, activation: str, *, bias: bool, residual: bool) -> tuple[np.ndarray, np.ndarray]:
    """The result and what bounds its rounding errors."""
    x, w, scale = (c.exact[name] for name in ("x", "w", "scale"))
    rest = c.exact["eq_bias"] + (c.exact["b"] * scale if bias else 0) + (c.exact["residual"] if residual else 0)
    want = forward_exact(c, x, w) * scale + rest
    if activation != "none":
        want = np.clip(want, 0, 6 if activation == "relu6" else None)
    return want, forward_exact(c, np.abs(x), np.abs(w)) * np.abs(scale) + np.abs(rest) + np.abs(c.exact["b"] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_is_convolution_then_batch_norm(dtype: DType) -> None:
    for i, size in enumerate(SHAPES):
        c = Conv(*size, dtype=dtype)
        activation = ("none", "relu", "relu6")[i % 3]
        for bias, residual in ((True, True), (False, i % 2 == 0), (i % 2 == 0, False)):
            c.infer(activation, bias=bias, residual=residual)
            want, magnitude = infer_exact(c, activation, bias=bias, residual=residual)
            terms = c.exact["w"][0].size
            # the folded weights were rounded once, to the model's type
            extra = 0 if dtype is DType.FP32 else 2.0**-9 / 2.0**-23
            c.check("y", want, magnitude, int(terms + extra))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_without_bf16_convolution_computes_the_same_in_fp32(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_algorithms, "half_convolutions", lambda dnn: False)
    for size in SHAPES[1::3]:
        check_all(Conv(*size, dtype=dtype))
        c = Conv(*size, dtype=dtype)
        c.infer("relu")
        want, magnitude = infer_exact(c, "relu", bias=True, residual=True)
        c.check("y", want, magnitude, 1 << 15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_through_every_activation(dtype: DType) -> None:
    """Law 5, also when the capturing thread flushes denormals (see onednn._RELU_SLOPE)."""
    control = keep_denormals()
    restore_denormals(control | FLUSH_DENORMALS)
    try:
        for size in (
            (2, 6, 6, 20, 33, 3, 1, 1),
            (2, 6, 6, 8, 8, 3, 1, 1, 8),
            (1, 5, 5, 3, 16, 3, 2, 0),
            (1, 4, 4, 16, 16, 1),
        ):
            c = Conv(*size, dtype=dtype)
            c.bench.array(c.ids["w"])[0, 0, 0, 0] = store(np.full(1, np.nan, np.float32), dtype)[0]
            for activation in ("none", "relu", "relu6"):
                if activation != "relu6":
                    c.forward(activation)
                    only_first_channel_is_nan(c)
                c.infer(activation)
                only_first_channel_is_nan(c)
            c.backward_data()
            assert np.isnan(c.get("dx")).any()
    finally:
        restore_denormals(control)


def only_first_channel_is_nan(c: Conv) -> None:
    assert np.isnan(c.get("y")[:, 1:-1, 1:-1, 0]).all()
    assert not np.isnan(c.get("y")[..., 1:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_validation_step_packs_nothing_and_equal_layouts_share_one_copy(dtype: DType) -> None:
    c = Conv(2, 8, 8, 32, 48, 3, 1, 1, dtype=dtype)
    packing = [call.label for call in c.calls("CONV_FWD", "x w b", "y", activation="relu") if "pack" in call.label]
    assert packing == ["CONV_FWD #7 pack"], "once per training step"
    plain = Conv(2, 8, 8, 32, 48, 3, 1, 1, dtype=dtype)
    plain.bench.validating = True
    steps = [plain.calls("CONV_FWD", "x w b", "y", activation="relu") for _ in range(2)]
    assert [[call.label for call in step] for step in steps] == [["CONV_FWD #7"]] * 2
    assert len(plain.bench.prepared) == 1, "slots share what is prepared"
    attrs = {"activation": "relu", "bias": False, "residual": False}
    steps = [c.calls("CONV_INF", "x w scale eq_bias", "y", **attrs) for _ in range(3)]
    assert [[call.label for call in step] for step in steps] == [["CONV_INF #7"]] * 3
    assert len(c.bench.prepared) == 1, "slots share what is prepared"
    c.infer("relu", bias=False, residual=False)
    before = c.get("y")
    c.bench.array(c.ids["w"])[...] = 0
    c.infer("relu", bias=False, residual=False)
    assert (before != c.get("y")).any(), "preparing again takes the new weights"
    assert (c.get("y") == np.maximum(c.exact["eq_bias"], 0).astype(np.float32)).all() or dtype is DType.BF16


def test_gradients_overwrite_and_write_nothing_else() -> None:
    c = Conv(2, 6, 6, 5, 7, 3, 1, 1)
    c.backward_weight("dw")
    for name in ("db", "dx"):
        assert (c.bench.array(c.ids[name]) == UNWRITTEN).all()
    first = c.bench.array(c.ids["dw"]).copy()
    c.backward_weight("dw")
    assert (first == c.bench.array(c.ids["dw"])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_repeatable_bit_for_bit(dtype: DType) -> None:
    for threads in (1, 2):
        results = []
        for _ in range(2):
            c = Conv(5, 12, 12, 48, 32, 3, 1, 1, dtype=dtype, threads=threads)
            c.forward("relu")
            c.backward_weight()
            c.backward_data()
            results.append([c.bench.array(c.ids[name]).tobytes() for name in ("y", "dw", "db", "dx")])
        assert results[0] == results[1]


def test_wrong_operands_are_named() -> None:
    c = Conv(2, 6, 6, 5, 7, 3, 1, 1)
    with pytest.raises(ShapeError, match=r"CONV_FWD #7: weights 'w' \[7,3,3,5\] on 'y'"):
        c.run("CONV_FWD", "y w", "x", activation="none")
    with pytest.raises(ShapeError, match=r"CONV_FWD #7: tensor 'x' is \[2,6,6,5\]; expected \[2,6,6,7\]"):
        c.run("CONV_FWD", "x w", "x", activation="none")
    c.add("b", np.zeros((1, 1, 1, 6), np.float32), DType.FP32)
    with pytest.raises(ShapeError, match="'b'"):
        c.forward()
    with pytest.raises(ValueRejected, match="activation 'tanh'; expected one of: none, relu, relu6"):
        c.run("CONV_FWD", "x w", "y", activation="tanh")
    with pytest.raises(ValueRejected, match="stride 0"):
        c.run("CONV_FWD", "x w", "y", activation="none", stride=0)
    c.add("half", np.zeros((2, 6, 6, 5), np.float32), DType.BF16)
    with pytest.raises(DTypeError, match="'w' is FP32; expected BF16 as 'half'"):
        c.run("CONV_FWD", "half w", "y", activation="none")
