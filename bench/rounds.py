"""The contender's side of a bench: a process that runs one round each time it is asked.

Used by our contenders and, in the peers' own environment, by theirs; so it imports nothing but the standard library.
A contender prints ``{"ready": {...versions}}``, then for each line on stdin one line ``{"value": number}``.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

AHEAD = 4
"""Batches that a data contender may have prepared while the others ran; it takes as many before its clock starts."""
FILL_SECONDS = 1.0
"""Enough for one worker to fill its queue; were it not, the median of hand-overs would show the wait."""
HAND_OVERS = 5
"""Times the queue is emptied in a round."""


def samples_per_second(take: Callable[[], int], samples: int) -> float:
    """Rate over at least ``samples`` samples; ``take`` takes the next batch and returns how many are in it."""
    for _ in range(AHEAD):
        take()
    count = 0
    start = time.perf_counter()
    while count < samples:
        count += take()
    return count / (time.perf_counter() - start)


def hand_over_microseconds(take: Callable[[], object], queued: int) -> float:
    """Median time of taking a batch that is ready, from a queue that holds ``queued`` of them when it is full."""
    times = []
    for _ in range(HAND_OVERS):
        time.sleep(FILL_SECONDS)
        for _ in range(queued):
            start = time.perf_counter()
            take()
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def peak_mib() -> int:
    """The most memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def serve_rounds(run_round: Callable[[], float], versions: dict[str, str]) -> None:
    """Answer every line on stdin with the value of one round, until stdin closes.

    Stray prints of libraries go to stderr: stdout carries answers only.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers.write(json.dumps({"ready": versions}) + "\n")
    answers.flush()
    for _ in sys.stdin:
        answers.write(json.dumps({"value": run_round(), "peak_mib": peak_mib()}) + "\n")
        answers.flush()
