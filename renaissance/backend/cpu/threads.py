"""The one OpenMP runtime of the process: found, configured once, shared by oneDNN and our kernels.

``configure(threads, wait_policy)`` must be called before the first parallel call: the waiting policy is read by the
runtime when it is loaded. Spinning threads answer faster (about 1 us against 10 to 20 us for a sleeping one) but take
the core from the data workers while they wait; passive waiting gives it back at once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from renaissance.core.errors import DeviceError, ValueRejected

WAIT_POLICIES = {"passive": 0, "active": 1}
"""Milliseconds that a thread spins before it sleeps. One is longer than any wait inside a step, and all that a worker
can lose to a thread that waits between steps; libiomp5's own 200 would be too much there."""
MACHINES = ("x86_64", "AMD64")
"""The kernels set the floating-point control word of x86; elsewhere LLVM would end the process when it meets that."""
LIBRARY = "libiomp5.so"
REGISTRATION = "/dev/shm/__KMP_REGISTERED_LIB_{pid}_{uid}"
"""The name libiomp5 registers under."""
LIMIT_VARIABLES = ("OMP_THREAD_LIMIT", "KMP_DEVICE_THREAD_LIMIT")
"""Environment variables that keep the runtime from teams of the size that is asked for."""
LIBRARY_VARIABLE = "RENAISSANCE_ONEDNN"
"""Environment variable that names a oneDNN library; what it depends on is looked for beside it first."""


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Entry points of the loaded runtime, as addresses for compiled code."""

    path: str
    parallel: int
    thread_num: int
    num_threads: int
    set_num_threads: int
    library: ctypes.CDLL


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """How the compute threads of this process are set up; ``str`` of it is what the commands print."""

    threads: int
    wait_policy: str
    blocktime_ms: int

    def __str__(self) -> str:
        spin = "sleep at once" if self.blocktime_ms == 0 else f"spin {self.blocktime_ms} ms, then sleep"
        return f"compute threads {self.threads}, waiting {self.wait_policy} ({spin})"


_runtime: OpenMP | None = None


def library_folders() -> list[Path]:
    """Where libraries installed by pip are looked for, in order."""
    named = os.environ.get(LIBRARY_VARIABLE)
    folders = [Path(named).parent, Path(named).resolve().parent] if named else []
    folders += [Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix)]
    return list(dict.fromkeys(folders))


def load_shared(name: str) -> ctypes.CDLL | None:
    """Load ``name`` for all later libraries to link against: from pip's folders, else wherever the system has it."""
    for candidate in [str(folder / name) for folder in library_folders() if (folder / name).exists()] + [name]:
        try:
            return ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def runtime() -> OpenMP:
    """The OpenMP runtime, loaded on first use. Raises DeviceError saying what to install when there is none, and on a
    machine that is not x86-64."""
    global _runtime
    if _runtime is None:
        if platform.machine() not in MACHINES:
            raise DeviceError(
                f"the kernels of backend 'cpu' are for {MACHINES[0]} and this machine is {platform.machine()}; "
                "use backend 'reference'"
            )
        os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "TRUE")  # a peer library may bring its own copy
        library = load_shared(LIBRARY)
        if library is None:
            searched = ", ".join(map(str, library_folders()))
            raise DeviceError(
                f"OpenMP runtime {LIBRARY} not found in {searched} or the system's library path; "
                "install it with: pip install intel-openmp"
            )
        _remove_registration(library)
        _runtime = OpenMP(
            path=library._name,
            parallel=_address(library, "GOMP_parallel"),
            thread_num=_address(library, "omp_get_thread_num"),
            num_threads=_address(library, "omp_get_num_threads"),
            set_num_threads=_address(library, "omp_set_num_threads"),
            library=library,
        )
    return _runtime


def _remove_registration(library: ctypes.CDLL) -> None:
    """Start the runtime, then remove the file in /dev/shm by which it tells a second copy of itself in this process.

    It is removed at a normal exit only: a killed trainer would leave it for ever (law 6). Copies are allowed anyway.
    """
    library.omp_get_max_threads()
    with suppress(OSError):
        os.unlink(REGISTRATION.format(pid=os.getpid(), uid=os.getuid()))


def configure(threads: int, wait_policy: str = "passive") -> ThreadPlan:
    """Set the team size of the calling thread and how idle threads wait ("passive" or "active").

    May be called again; the team size belongs to the calling thread, so call it in the thread that launches programs.
    Raises ValueRejected for a number below 1, or above what the runtime's own variables allow: a team smaller than that
    waits for its missing threads for ever, in the barriers of oneDNN's weight gradients.
    """
    if threads < 1:
        raise ValueRejected(f"compute threads: {threads}; expected at least 1")
    if wait_policy not in WAIT_POLICIES:
        raise ValueRejected(f"wait policy {wait_policy!r}; expected one of: {', '.join(WAIT_POLICIES)}")
    blocktime = WAIT_POLICIES[wait_policy]
    os.environ.setdefault("KMP_BLOCKTIME", str(blocktime))
    library = runtime().library
    library.omp_set_dynamic(0)
    library.omp_set_num_threads(threads)
    library.omp_set_max_active_levels(max(1, library.omp_get_max_active_levels()))
    allowed = min(library.omp_get_max_threads(), library.omp_get_thread_limit())
    if threads > allowed:
        raise ValueRejected(
            f"compute threads: {threads}; the OpenMP runtime allows {allowed}: unset {' and '.join(LIMIT_VARIABLES)}, "
            "or ask for fewer threads"
        )
    library.kmp_set_blocktime(blocktime)
    return ThreadPlan(threads, wait_policy, blocktime)


def _address(library: ctypes.CDLL, name: str) -> int:
    value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert value is not None
    return value
