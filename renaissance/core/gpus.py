"""Which GPUs this process could train on, asked of CUDA through CuPy; nothing is started on them.

CuPy is imported when somebody asks for a GPU, and not before: a machine without one needs neither it nor a driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from renaissance.core.errors import DeviceError
from renaissance.core.kernel_cache import cache_folder

MIN_CAPABILITY = (7, 5)
"""Compute capability that the kernels are written for: Turing and later."""
INSTALL = "pip install 'renaissance[cuda12]' (for a driver of CUDA 12) or 'renaissance[cuda13]'"
WORLD_SIZES = (1, 2, 4, 8)
"""How many GPUs a run may have: the batch is shared and means are taken over a power of two."""
CUPY_FOLDER = "CUPY_CACHE_DIR"
"""Environment variable with CuPy's folder for kernels of its own, which are not used here."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A visible GPU; ``capability`` is (major, minor)."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int = 0

    def __str__(self) -> str:
        return f"{self.index} ({self.name})"


@contextmanager
def importing_cupy() -> Iterator[None]:
    """Around an import of CuPy. It makes its folder as it is imported, and fails where there is no home, or one that
    cannot be written, as in many containers; then it is given another one."""
    if "cupy" in sys.modules or CUPY_FOLDER in os.environ or find_spec("cupy") is None:
        yield
        return
    try:
        os.makedirs(os.path.expanduser("~/.cupy/kernel_cache"), exist_ok=True)
    except OSError:
        os.environ[CUPY_FOLDER] = str(cache_folder("cupy"))
    try:
        yield
    finally:
        os.environ.pop(CUPY_FOLDER, None)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows this process, in CUDA's order. Raises DeviceError that says why there are none."""
    try:
        with importing_cupy():
            from cupy.cuda import runtime
    except ModuleNotFoundError as error:
        raise DeviceError(f"package {error.name} is not installed, which CUDA is reached through: {INSTALL}") from None
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be imported: {_line(error)}; {INSTALL}") from None
    except OSError as error:
        raise DeviceError(f"CuPy cannot make its folder: {error}; {CUPY_FOLDER} in the environment names it") from None
    try:
        count: int = runtime.getDeviceCount()
        found = [(index, runtime.getDeviceProperties(index)) for index in range(count)]
    except runtime.CUDARuntimeError as error:
        raise DeviceError(_why(str(error), runtime.driverGetVersion(), runtime.runtimeGetVersion())) from None
    return tuple(
        Gpu(i, bytes(p["name"]).decode(errors="replace"), (p["major"], p["minor"]), p["multiProcessorCount"])
        for i, p in found
    )


def driver_version() -> str:
    """The newest CUDA that the NVIDIA driver can run, e.g. "12.8"; "none" without a driver or CuPy."""
    try:
        with importing_cupy():
            from cupy.cuda import runtime
    except ImportError:
        return "none"
    return _version(runtime.driverGetVersion()) if runtime.driverGetVersion() else "none"


def usable_gpus(wanted: Sequence[int] | None) -> tuple[int, ...]:
    """``wanted`` when all of them can be trained on; all visible ones for None.

    Raises DeviceError with the reason and what to do about it.
    """
    visible = visible_gpus()
    there = f"visible: {', '.join(map(str, visible)) or 'none'}"
    if wanted is None:
        if len(visible) not in WORLD_SIZES:
            raise DeviceError(
                f"{len(visible)} GPUs are visible, a run takes 1, 2, 4 or 8 of them; name those to use, such as"
                f' use_gpu("0") ({there})'
            )
        wanted = [gpu.index for gpu in visible]
    known = {gpu.index: gpu for gpu in visible}
    missing = [str(index) for index in wanted if index not in known]
    if missing:
        raise DeviceError(f"there is no GPU {', '.join(missing)}; {there}; CUDA_VISIBLE_DEVICES decides what is")
    for gpu in (known[index] for index in wanted):
        if gpu.capability < MIN_CAPABILITY:
            raise DeviceError(
                f"GPU {gpu} has compute capability {_dotted(gpu.capability)}; expected at least"
                f" {_dotted(MIN_CAPABILITY)} (Turing); choose another one ({there})"
            )
    return tuple(wanted)


def _why(error: str, driver: int, runtime: int) -> str:
    """What an error of CUDA means; versions are 1000 * major + 10 * minor, 0 without a driver."""
    if "cudaErrorInsufficientDriver" in error and driver == 0:
        return (
            f"there is no NVIDIA driver for CUDA here ({_name(error)}); install one, or give the container access to"
            " the GPUs"
        )
    if "cudaErrorInsufficientDriver" in error:
        return (
            f"the NVIDIA driver is for CUDA {_version(driver)}, older than CuPy's {_version(runtime)} ({_name(error)});"
            " install a newer driver, or the CuPy of an older CUDA"
        )
    if "cudaErrorNoDevice" in error:
        return f"the NVIDIA driver shows no GPU ({_name(error)}); see nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return f"CUDA cannot be started: {error}; see nvidia-smi"


def _name(error: str) -> str:
    return error.partition(":")[0]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _line(error: BaseException) -> str:
    """The first line that says something: CuPy's explanations are pages."""
    return next((line.strip(" =") for line in str(error).splitlines() if line.strip(" =")), type(error).__name__)
