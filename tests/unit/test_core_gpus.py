"""Which GPUs there are: every way in which CUDA cannot be reached ends in words, with a small stand-in for CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from renaissance.core.errors import DeviceError
from renaissance.core.gpus import CUPY_FOLDER, Gpu, usable_gpus, visible_gpus


class CudaFailed(RuntimeError):
    """As CuPy raises it."""


def install(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[bytes, int, int]], error: str = "", driver: int = 12080
) -> None:
    """Put a CuPy with these GPUs, or this error, where it is imported from."""
    runtime = ModuleType("cupy.cuda.runtime")

    def count() -> int:
        if error:
            raise CudaFailed(error)
        return len(gpus)

    names = ("name", "major", "minor", "multiProcessorCount")
    runtime.CUDARuntimeError = CudaFailed  # type: ignore[attr-defined]
    runtime.getDeviceCount = count  # type: ignore[attr-defined]
    runtime.getDeviceProperties = lambda i: dict(zip(names, (*gpus[i], 40), strict=True))  # type: ignore[attr-defined]
    runtime.driverGetVersion = lambda: driver  # type: ignore[attr-defined]
    runtime.runtimeGetVersion = lambda: 12090  # type: ignore[attr-defined]
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.runtime = runtime  # type: ignore[attr-defined]
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)


def test_gpus_are_found_with_name_capability_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [(b"NVIDIA H200", 9, 0), (b"Tesla T4", 7, 5)])
    assert visible_gpus() == (Gpu(0, "NVIDIA H200", (9, 0), 40), Gpu(1, "Tesla T4", (7, 5), 40))
    assert usable_gpus(None) == (0, 1)
    assert usable_gpus((1,)) == (1,)


@pytest.mark.parametrize(
    ("error", "driver", "words"),
    [
        ("cudaErrorInsufficientDriver: too old", 0, "there is no NVIDIA driver for CUDA here .*install one"),
        (
            "cudaErrorInsufficientDriver: too old",
            11080,
            r"driver is for CUDA 11.8, older than CuPy's 12.9 .*newer driver",
        ),
        ("cudaErrorNoDevice: none", 12090, r"the NVIDIA driver shows no GPU \(cudaErrorNoDevice\); see nvidia-smi"),
        ("cudaErrorSystemNotReady: fabric", 12090, "CUDA cannot be started: cudaErrorSystemNotReady: fabric"),
    ],
)
def test_every_reason_is_said_in_words(monkeypatch: pytest.MonkeyPatch, error: str, driver: int, words: str) -> None:
    install(monkeypatch, [], error, driver)
    with pytest.raises(DeviceError, match=words):
        usable_gpus((0,))


def test_without_cupy_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceError, match=r"package cupy.* is not installed.*pip install 'renaissance\[cuda12\]'"):
        visible_gpus()


def test_a_broken_cupy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "cupy":
                raise ImportError("\n=====\nlibcudart.so.12: cannot open shared object file\nmore\n")

    for name in [n for n in sys.modules if n == "cupy" or n.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        DeviceError, match=r"cannot be imported: libcudart\.so\.12: cannot open shared object file; pip"
    ):
        visible_gpus()


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed (extra cuda12)")
def test_cupy_itself_is_asked_as_it_wants_to_be() -> None:
    """On a machine without a GPU it gives a reason, else names and capabilities."""
    reason, found = "", ()
    try:
        found = visible_gpus()
    except DeviceError as error:
        reason = str(error)
    assert "NVIDIA" in reason or all(gpu.capability >= (3, 0) and gpu.name for gpu in found)


LOOKING = """
import os
from renaissance.core.errors import DeviceError
from renaissance.core.gpus import CUPY_FOLDER, visible_gpus
try:
    print(visible_gpus())
except DeviceError as error:
    print(error)
print("environment", CUPY_FOLDER in os.environ)
"""


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
def test_a_home_that_cannot_be_written_does_not_keep_cupy_from_being_imported() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CUPY_"))}
    for more, words in (({}, "environment False"), ({CUPY_FOLDER: "/proc/no"}, "CuPy cannot make its folder: ")):
        told = subprocess.run(
            [sys.executable, "-c", LOOKING],
            env={**environ, "HOME": "/proc/none", **more},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert words in told
        assert ("folder" in told) == bool(more), told
