"""The oneDNN binding: found or refused by name, errors in words, working memory always the caller's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from renaissance.backend.cpu import threads
from renaissance.backend.cpu.onednn import DATA_TYPES, Arg, OneDnn, explain, onednn
from renaissance.backend.cpu.queue import NativeQueue
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError

LOAD = "from renaissance.backend.cpu.onednn import onednn; onednn()"


def run_with_library(path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RENAISSANCE_ONEDNN": str(path)}
    return subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=False)


def test_version_and_instruction_set_are_read_from_the_library() -> None:
    assert onednn().version.startswith("3.")
    assert onednn().isa


def test_a_library_that_is_not_there_is_named_with_what_to_install(tmp_path: Path) -> None:
    done = run_with_library(tmp_path / "libdnnl.so.3")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    for part in ("DeviceError", str(tmp_path), platform.machine(), "pip install onednn-cpu-iomp", "reference backend"):
        assert part in last


def test_another_library_is_refused() -> None:
    done = run_with_library(Path(onednn().library._name).with_name("libiomp5.so"))
    assert "is not oneDNN: it has no function dnnl_version" in done.stderr.strip().splitlines()[-1]


def test_a_build_that_would_not_keep_to_compute_threads_is_refused() -> None:
    """The TBB build starts a second pool of threads, as large as the machine, whatever compute_threads says."""

    class Function:
        def __call__(self) -> SimpleNamespace:
            return SimpleNamespace(contents=SimpleNamespace(major=3, minor=2, patch=0, cpu_runtime=4))

    names = ("dnnl_version", "dnnl_memory_desc_get_size", "dnnl_primitive_desc_query_md")
    library = SimpleNamespace(_name="libdnnl-tbb.so", **{name: Function() for name in names})
    with pytest.raises(DeviceError, match=r"libdnnl-tbb.so brings threads of its own \(runtime 4\); .* OpenMP"):
        OneDnn(library)  # type: ignore[arg-type]


def test_a_machine_the_kernels_are_not_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere LLVM ends the process at the x86 control word, so this comes before anything is compiled."""
    monkeypatch.setattr(threads, "_runtime", None)
    monkeypatch.setattr(threads.platform, "machine", lambda: "aarch64")
    with pytest.raises(DeviceError, match=r"for x86_64 and this machine is aarch64; use backend 'reference'"):
        threads.configure(1)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libdnnl.so.3").write_text("not a library")
    done = run_with_library(tmp_path / "libdnnl.so.3")
    assert "DeviceError" in done.stderr.strip().splitlines()[-1]


def test_a_refused_product_says_which_function_and_why() -> None:
    dnn = onednn()
    a = dnn.desc((2, 3), DType.FP32)
    with pytest.raises(DeviceError, match=r"dnnl_matmul_primitive_desc_create failed: oneDNN status \d \(.+\)"):
        dnn.matmul(a, a, None, a)
    assert explain(5) == "oneDNN status 5 (runtime error)"
    assert explain(99) == "oneDNN status 99 (unknown)"


@pytest.mark.parametrize("dtype", sorted(DATA_TYPES))
def test_sizes_of_descriptors_follow_the_element_type(dtype: DType) -> None:
    dnn = onednn()
    assert dnn.size(dnn.desc((3, 5), dtype)) == 15 * dtype.itemsize
    assert dnn.same_layout(dnn.desc((3, 5), dtype), dnn.desc((3, 5), dtype, (5, 1)))
    assert not dnn.same_layout(dnn.desc((3, 5), dtype), dnn.desc((3, 5), dtype, (1, 3)))


def test_inner_products_and_reorders_agree_with_numpy() -> None:
    dnn, rng = onednn(), np.random.default_rng(3)
    n, i, o = 6, 40, 20
    x, w, b, dy = (rng.standard_normal(s).astype(np.float32) for s in ((n, i), (o, i), (o,), (n, o)))
    y, dx, dw, db = (np.zeros(s, np.float32) for s in ((n, o), (n, i), (o, i), (o,)))
    xd, wd, bd, yd = (dnn.desc(s, DType.FP32) for s in ((n, i), (o, i), (o,), (n, o)))
    packed_desc = dnn.inner_product_forward(xd, dnn.any_desc((o, i), DType.FP32), bd, yd).layout("weights")
    packed = np.zeros(dnn.size(packed_desc), np.uint8)
    forward = dnn.inner_product_forward(xd, packed_desc, bd, yd, relu=True)
    pack = dnn.reorder(wd, packed_desc)
    data = dnn.inner_product_backward_data(xd, wd, yd, forward)
    weights = dnn.inner_product_backward_weights(xd, wd, bd, yd, forward)
    scratch = np.zeros(max(p.scratchpad for p in (forward, pack, data, weights)) + 64, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 64

    def operand(desc: object, array: np.ndarray) -> tuple[object, int]:
        return desc, int(array.ctypes.data)

    X, W, B, Y, P = operand(xd, x), operand(wd, w), operand(bd, b), operand(yd, y), operand(packed_desc, packed)
    NativeQueue(
        [
            pack.bind({Arg.SRC: W, Arg.DST: P}, at, "pack"),
            forward.bind({Arg.SRC: X, Arg.WEIGHTS: P, Arg.BIAS: B, Arg.DST: Y}, at, "forward"),
            data.bind({Arg.DIFF_SRC: operand(xd, dx), Arg.WEIGHTS: W, Arg.DIFF_DST: operand(yd, dy)}, at, "data"),
            weights.bind(
                {
                    Arg.SRC: X,
                    Arg.DIFF_WEIGHTS: operand(wd, dw),
                    Arg.DIFF_BIAS: operand(bd, db),
                    Arg.DIFF_DST: operand(yd, dy),
                },
                at,
                "weights",
            ),
        ],
        explain,
    ).launch()
    np.testing.assert_allclose(y, np.maximum(x @ w.T + b, 0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, dy @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, dy.T @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(db, dy.sum(0), rtol=1e-4, atol=1e-4)


def test_a_primitive_that_fails_in_a_replay_is_explained() -> None:
    dnn = onednn()
    a = dnn.desc((4, 4), DType.FP32)
    memory = np.zeros(16, np.float32)
    product = dnn.matmul(a, a, None, a)
    call = product.bind({Arg.SRC: (a, memory.ctypes.data)}, 0, "FC_FWD #3")
    with pytest.raises(DeviceError, match=r"FC_FWD #3: oneDNN status 2 \(invalid arguments\)"):
        NativeQueue([call], explain).launch()
