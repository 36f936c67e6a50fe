"""A .cu file to a shared library by way of g++, kept by content: an unchanged file is built once per user."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from renaissance.core.kernel_cache import cache_folder

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels"
"""Where #include finds dialect.cuh."""
MOST_DYNAMIC_BYTES = 99 * 1024
"""Dynamic shared memory that a launch may ask for: what every target from sm_80 on has."""
_DYNAMIC_ARRAY_BYTES = MOST_DYNAMIC_BYTES + 512
_COMMON = ("-std=c++17", "-fPIC", "-w", f"-DEMULATOR_DYNAMIC_BYTES={_DYNAMIC_ARRAY_BYTES}")
# A product and a sum are rounded one by one everywhere; local-dynamic: shared memory is one block of thread storage.
_KERNEL = ("-O1", "-fno-exceptions", "-ffp-contract=off", "-fvisibility=hidden", "-ftls-model=local-dynamic")
_CHECKS = "-fsanitize=bounds,alignment,null,shift,integer-divide-by-zero,signed-integer-overflow"
_RACES = "-fsanitize=thread"
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_PROCESSOR = ("-mf16c",) if _IS_X86 else ()

_KERNEL_NAME = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\(([^,()]*(?:\([^()]*\)[^,()]*)*)(?:,[^()]*)?\)\s*)?(\w+)\s*\('
)
_DYNAMIC_ARRAY = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]"
)


class KernelError(RuntimeError):
    """A kernel is wrong, or was called wrongly; the message says which, where and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One extern "C" kernel, written out or from a macro."""

    name: str
    bound: str
    """Of __launch_bounds__, an expression; "0" without one."""
    restrict: tuple[bool, ...]
    """Which parameters are __restrict__ pointers."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file as the compiler sees it: everything it includes, with macros expanded, but not the device dialect."""

    path: Path
    text: str
    kernels: tuple[Entry, ...]
    dynamic_arrays: tuple[tuple[str, str], ...]
    """Element type and name of every array of dynamic shared memory."""


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


def scan(path: Path) -> Source:
    """Find the kernels of a file. Raises KernelError when it cannot be read or holds none."""
    done = _run("-E", "-std=c++17", "-I", str(HERE / "include/scan"), "-I", str(KERNELS), "-x", "c++", str(path))
    code = re.sub(r"^#.*$", "", done, flags=re.MULTILINE)
    kernels = tuple(
        Entry(
            m[2],
            (m[1] or "0").strip(),
            tuple("__restrict__" in p for p in code[m.end() : code.index(")", m.end())].split(",")),
        )
        for m in _KERNEL_NAME.finditer(code)
    )
    if not kernels:
        raise KernelError(f'{path}: has no kernel; expected functions that are extern "C" __global__ void')
    return Source(path, done, kernels, tuple(sorted(set(_DYNAMIC_ARRAY.findall(code)))))


def _parameters(code: str, start: int) -> list[str]:
    return code[start : code.index(")", start)].split(",")


def build(source: Source, *, race: bool) -> Path:
    """The shared library of a file, with checks of indices and addresses or with the race check."""
    lines = [
        '#include "cuda_fp16.h"',
        '#include "cuda_bf16.h"',
        f'#include "{source.path.resolve()}"',
        *(f"alignas(16) thread_local {t} {n}[EMULATOR_DYNAMIC_BYTES / sizeof({t})];" for t, n in source.dynamic_arrays),
        f"#define EMULATOR_DYNAMIC_ARRAYS {''.join(f'(void*){n}, ' for _, n in source.dynamic_arrays)}",
        *(f"EMULATOR_EXPORT({kernel.name}, ({kernel.bound}))" for kernel in source.kernels),
        "",
    ]
    flags = (*_COMMON, *_KERNEL, *_PROCESSOR, _RACES if race else _CHECKS, "-I", str(KERNELS))
    name = source.path.stem + (".race" if race else "")
    return _built(name, "\n".join(lines), flags, content=source.text)


@cache
def scheduler() -> ctypes.PyDLL:
    """The scheduler, loaded for all modules to link to."""
    path = _built("scheduler", (HERE / "scheduler.cpp").read_text(), (*_COMMON, "-O2"), content="")
    library = ctypes.PyDLL(str(path), ctypes.RTLD_GLOBAL)
    library.emulator_error.restype = ctypes.c_char_p
    library.emulator_set_order.argtypes = [ctypes.c_int]
    return library


@cache
def _own_state() -> str:
    """A digest of what every build depends on beside its own text."""
    files = sorted(p for p in HERE.rglob("*") if p.suffix in (".h", ".cpp"))
    return hashlib.sha256("".join((*(p.read_text() for p in files), _run("-dumpfullversion"))).encode()).hexdigest()[
        :12
    ]


def _built(name: str, text: str, flags: tuple[str, ...], *, content: str) -> Path:
    state = hashlib.sha256(repr((text, flags, content)).encode()).hexdigest()[:20]
    folder = cache_folder(f"kernels-emulator-{_own_state()}")
    library = folder / f"{name}.{state}.so"
    if not library.exists():
        # Several processes may build the same file at once: each under its own name, the last one to finish stays.
        mine = folder / f".{name}.{state}.{os.getpid()}.{secrets.token_hex(4)}"
        code, thing, done = (mine.with_name(mine.name + ending) for ending in (".cpp", ".o", ".so"))
        try:
            code.write_text(text)
            # Compiled and linked apart: g++ -shared -fsanitize=thread would link the sanitizer's library.
            _run(*flags, "-I", str(HERE / "include"), "-c", str(code), "-o", str(thing))
            _run("-shared", str(thing), "-o", str(done), "-lm")
            done.replace(library)
        finally:
            for file in (code, thing, done):
                file.unlink(missing_ok=True)
    return library


def _run(*arguments: str) -> str:
    program = compiler()
    if program is None:
        raise KernelError("no g++ on this machine; the emulator of CUDA kernels needs one")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"g++ failed:\n{done.stderr[:4000]}")
    return done.stdout.strip()
