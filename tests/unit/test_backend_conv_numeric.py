"""Convolutions of the CPU backend against float64: dense, depthwise, grouped, any stride and padding, fp32 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
from conv_harness import DTYPES, UNWRITTEN, Conv, check_all, infer_exact, store

from renaissance.backend.cpu import conv_algorithms
from renaissance.backend.cpu.intrinsics import FLUSH_DENORMALS, keep_denormals, restore_denormals
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected

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
