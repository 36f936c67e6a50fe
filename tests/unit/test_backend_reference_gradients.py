"""The reference's backward ops are the derivatives of its forward ops, by central differences in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_cases import F64, Case, In, Out, exact, scalar
from op_sweep import ACTIVATIONS

from renaissance.core.dtype import DType
from renaissance.graph.ops import SAVES_INPUT

STEP = 1e-5
TOLERANCE = 1e-7
"""Of the largest derivative: truncation is STEP^2, cancellation 1e-16 / STEP, times the size of the sums."""
Results = Mapping[str, npt.NDArray[Any]]


@pytest.fixture(autouse=True)
def no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands enter as they are: central differences need more digits than fp32 has."""
    monkeypatch.setattr("op_cases.stored", lambda values, kind, f: np.asarray(values))
    monkeypatch.setattr("op_cases.loaded", lambda raw, kind, f: raw.copy())


def draw(*shape: int, seed: int = 0) -> F64:
    return np.random.default_rng((len(shape), *shape, seed)).standard_normal(shape)


def run(case: Case) -> Results:
    return exact(case, DType.FP32)


def differences(case: Case, output: str, dy: F64, name: str) -> F64:
    """d sum(dy * output) / d input ``name``."""
    position = next(i for i, operand in enumerate(case.inputs) if operand.name == name)
    base = case.inputs[position].values
    slope = np.empty(base.shape)
    for place in np.ndindex(base.shape):
        sums = []
        for sign in (STEP, -STEP):
            moved = base.copy()
            moved[place] += sign
            inputs = list(case.inputs)
            inputs[position] = replace(inputs[position], values=moved)
            sums.append(float((dy * run(replace(case, inputs=tuple(inputs)))[output]).sum()))
        slope[place] = (sums[0] - sums[1]) / (2 * STEP)
    return slope


def check(case: Case, output: str, dy: F64, got: Mapping[str, F64]) -> None:
    """``got``: gradient by name of the input."""
    for name, gradient in got.items():
        want = differences(case, output, dy, name)
        scale = max(float(np.abs(want).max()), 1.0)
        np.testing.assert_allclose(gradient.reshape(want.shape), want, atol=TOLERANCE * scale, err_msg=f"{case} {name}")


GEOMETRIES = ((3, 1, 1, 1, 4, 6), (3, 2, 1, 2, 4, 6), (2, 3, 0, 1, 1, 2), (3, 1, 2, 4, 4, 8), (1, 2, 0, 1, 3, 2))
"""kernel, stride, pad, groups, channels, outputs"""


@pytest.mark.parametrize(("kernel", "stride", "pad", "groups", "channels", "outputs"), GEOMETRIES)
def test_convolution(kernel: int, stride: int, pad: int, groups: int, channels: int, outputs: int) -> None:
    x, w, b = draw(2, 5, 6, channels), draw(outputs, kernel, kernel, channels // groups), draw(1, 1, 1, outputs)
    size = [(n + 2 * pad - kernel) // stride + 1 for n in (5, 6)]
    dy = draw(2, *size, outputs)
    place: dict[str, int] = {"stride": stride, "pad": pad, "groups": groups}
    forward = Case(
        "CONV_FWD",
        "",
        (In("x", x), In("w", w), In("b", b)),
        (Out("y", dy.shape),),
        {"activation": "none"} | place,
    )
    outs = (Out("dw", w.shape), Out("db", b.shape))
    of_weight = run(Case("CONV_BWD_WEIGHT", "", (In("dy", dy), In("x", x)), outs, place | {"kernel": kernel}))
    of_data = run(Case("CONV_BWD_DATA", "", (In("dy", dy), In("w", w)), (Out("dx", x.shape),), place))
    check(forward, "y", dy, {"x": of_data["dx"], "w": of_weight["dw"], "b": of_weight["db"]})


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
@pytest.mark.parametrize(("valid", "residual", "dys"), [(3, False, 1), (2, True, 2)])
def test_batch_norm_over_the_valid_rows(activation: str, valid: int, residual: bool, dys: int) -> None:
    shape, channel = (3, 2, 3, 2), (1, 1, 1, 2)
    operands = {"x": draw(*shape), "gamma": draw(*channel, seed=1) * 4, "beta": draw(*channel, seed=2)}
    inputs = [In(k, v) for k, v in operands.items()]
    inputs += [In("prev_mean", draw(*channel)), In("prev_var", draw(*channel) ** 2), scalar("valid", valid, "i32")]
    inputs += [In("residual", draw(*shape, seed=3))] if residual else []
    vectors = ("saved_mean", "saved_inv_std", "next_mean", "next_var")
    outs = (Out("y", shape), *(Out(v, channel) for v in vectors))
    attrs = {"activation": activation, "momentum": 0.2, "eps": 1e-3}
    forward = Case("BN_FWD", "", tuple(inputs), outs, attrs)
    result, dy = run(forward), draw(*shape, seed=4)
    first = dy * 0.25 if dys == 2 else dy
    given = [In("dy", first), In("x", operands["x"]), In("gamma", operands["gamma"])]
    given += [In("mean", result["saved_mean"]), In("inv_std", result["saved_inv_std"]), scalar("valid", valid, "i32")]
    given += [In("y", result["y"])] if activation != "none" else []
    given += [In("dy2", dy - first)] if dys == 2 else []
    grads = [Out("dx", shape), Out("dgamma", channel), Out("dbeta", channel)]
    grads += [Out("dresidual", shape)] if residual else []
    attrs = {"activation": activation, "dys": dys, "residual": residual}
    back = run(Case("BN_BWD", "", tuple(given), tuple(grads), attrs))
    got = {"x": back["dx"], "gamma": back["dgamma"], "beta": back["dbeta"]}
    check(forward, "y", dy, got | ({"residual": back["dresidual"]} if residual else {}))
    assert not back["dx"][valid:].any()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(kind: str) -> None:
    x, dy = draw(2, 3, 3, 5) * 4, draw(2, 3, 3, 5, seed=1)
    forward = Case("ACT_FWD", "", (In("x", x),), (Out("y", x.shape),), {"kind": kind})
    saved = x if kind in SAVES_INPUT else run(forward)["y"]
    back = run(Case("ACT_BWD", "", (In("dy", dy), In("saved", saved)), (Out("dx", x.shape),), {"kind": kind}))
    check(forward, "y", dy, {"x": back["dx"]})


def pair(
    op: str, shape: Sequence[int], out: Sequence[int], attrs: Mapping[str, Any], extra: Sequence[In] = ()
) -> tuple[Case, Callable[[F64, Sequence[In]], F64]]:
    """The forward case of an op with one input, and a function that runs its backward op."""
    forward = Case(f"{op}_FWD", "", (In("x", draw(*shape)), *extra), (Out("y", tuple(out)),), attrs)

    def backward(dy: F64, saved: Sequence[In]) -> F64:
        gradient = Case(f"{op}_BWD", "", (In("dy", dy), *saved), (Out("dx", tuple(shape)),), attrs)
        return run(gradient)["dx"]

    return forward, backward


@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 1, 1), (3, 2, 1), (4, 3, 2)])
def test_pooling(kernel: int, stride: int, pad: int) -> None:
    shape = (2, 6, 7, 3)
    out = (2, *((n + 2 * pad - kernel) // stride + 1 for n in shape[1:3]), 3)
    dy, geometry = draw(*out, seed=1), {"kernel": kernel, "stride": stride, "pad": pad}
    forward, backward = pair("MAXPOOL", shape, out, geometry)
    forward = replace(forward, outputs=(*forward.outputs, Out("index", out, "mask")))
    index = run(forward)["index"]
    check(forward, "y", dy, {"x": backward(dy, [In("index", index, "mask")])})
    for whole in (True, False):
        forward, backward = pair("AVGPOOL", shape, out, geometry | {"count_include_pad": whole})
        check(forward, "y", dy, {"x": backward(dy, [])})


def test_global_pooling_dropout_and_padding() -> None:
    dy = draw(2, 1, 1, 3, seed=1)
    forward, backward = pair("GAP", (2, 4, 5, 3), dy.shape, {})
    check(forward, "y", dy, {"x": backward(dy, [])})
    state = [scalar(k, v, "i32") for k, v in (("low", 12345), ("high", -7), ("step", 3))]
    dy = draw(2, 4, 5, 3, seed=2)
    forward, backward = pair("DROPOUT", dy.shape, dy.shape, {"p": 0.4, "layer": 2}, state)
    gradient = backward(dy, state)
    assert 0 < (gradient == 0).sum() < gradient.size
    check(forward, "y", dy, {"x": gradient})
    dy = draw(2, 4, 5, 8, seed=3)
    forward, backward = pair("CHANNEL_PADDING", (2, 4, 5, 3), dy.shape, {})
    check(forward, "y", dy, {"x": backward(dy, [])})
