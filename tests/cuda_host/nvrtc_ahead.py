"""Every kernel for every target, compiled in processes of its own beside the tests that run before it is asked for.

That is most of a minute of NVRTC, which compiles one program at a time in a process; these wait for cores that the
tests leave idle. What has been compiled before comes from the user's cache.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor

from renaissance.backend.cuda.modules import KERNELS, TARGETS, Cubin, cubin

PROCESSES = 2
BEHIND_THE_TESTS = 10
"""Of os.nice."""
_pool: ProcessPoolExecutor | None = None
_jobs: dict[tuple[str, str], Future[Cubin]] = {}


def start() -> None:
    """Begin, unless it has been; needs NVRTC only in the processes."""
    global _pool
    if _pool is None:
        context = multiprocessing.get_context("spawn")
        _pool = ProcessPoolExecutor(PROCESSES, context, initializer=os.nice, initargs=(BEHIND_THE_TESTS,))
        largest_first = sorted(KERNELS.glob("*.cu"), key=lambda p: -p.stat().st_size)
        for file in largest_first:
            for arch in TARGETS:
                _jobs[file.stem, arch] = _pool.submit(cubin, file.stem, arch)


def results() -> dict[tuple[str, str], Cubin]:
    """By file and target, when all are there; the processes end. Raises DeviceError as ``cubin`` does."""
    start()
    try:
        return {job: future.result() for job, future in _jobs.items()}
    finally:
        stop()


def stop() -> None:
    """Leave out what has not begun."""
    if _pool is not None:
        _pool.shutdown(wait=False, cancel_futures=True)
