"""Every algorithm for convolutions against float64, on shapes that cut its tiles, blocks and chunks; and the rule."""

from __future__ import annotations

import pytest
from conv_harness import DTYPES, FLOAT_EPS, Conv, check_all, infer_exact, weight_exact

from renaissance.backend.convolution import Direction
from renaissance.backend.cpu import conv_choice, conv_unfold
from renaissance.backend.cpu.conv_algorithms import Job, LibraryBackwardData
from renaissance.backend.cpu.onednn import onednn
from renaissance.backend.cpu.onednn_primitives import STRIDED, ConvShape
from renaissance.core.dtype import DType

WINOGRAD_SHAPES = [
    # n, h, w, c, k, r, stride, pad: whole tiles, cut tiles, several blocks of tiles, one tile, many channels, every pad
    (1, 4, 4, 32, 32, 3, 1, 1),
    (3, 7, 9, 32, 64, 3, 1, 1),
    (9, 9, 8, 96, 32, 3, 1, 1),
    (2, 6, 5, 64, 128, 3, 1, 0),
    (2, 5, 5, 160, 128, 3, 1, 2),
]
TILE_ERROR = {"winograd 4x4": 16 * FLOAT_EPS, "winograd 2x2": 2.0**-7}
"""Rounding errors of the transforms, in parts of the largest sum of magnitudes: F(2x2) rounds its operands to bf16 once
more."""


def prefer(name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rule take this algorithm; skips the test where the CPU cannot run it."""
    probe = Job(Direction.WEIGHT, ConvShape(1, 4, 4, 32, 32, 3, 3, 1, 1, 1, 4, 4), dtype, 1, "")
    if name not in [a.name for a in conv_choice.supported(probe)]:
        pytest.skip(f"{name} does not run on this CPU")
    monkeypatch.setattr(conv_choice, "_rank", lambda job, candidate: int(candidate != name))


@pytest.mark.parametrize(("name", "dtype"), [("winograd 4x4", t) for t in DTYPES] + [("winograd 2x2", DType.BF16)])
def test_winograd_equals_float64(name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(name, dtype, monkeypatch)
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
        prefer(name, dtype, monkeypatch)
        for size in ((5, 12, 12, 96, 64, 3, 1, 1), (3, 6, 6, 160, 128, 3, 1, 1)):
            results = []
            for threads in (1, 2, 3):
                c = Conv(*size, dtype=dtype, threads=threads)
                c.forward("relu")
                c.backward_weight()
                c.backward_data()
                results.append([c.bench.array(c.ids[operand]).tobytes() for operand in ("y", "dw", "db", "dx")])
            assert results[0] == results[1] == results[2]


def test_the_unfolded_weight_gradient_equals_float64_and_does_not_depend_on_the_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefer("unfold", DType.BF16, monkeypatch)
    monkeypatch.setattr(conv_unfold, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr(conv_unfold, "LEAST_STEPS", 24)
    for size in (
        (1, 1, 1, 32, 16, 1),
        (3, 9, 7, 64, 32, 3, 2, 1),
        (9, 9, 9, 96, 80, 1),
        (3, 9, 9, 32, 48, 1, 2),
        (2, 11, 11, 32, 16, 7, 2, 3),
    ):
        results = []
        for threads in (1, 2, 3):
            c = Conv(*size, dtype=DType.BF16, threads=threads)
            c.backward_weight()
            results.append([c.bench.array(c.ids[name]).tobytes() for name in ("dw", "db")])
        assert results[0] == results[1] == results[2]
        x, dy = c.exact["x"], c.exact["dy"]
        c.check("dw", weight_exact(c, x, dy), weight_exact(c, abs(x), abs(dy)), dy[..., 0].size)
        c.check("db", dy.sum((0, 1, 2), keepdims=True), abs(dy).sum((0, 1, 2), keepdims=True), dy[..., 0].size)


def test_the_rule_takes_an_algorithm_only_where_it_saves() -> None:
    def rule(
        dtype: DType,
        direction: Direction = Direction.WEIGHT,
        *,
        n: int = 32,
        h: int = 16,
        c: int = 64,
        r: int = 3,
        stride: int = 1,
    ) -> str:
        out = (h - 1) // stride + 1
        job = Job(direction, ConvShape(n, h, h, c, c, r, r, stride, r // 2, 1, out, out), dtype, 2, "")
        return str(conv_choice.supported(job)[0].name)

    isa = onednn().isa
    if not isa.startswith("avx512"):
        pytest.skip("no AVX-512")
    assert rule(DType.FP32) == "winograd 4x4"
    others = (rule(DType.FP32, n=1, h=4), rule(DType.FP32, h=2), rule(DType.FP32, r=1), rule(DType.FP32, stride=2))
    assert set(others) == {"onednn"}
    assert rule(DType.FP32, c=24) == "onednn"
    if "bf16" in isa or "amx" in isa:
        assert rule(DType.BF16) == "winograd 2x2"
        assert rule(DType.BF16, stride=2, c=256) == rule(DType.BF16, r=1) == "unfold"
        assert rule(DType.BF16, Direction.DATA, stride=2) == "onednn"
        assert rule(DType.BF16, Direction.FORWARD) == ("onednn" if "amx" in isa else "winograd 2x2")


def test_depthwise_data_gradients_pass_over_the_slow_implementation() -> None:
    """oneDNN 3.2 offers for stride 2 one that takes twenty times as long as the next."""
    for dtype in DTYPES:
        job = Job(Direction.DATA, ConvShape(2, 16, 16, 48, 48, 3, 3, 2, 1, 48, 8, 8), dtype, 1, "")
        if LibraryBackwardData.supports(job):
            assert not LibraryBackwardData(job).primitive.implementation.startswith((STRIDED, "ref"))
