"""Every kernel compiles for every GPU with NVRTC alone, and takes no more of it than its launch needs."""

from __future__ import annotations

import sys
from pathlib import Path

import nvrtc_ahead
import pytest

from renaissance.backend.cuda import modules
from renaissance.backend.cuda.modules import KERNELS, Cubin, compile_cubin, cubin, image, images, target_of
from renaissance.core.errors import DeviceError

MOST_REGISTERS = 128
MOST_SHARED = 48 * 1024
LAUNCH_BOUNDS = 'extern "C" __global__ void __launch_bounds__(256) '


def why_without_nvrtc() -> str | None:
    try:
        compile_cubin("range", "90")
    except DeviceError as error:
        return str(error)
    return None


WITHOUT_NVRTC = why_without_nvrtc()
needs_nvrtc = pytest.mark.skipif(WITHOUT_NVRTC is not None, reason=f"no NVRTC: {WITHOUT_NVRTC}")


def complaints(name: str, arch: str, compiled: Cubin) -> list[str]:
    """What of a file's kernels goes over the limits."""
    found = []
    for kernel, r in compiled.resources.items():
        where = f"{name}.cu, {kernel}, sm_{arch}"
        if r.spills or r.stack:
            found.append(f"{where}: {r.spills} bytes of registers spilled, a stack of {r.stack} bytes")
        if r.registers > MOST_REGISTERS:
            found.append(f"{where}: {r.registers} registers; at most {MOST_REGISTERS}")
        if r.shared > MOST_SHARED:
            found.append(f"{where}: {r.shared} bytes of shared memory; at most {MOST_SHARED}")
    return found


@needs_nvrtc
def test_every_kernel_compiles_for_every_target_within_its_limits() -> None:
    compiled = nvrtc_ahead.results()
    names = {name: set(result.resources) for (name, _), result in compiled.items()}
    assert set(names) == {p.stem for p in KERNELS.glob("*.cu")}
    assert all(names.values())
    found: list[str] = []
    for (name, arch), result in compiled.items():
        assert result.image.startswith(b"\x7fELF")
        assert set(result.resources) == names[name], f"{name}.cu has other kernels for sm_{arch}"
        found += complaints(name, arch, result)
    assert found == []


@needs_nvrtc
def test_a_kernel_over_the_limits_is_found(tmp_path: Path) -> None:
    sums = " + ".join(f"v[{i}] * v[{255 - i}]" for i in range(256))
    bodies = {
        "spills": f"float v[256]; for (int i = 0; i < 256; ++i) v[i] = x[i * 7]; __syncthreads(); x[0] = {sums};",
        "stack": "float v[300]; for (int i = 0; i < 300; ++i) v[i] = x[i]; x[0] = v[(int)x[1]];",
        "shared": "__shared__ float v[12288 - 64]; v[threadIdx.x] = x[0]; __syncthreads(); x[0] = v[(int)x[1]];",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.cu").write_text(f"{LAUNCH_BOUNDS} {name}(float* x) {{ {body} }}\n")
    found = {name: compile_cubin(name, "90", tmp_path).resources[name] for name in bodies}
    assert found["spills"].registers == 255
    assert found["spills"].spills > 0
    assert found["stack"].stack >= 1200
    assert found["shared"].shared == 4 * (12288 - 64)
    said = [complaints(name, "90", Cubin(b"", {name: r})) for name, r in found.items()]
    assert [len(each) for each in said] == [2, 1, 0]


@needs_nvrtc
def test_a_file_that_does_not_compile_is_named_with_what_the_compiler_says(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text(LAUNCH_BOUNDS + "broken(float* y) { y[0] = INFINITY; }\n")
    with pytest.raises(
        DeviceError, match=r"(?s)broken\.cu: NVRTC cannot compile it for sm_80.*broken\.cu\(1\): error.*INFINITY"
    ):
        compile_cubin("broken", "80", tmp_path)
    with pytest.raises(DeviceError, match=r"missing\.cu: cannot be read"):
        compile_cubin("missing", "80")


@needs_nvrtc
def test_an_image_is_compiled_once_and_again_when_a_header_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (KERNELS / "range.cu", *KERNELS.glob("*.cuh")):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(modules, "KERNELS", tmp_path)
    compiled: list[str] = []
    original = compile_cubin

    def counted(name: str, arch: str) -> Cubin:
        compiled.append(arch)
        return original(name, arch, tmp_path)

    monkeypatch.setattr(modules, "compile_cubin", counted)
    first = images("90")("range")
    assert image("range", "90") == first
    assert compiled == ["90"]
    assert image("range", "80") != first
    assert cubin("range", "90").resources
    assert compiled == ["90", "80"]
    with (tmp_path / "dialect.cuh").open("a") as file:
        file.write("\n")
    assert image("range", "90") == first
    assert compiled == ["90", "80", "90"]
    (kept, *_) = sorted((tmp_path / "cache").rglob("range-sm_80*"))
    kept.write_bytes(first[:100])
    image("range", "80")
    assert compiled == ["90", "80", "90", "80"]


def test_a_damaged_image_is_made_again_and_a_full_disk_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Cubin(bytes(range(256)) * 4, {"kernel": modules.Resources(12, 0, 0, 0)})
    compiled: list[str] = []

    def compile_it(name: str, arch: str) -> Cubin:
        compiled.append(name)
        return made

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(modules, "_state", lambda name: "state")
    monkeypatch.setattr(modules, "compile_cubin", compile_it)
    assert cubin("a", "90") == cubin("a", "90") == made
    assert compiled == ["a"]
    (kept,) = tmp_path.rglob("*.cubin")
    whole = kept.read_bytes()
    for damaged in (*(whole[:at] + b"\xff" + whole[at + 1 :] for at in range(0, len(whole), 41)), b"", whole[:-1]):
        if damaged != whole:
            compiled.clear()
            kept.write_bytes(damaged)
            assert cubin("a", "90") == made
            assert compiled == ["a"]
            assert kept.read_bytes() == whole
    kept.unlink()
    kept.mkdir()  # as good as a disk without space
    assert cubin("a", "90") == made
    assert "compiled kernels are not kept" in caplog.text


def test_a_gpu_gets_the_code_of_its_generation() -> None:
    given = {"75": "75", "80": "80", "86": "80", "87": "80", "89": "80", "90": "90", "100": "100", "103": "100"}
    assert {c: target_of(c) for c in given} == given
    assert target_of("121") == "120"
    for other in ("70", "61", "110"):
        with pytest.raises(
            DeviceError, match=rf"compute capability {other[:-1]}\.{other[-1]}; there are some for 7\.5, 8"
        ):
            images(other)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modules._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceError, match=r"need CuPy.*pip install 'renaissance\[cuda12\]'"):
        compile_cubin("range", "90")
    monkeypatch.undo()
    modules._nvrtc.cache_clear()
