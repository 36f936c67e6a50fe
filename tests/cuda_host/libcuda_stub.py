"""A libcuda.so.1 without a driver, so that cuDNN plans convolutions where there is no GPU.

cuDNN's runtime-compiled engines link libcuda.so.1. Every function here says CUDA_ERROR_NO_DEVICE, except those with
which a compiled kernel is loaded while a plan is built: they succeed and do nothing. It goes on the LD_LIBRARY_PATH of
a test's own subprocess only; nothing can run on it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

NO_DEVICE = 100
LOADS = re.compile(
    r"cuLibraryLoadData|cuLibraryGetKernel|cuKernelGetFunction|cuModuleLoadData\w*|cuModuleGetFunction"
    r"|cu(Kernel|Func)(Set|Get)Attribute\w*"
)
"""What succeeds: a plan is built with these, and nothing is run."""


def missing() -> str | None:
    """What is lacking for the stub, in words; None when it can be built."""
    if shutil.which("gcc") is None:
        return "no gcc for the stand-in of libcuda.so.1"
    return None if header() is not None else "no cuda.h (nvidia-cuda-runtime-cu12)"


def header() -> Path | None:
    """The wheel's cuda.h."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    folder = find_nvidia_header_directory("cudart")
    path = Path(folder) / "cuda.h" if folder else None
    return path if path is not None and path.is_file() else None


def build(folder: Path) -> Path:
    """Build libcuda.so.1 in ``folder`` and return the folder, for LD_LIBRARY_PATH."""
    found = header()
    if found is None:
        raise FileNotFoundError("cuda.h: install nvidia-cuda-runtime-cu12")
    text = found.read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", text))
    names |= {f"{name}_v2" for name in names}  # cuda.h renames many by #define name name_v2
    lines = [
        f"int {name}(void** out) {{ static int handle; if (out) *out = &handle; return 0; }}"
        if LOADS.fullmatch(name) and "Attribute" not in name
        else f"int {name}(void) {{ return {0 if LOADS.fullmatch(name) else NO_DEVICE}; }}"
        for name in sorted(names)
    ]
    source = folder / "libcuda.c"
    source.write_text("\n".join(lines) + "\n")
    command = ["gcc", "-shared", "-fPIC", "-O0", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(source)], check=True)
    return folder
