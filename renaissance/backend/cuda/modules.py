"""kernels/*.cu for a GPU: compiled by NVRTC when first needed and kept, without a CUDA toolkit and without a driver.

A compiled image is machine code for one target (no PTX), so that a driver older than NVRTC runs it. What is kept is
named after everything that goes into it: sources, options, target and version of NVRTC.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from renaissance.core.errors import DeviceError, RenaissanceError
from renaissance.core.files import written_when_complete
from renaissance.core.gpus import INSTALL, importing_cupy
from renaissance.core.kernel_cache import UNUSED_SECONDS, cache_folder
from renaissance.core.log import get_logger

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
"""Beside the package, in a checkout and where it is installed. Not found by its name as a package: that would also take
a folder of this name in the user's working directory."""
TARGETS = ("75", "80", "90", "100", "120")
"""Compute capabilities that kernels are compiled for. Their code also runs on later minor versions: that of 8.0 on 8.6
and 8.9."""
OPTIONS = ("--std=c++17", "-ftz=true", "--ptxas-options=-v")
"""-ftz: numbers below the smallest normal one are 0, as on the CPU."""
_RESOURCES = b"\nresources of its kernels:\n"
"""Between an image and the table of its kernels, in a kept file; a digest of both is its end."""
_DIGEST_BYTES = 16

_log = get_logger("backend.cuda.modules")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a thread (registers, bytes of stack and of spilled registers) and a block (bytes of shared memory) take."""

    registers: int
    shared: int
    stack: int
    spills: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A loadable image, and what each of its kernels takes."""

    image: bytes
    resources: Mapping[str, Resources]


def target_of(capability: str) -> str:
    """The target whose code runs on a GPU of this compute capability (without its point: "90").

    Raises DeviceError for a GPU that is older than all targets, or of a generation that has none.
    """
    major = capability[:-1]
    fitting = [t for t in TARGETS if t[:-1] == major and int(t) <= int(capability)]
    if not fitting:
        have = ", ".join(f"{t[:-1]}.{t[-1]}" for t in TARGETS)
        raise DeviceError(
            f"no kernels for a GPU of compute capability {major}.{capability[-1]}; there are some for {have} "
            "and later minor versions of these"
        )
    return fitting[-1]


def images(capability: str) -> Callable[[str], bytes]:
    """A function that gives the image of kernels/NAME.cu for a GPU of this compute capability.

    Raises DeviceError as ``target_of`` does; the function raises it as ``compile_cubin`` does.
    """
    return partial(image, arch=target_of(capability))


def image(name: str, arch: str) -> bytes:
    """The machine code of kernels/``name``.cu for a target. Raises DeviceError as ``compile_cubin`` does."""
    return cubin(name, arch).image


def cubin(name: str, arch: str) -> Cubin:
    """kernels/``name``.cu for a target, from the user's cache where it has been compiled before.

    Raises DeviceError as ``compile_cubin`` does.
    """
    folder, stem = cache_folder("cuda-kernels"), f"{name}-sm_{arch}-"
    kept = folder / f"{stem}{_state(name)}.cubin"
    found = _read(kept)
    if found is not None:
        with suppress(OSError):
            os.utime(kept)
        return found
    made = compile_cubin(name, arch)
    body = made.image + _RESOURCES + json.dumps({k: astuple(r) for k, r in made.resources.items()}).encode()
    try:
        with written_when_complete(kept) as file:
            file.write(body + _digest(body))
    except (OSError, RenaissanceError) as error:  # it costs time in the next run, and nothing else
        _log.warning("compiled kernels are not kept, so the next run compiles them again: %s", error)
    for old in folder.glob(f"{stem}*.cubin"):
        with suppress(OSError):  # another process has removed it
            if old.stat().st_mtime < time.time() - UNUSED_SECONDS:
                old.unlink()
    return made


def _read(kept: Path) -> Cubin | None:
    """What was kept; None when there is nothing, or it is damaged: a GPU would run whatever it holds."""
    try:
        whole = kept.read_bytes()
    except OSError:
        return None
    body, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    if _digest(body) != digest:
        _log.info("%s is damaged, or of an older release, and made again", kept)
        return None
    found, _, table = body.partition(_RESOURCES)
    return Cubin(found, {kernel: Resources(*numbers) for kernel, numbers in json.loads(table).items()})


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def compile_cubin(name: str, arch: str, folder: Path = KERNELS) -> Cubin:
    """Compile ``folder``/``name``.cu for a target; needs neither a GPU nor its driver.

    Raises DeviceError with NVRTC's messages when it does not compile, and naming what to install when CuPy, NVRTC or
    CUDA's headers are missing.
    """
    path = folder / f"{name}.cu"
    source = _text(path)
    nvrtc, options = _nvrtc(), (f"-arch=sm_{arch}", *OPTIONS, f"-I{KERNELS}", f"-I{_headers()}")
    program = nvrtc.createProgram(source, path.name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return Cubin(nvrtc.getCUBIN(program), _resources(nvrtc.getProgramLog(program)))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DeviceError(f"{path}: NVRTC cannot compile it for sm_{arch}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _state(name: str) -> str:
    """A digest of a source file and all it may include, the options and the version of the compiler."""
    files = [KERNELS / f"{name}.cu", *sorted(KERNELS.glob("*.cuh"))]
    parts = [(p.name, _text(p)) for p in files]
    return hashlib.sha256(repr((parts, OPTIONS, _nvrtc().getVersion())).encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DeviceError(f"{path}: cannot be read: {error.strerror}; is the installation complete?") from error


@cache
def _nvrtc() -> Any:
    """CuPy's binding; the library is there."""
    try:
        with importing_cupy():
            from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise DeviceError(f"GPUs need CuPy, which cannot be imported: {error}; {INSTALL}") from error
    except RuntimeError as error:  # what CuPy raises when it cannot load the library
        raise DeviceError(f"NVRTC, the compiler of kernels, cannot be loaded: {error}; {INSTALL}") from error
    return nvrtc


@cache
def _headers() -> str:
    """The folder with cuda_fp16.h."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise DeviceError(f"the headers of CUDA's runtime are missing; {INSTALL}")
    return str(found)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'.*?\n(.*?)(?=Compiling entry function|\Z)", re.DOTALL)


def _resources(log: str) -> dict[str, Resources]:
    """From what ptxas says about each kernel."""

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return {
        name: Resources(
            registers=number(r"Used (\d+) registers", text),
            shared=number(r"(\d+) bytes smem", text),
            stack=number(r"(\d+) bytes stack frame", text),
            spills=number(r"(\d+) bytes spill stores", text),
        )
        for name, text in _ENTRY.findall(log)
    }
