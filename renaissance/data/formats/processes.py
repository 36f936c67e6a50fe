"""Work on pictures spread over processes, with the results in the order of the work.

The window of results that wait is bounded, so memory does not grow when the receiver is slower than the processes. A
process ends with its parent, however that ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from renaissance.core.errors import RenaissanceError, ValueRejected

Work = TypeVar("Work")
Done = TypeVar("Done")

MAX_JOBS = 256
CHUNKS_PER_JOB = 2
"""Pieces of work given out and not yet received, for each process."""


class ProcessDied(RenaissanceError, ChildProcessError):
    """A working process ended without being told to."""


def check_jobs(jobs: int) -> int:
    """Return ``jobs`` if it is a number of processes, else raise ValueRejected."""
    if not 1 <= jobs <= MAX_JOBS:
        raise ValueRejected(f"jobs is {jobs}; expected 1 to {MAX_JOBS}")
    return jobs


def in_order(
    function: Callable[[Work], Done],
    work: Iterator[Work],
    jobs: int,
    prepare: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Done]:
    """``function`` of each piece of ``work``, computed by ``jobs`` processes, in order.

    ``prepare(*arguments)`` is called first in every process. Functions and pieces are pickled. Raises ProcessDied
    when a process dies; what ``function`` raises is raised here.
    """
    # Started from a clean server process: a fork of this one would copy its threads' locks.
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([function.__module__])  # imported once, not by each process
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(prepare, arguments))
    waiting: deque[Future[Done]] = deque()
    try:
        while True:
            while len(waiting) < CHUNKS_PER_JOB * jobs:
                try:
                    piece = next(work)
                except StopIteration:
                    break
                waiting.append(pool.submit(function, piece))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ProcessDied("a working process died (perhaps for lack of memory); try fewer --jobs") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes
    parent = parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*arguments)
