"""Where compiled kernels are kept: a folder per state of the sources, so that none is ever used after an edit.

Numba keeps a compiled function until the file that holds it changes. It does not see a change in another file whose
functions were inlined into it: after an update the old kernels would go on computing the old bytes. So the folder's
name carries a fingerprint of every source file that may be compiled into a kernel.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import time
import zlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
COMPILED_FROM = (
    "core/philox.py",
    "core/digest.py",
    "core/exact_math.py",
    "core/region.py",
    "tensor/draws.py",
    "data/order.py",
    "data/kernels.py",
    "data/copies.py",
    "data/draws.py",
    "data/finish.py",
    "data/resize.py",
    "data/stages.py",
    "data/vectors.py",
    "data/normal_steps.py",
    "data/pixel_ops.py",
    "data/prefetch.py",
    "data/protocol.py",
    "data/transforms.py",
    "data/jpeg/*.py",
    "backend/cpu/*.py",
)
"""Files whose functions or constants are compiled into kernels; tests find one that is missing here."""
UNUSED_SECONDS = 30 * 24 * 3600
"""Folders of other states are removed after a month without use."""


def source_fingerprint(package: Path = PACKAGE) -> str:
    """Eight hex digits that change when a source file is edited, replaced, added or removed."""
    files = sorted(path for pattern in COMPILED_FROM for path in package.glob(pattern))
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{zlib.crc32(repr(state).encode()):08x}"


def use_kernel_cache() -> None:
    """Point Numba at the folder of this state of the sources, also when Numba was imported before.

    A NUMBA_CACHE_DIR that the user has set is left alone.
    """
    if "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = str(cache_folder(f"kernels-{source_fingerprint()}"))
        numba = sys.modules.get("numba.core.config")
        if numba is not None:  # it has read its environment already
            vars(numba)["CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"]


def kernels_are_cached() -> bool:
    """Whether kernels have been compiled before; if not, the first run has to wait for that."""
    return any(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbi"))


def cache_folder(name: str) -> Path:
    """The user's folder ``name`` for what takes long to make and can be made again, under XDG_CACHE_HOME or ~/.cache.

    It exists, may be written and counts as used now. Where that is impossible (a read-only home, or none), a folder of
    this process's own that is removed at its end, the same one each time.
    """
    try:
        folder = _base() / name
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
        os.utime(folder)
        if is_new:
            _remove_unused(folder.parent)
    except (OSError, RuntimeError):
        return _private_folder(name, os.getpid())
    return folder


def _base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "renaissance"


@cache
def _private_folder(name: str, process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"renaissance-{name}-"))
    atexit.register(_remove_own, folder, process)
    return folder


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not at the end of a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(base: Path) -> None:
    oldest = time.time() - UNUSED_SECONDS
    for folder in base.glob("kernels-*"):
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)
