"""Recording what is put on a stream into a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from renaissance.backend.cuda.runtime import THREAD_LOCAL, CudaRuntime


def recorded(runtime: CudaRuntime, stream: int, issue: Callable[[], object]) -> int:
    """Handle of the graph of what ``issue`` puts on ``stream``, and on streams that it forks from it and joins again.

    Kernels are loaded and libraries warm by then. Nothing may be allocated, freed or waited for meanwhile; the garbage
    collector, which could free, is held off.
    """
    with _no_collection():
        runtime.streamBeginCapture(stream, THREAD_LOCAL)
        try:
            issue()
            return runtime.streamEndCapture(stream)
        except BaseException:
            with suppress(Exception):  # the capture is void; what made it so is the error to raise
                runtime.graphDestroy(runtime.streamEndCapture(stream))
            raise


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
