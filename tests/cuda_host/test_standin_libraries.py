"""The stand-ins for cuDNN and cuBLASLt compute what their specs say, and keep the rules of captures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import CudaError, FakeCuda, Race, StandInConvolutions, StandInProducts, device
from cuda_standin.libraries import load, store
from standin_bench import Bench

from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import ConvolutionSpec, Plan, ProductSpec
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError

F32 = DType.FP32


def run(bench: Bench, plan: Plan, shapes: list[tuple[int, ...]], dtypes: list[DType]) -> list[np.ndarray]:
    """Operands as the device holds them, and the result."""
    rng = np.random.default_rng(0)
    places = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = int(np.prod(shape)) * dtype.itemsize
        places.append(Buffer(bench.fake.malloc(size), size))
        store(places[-1].ptr, rng.standard_normal(shape, np.float32), dtype)
    work = bench.buffer(plan.workspace // 4, "workspace")
    plan.execute(bench.streams[0], *places, work)
    bench.wait()
    return [load(p.ptr, s, d) for p, s, d in zip(places, shapes, dtypes, strict=True)]


@pytest.mark.parametrize(("groups", "stride", "pad", "taps"), [(1, 1, 1, 3), (2, 2, 0, 3), (4, 2, 1, 1), (1, 2, 2, 5)])
def test_the_three_convolutions_belong_together(tmp_path: Path, groups: int, stride: int, pad: int, taps: int) -> None:
    bench = Bench(tmp_path)
    library = StandInConvolutions(bench.fake)
    specs = {d: ConvolutionSpec(d, 2, 7, 6, 4, 8, taps, taps, stride, pad, groups, F32) for d in Direction}
    spec = specs[Direction.FORWARD]
    x, w, y = (2, 7, 6, 4), (8, taps, taps, 4 // groups), (2, spec.out_h, spec.out_w, 8)
    types = [F32] * 3
    xs, ws, ys = run(bench, library.plan(spec), [x, w, y], types)
    expected = np.zeros(y)
    padded = np.pad(xs.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for n, i, j, k in np.ndindex(*y):
        first = k // (8 // groups) * (4 // groups)
        part = padded[n, i * stride : i * stride + taps, j * stride : j * stride + taps, first : first + 4 // groups]
        expected[n, i, j, k] = (part * ws[k]).sum()
    np.testing.assert_allclose(ys, expected, rtol=1e-4, atol=1e-4)
    dy, w2, dx = run(bench, library.plan(specs[Direction.DATA]), [y, w, x], types)
    _, _, image = run(bench, library.plan(spec), [x, w, y], types)
    dys, xs2, dw = run(bench, library.plan(specs[Direction.WEIGHT]), [y, x, w], types)
    # <dy, conv(x, w)> is the same product however it is taken
    forward = run_forward(bench, library.plan(spec), dx, w2, y)
    assert np.vdot(forward, dy) == pytest.approx(np.vdot(dx, dx), rel=1e-3)
    forward = run_forward(bench, library.plan(spec), xs2, dw, y)
    assert np.vdot(forward, dys) == pytest.approx(np.vdot(dw, dw), rel=1e-3)
    assert image.shape == y


def run_forward(bench: Bench, plan: Plan, x: np.ndarray, w: np.ndarray, y: tuple[int, ...]) -> np.ndarray:
    places = [bench.buffer(values.size, "operand") for values in (x, w)]
    for place, values in zip(places, (x, w), strict=True):
        store(place.ptr, values, F32)
    out = bench.buffer(int(np.prod(y)), "result")
    plan.execute(bench.streams[0], *places, out, bench.buffer(plan.workspace // 4, "workspace"))
    bench.wait()
    return load(out.ptr, y, F32)


@pytest.mark.parametrize("half", [DType.FP16, DType.BF16])
@pytest.mark.parametrize(("ta", "tb"), [(False, False), (True, False), (False, True)])
def test_products_are_rounded_once(tmp_path: Path, half: DType, ta: bool, tb: bool) -> None:
    bench = Bench(tmp_path)
    shapes = [(40, 3) if ta else (3, 40), (5, 40) if tb else (40, 5), (3, 5)]
    for result, unit in ((F32, 1e-6), (half, 2.0**-11 if half is DType.FP16 else 2.0**-8)):
        plan = StandInProducts(bench.fake).plan(ProductSpec(3, 5, 40, ta, tb, half, result))
        a, b, c = run(bench, plan, shapes, [half, half, result])
        exact = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b)
        assert np.abs(c - exact).max() <= unit * np.abs(exact).max() + 1e-5


def test_plans_are_made_before_a_capture_and_keep_to_their_buffers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    library = StandInProducts(bench.fake)
    spec = ProductSpec(4, 4, 4, False, False, F32, F32)
    a, b, c, d = (bench.buffer(16, name) for name in "abcd")
    work = bench.buffer(128, "workspace")
    bench.begin()
    with pytest.raises(DeviceError, match="a plan is made while a stream is capturing"):
        library.plan(spec)
    bench.end()
    plan = library.plan(spec)
    with pytest.raises(CudaError, match="the workspace has 4 bytes, 512 are needed"):
        plan.execute(bench.streams[0], a, b, c, work.part(0, 4))
    with pytest.raises(CudaError, match="the result has 32 bytes, 64 are needed"):
        plan.execute(bench.streams[0], a, b, c.part(0, 32), work)
    bench.begin()
    with pytest.raises(CudaError, match="the first use of product 4x4x4 is in a capture"):
        plan.execute(bench.streams[0], a, b, c, work)
    with pytest.raises(CudaError, match="Invalidated"):
        bench.end()
    plan.execute(bench.streams[0], a, b, c, work)
    bench.wait()
    bench.begin()
    assert library.plan(spec) is plan
    bench.after(1, 0)
    plan.execute(bench.streams[0], a, b, c, work)
    plan.execute(bench.streams[1], a, b, d, work)  # the same workspace on two streams
    bench.after(0, 1)
    with pytest.raises(Race, match="writes workspace"):
        bench.end()


@pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")
def test_a_device_on_the_stand_in_loads_kernels_once_and_gives_everything_back() -> None:
    fake = FakeCuda()
    with device(fake) as opened:
        functions = {opened.function("scalars", "stage_scalars") for _ in range(2)}
        assert len(functions) == fake.counts["moduleLoadData"] == 1
        assert opened.facts()["gpu"] == "stand-in"
        assert len(opened.streams) == 5
    assert not opened.streams
    fake.close()
