"""Batch normalisation of CUDA on the emulator: against float64, in any order of threads, free of races.

A tensor with few rows takes one launch, any other three; both ways are held to the same promises.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from cuda_bench import FLOATS, check, measured, needs_compiler, run_case
from op_cases import Case, In
from op_sweep import Draw, folded_parameters, norm_backward, norm_forward, norm_inference, norms

from renaissance.backend.cuda import channel_tiles, launch_norm
from renaissance.core.dtype import DType
from renaissance.core.errors import DTypeError, ShapeError

pytestmark = needs_compiler

F64 = npt.NDArray[np.float64]
EPS, MOMENTUM = 1e-5, 0.1
WAYS = ("one launch", "three launches")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the norm is launched; the three take a tensor apart into as many chunks as they can."""
    if request.param == WAYS[1]:
        monkeypatch.setattr(channel_tiles, "FEW_ROWS", 0)
    return str(request.param)


def forms(shape: tuple[int, ...], valid: int, seed: int) -> Iterator[Case]:
    """Forward, backward and inference with everything that can be fused."""
    draw = Draw(20, seed)
    yield norm_forward(shape, valid, draw(*shape) + 1, draw, "relu6", True)
    yield norm_backward(shape, valid, draw, "relu", True, 2)
    yield norm_inference(shape, draw, "relu", True)


def replaced(case: Case, **values: F64) -> Case:
    """The case with other values of some of its inputs."""
    inputs = tuple(In(i.name, values.get(i.name, i.values), i.kind) for i in case.inputs)
    return Case(case.op, case.title, inputs, case.outputs, case.attrs)


def value_of(case: Case, name: str) -> F64:
    return next(np.asarray(i.values, np.float64) for i in case.inputs if i.name == name)


def test_every_form_agrees_with_float64(way: str) -> None:
    """Tensors whose channels are no packs take three launches anyway."""
    cases = (*norms(), *folded_parameters())
    packed = [case for case in cases if case.op in ("BN_FWD", "BN_BWD") and case.inputs[0].values.shape[3] % 8 == 0]
    check(cases if way == WAYS[0] else packed)


def test_packs_tiles_and_chunks_of_all_widths_agree_with_float64(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels: a pack, columns that leave threads over, several tiles, no multiple of a pack; rows: one chunk or many,
    the last one short, and a second pass that shares them out in every way."""
    monkeypatch.setattr(launch_norm, "CHUNKS_OF_A_STRIP", 1)
    shapes = (((3, 1, 1, 8), 2), ((3, 11, 23, 24), 3), ((3, 3, 5, 296), 2), ((2, 2, 1, 2048), 2), ((2, 9, 1, 1031), 1))
    for seed, (shape, valid) in enumerate(shapes):
        check(forms(shape, valid, seed), orders=(0, 5))
    if way == WAYS[1]:
        check(forms((5, 37, 25, 8), 4, 9), (DType.BF16,), orders=(0, 5))  # one column of packs


def test_rows_past_batch_valid_are_zero_and_count_for_nothing(way: str) -> None:
    shape = (4, 3, 5, 24)
    for valid in (1, 3):
        for case in (*forms(shape, valid, 30),):
            if case.op == "BN_INF":
                continue
            spoiled = {
                i.name: np.where(np.arange(4).reshape(4, 1, 1, 1) < valid, i.values, np.nan)
                for i in case.inputs
                if i.values.shape == shape
            }
            for f in FLOATS:
                clean, ours = measured(case, f), measured(replaced(case, **spoiled), f)
                for name, got in ours.items():
                    np.testing.assert_array_equal(got, clean[name], err_msg=f"{case.op} {name}, {way}")
                    assert got.shape != shape or not got[valid:].any(), name


def test_more_valid_samples_than_there_are_count_as_all(way: str) -> None:
    """The kernels do not read past the tensor."""
    for case in forms((2, 3, 5, 8), 2, 36):
        if case.op != "BN_INF":
            ours = measured(replaced(case, batch_valid=np.full((1, 1, 1, 1), 9)), DType.FP32)
            for name, got in measured(case, DType.FP32).items():
                np.testing.assert_array_equal(got, ours[name], err_msg=f"{case.op} {name}, {way}")


def test_without_a_valid_sample_statistics_stay_and_all_rows_are_zero(way: str) -> None:
    shape = (2, 3, 3, 16)
    forward, backward, _ = forms(shape, 2, 31)
    none = np.zeros((1, 1, 1, 1))
    for f in FLOATS:
        got = measured(replaced(forward, batch_valid=none), f)
        for ours, name in (("next_mean", "prev_mean"), ("next_var", "prev_var"), ("saved_mean", "prev_mean")):
            np.testing.assert_array_equal(
                got[ours], value_of(forward, name).astype(np.float32), err_msg=f"{ours}, {way}"
            )
        assert not got["y"].any()
        assert all(not values.any() for values in measured(replaced(backward, batch_valid=none), f).values())


@pytest.mark.parametrize(("mean", "odd"), [(1000.0, 0.0), (0.0, 50.0)])
def test_variance_keeps_its_digits_far_from_zero_and_after_odd_first_samples(way: str, mean: float, odd: float) -> None:
    """Sums of squares would lose six of seven digits; so would a shift by a first row that is no typical one."""
    shape = (4, 16, 8, 24)
    draw = Draw(32)
    x = (draw(*shape) + mean).astype(np.float32).astype(np.float64)
    x[0, 0] += odd
    case = norm_forward(shape, 4, x, draw, "none", False)
    got = measured(case, DType.FP32)
    rows = x.astype(np.float32).astype(np.float64).reshape(-1, 24)
    np.testing.assert_allclose(got["saved_mean"].ravel(), rows.mean(axis=0), atol=2.0**-23 * x.max())
    np.testing.assert_allclose(got["saved_inv_std"].ravel(), 1 / np.sqrt(rows.var(axis=0) + EPS), rtol=2e-6)
    gamma, beta = (value_of(case, name).ravel() for name in ("gamma", "beta"))
    want = (rows - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0) + EPS) * gamma + beta
    allowed = 2e-6 * (np.abs(want) + np.abs(gamma))  # the mean, rounded to float32, alone would be off by more
    assert (np.abs(got["y"].reshape(-1, 24) - want) <= allowed).all()


def test_a_constant_channel_has_no_variance(way: str) -> None:
    shape = (3, 20, 4, 6)
    case = norm_forward(shape, 3, np.full(shape, 1000.1), Draw(33), "none", False)
    got = measured(case, DType.FP32)
    np.testing.assert_allclose(got["saved_inv_std"], 1 / np.sqrt(EPS), rtol=1e-6)
    np.testing.assert_allclose(got["y"], np.broadcast_to(value_of(case, "beta"), shape), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_reaches_the_running_statistics_of_its_channel_only(way: str, bad: float) -> None:
    """Law 5: the NaN check sees it there, and nothing else that persists is touched."""
    shape = (4, 3, 3, 8)
    for place in ((0, 0, 0, 5), (1, 1, 0, 5)):
        draw = Draw(34)
        case = norm_forward(shape, 3, draw(*shape), draw, "relu6", False)
        x = value_of(case, "x").copy()
        x[place] = bad
        for f in FLOATS:
            clean, got = measured(case, f), measured(replaced(case, x=x), f)
            for name, values in got.items():
                seen = values[:3].reshape(-1, 8)
                assert not np.isfinite(seen[:, 5]).any(), f"{name}, {way}"
                assert name in ("saved_mean", "next_mean") or np.isnan(seen[:, 5]).all(), f"{name}, {way}"
                np.testing.assert_array_equal(np.delete(values, 5, axis=3), np.delete(clean[name], 5, axis=3))
    draw = Draw(37)
    alone = norm_forward((2, 1, 1, 8), 1, np.full((2, 1, 1, 8), 3.0), draw, "none", False)
    got = measured(replaced(alone, x=np.full((2, 1, 1, 8), bad)), DType.FP32)
    assert all(np.isnan(got[name][0]).all() for name in ("y", "saved_inv_std", "next_var")), way


def test_launches_and_chunks_follow_from_the_shape_only() -> None:
    """Law 2, and what a step costs: one launch for few rows, else three; enough blocks for a large device."""
    tiles = channel_tiles.ChannelTiles.make(DType.FP16, 256 * 56 * 56, 64)
    assert (tiles.pack, tiles.columns, tiles.tiles, tiles.rows, tiles.few_rows()) == (8, 8, 1, 32, None)
    chunk = tiles.chunk(launch_norm.PACKS_AT_ONCE, launch_norm.SUMMING_BLOCKS)
    assert chunk == 32 * 28
    assert tiles.grid(chunk) == (1, 896, 1)
    small = channel_tiles.ChannelTiles.make(DType.FP16, 128 * 4 * 4, 512).few_rows()
    assert small is not None
    assert (small[0].tiles, small[0].columns, small[1]) == (32, 2, (512, 1, 1))
    odd = channel_tiles.ChannelTiles.make(DType.FP32, 1000, 1031)
    assert (odd.suffix, odd.pack, odd.columns, odd.tiles) == ("f32_1", 1, 32, 33)
    deep = channel_tiles.ChannelTiles.make(DType.BF16, 256 * 7 * 7, 2048)
    assert (deep.columns, deep.tiles, deep.grid(deep.chunk(4, 1024))) == (8, 32, (32, 25, 1))


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    forward, backward, _ = forms((2, 3, 3, 8), 2, 35)
    odd = np.ones((1, 1, 1, 5))
    with pytest.raises(ShapeError, match=r"BN_FWD #7.*'gamma'"):
        run_case(replaced(forward, gamma=odd), DType.FP32)
    with pytest.raises(ShapeError, match=r"BN_BWD #7.*'dy2'"):
        run_case(replaced(backward, dy2=odd), DType.FP32)
    whole = tuple(In(i.name, i.values, "fp32") for i in forward.inputs if i.name == "residual")
    mixed = Case(forward.op, "mixed", (*forward.inputs[:-1], *whole), forward.outputs, forward.attrs)
    with pytest.raises(DTypeError, match=r"BN_FWD #7.*residual FP32"):
        run_case(mixed, DType.FP16)
