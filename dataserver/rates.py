"""What happened per second lately: a few buckets, so that asking costs nothing and nothing grows."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 5
"""The window; also the longest time after which a stream that stopped shows a rate of 0."""


class RateMeter:
    """Counts two kinds of things (batches, samples) in buckets of one second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds = [-1] * (SECONDS + 1)  # the one that is being filled, and the SECONDS before it
        self._first = [0] * (SECONDS + 1)
        self._second = [0] * (SECONDS + 1)

    def add(self, first: int, second: int) -> None:
        now = int(self._clock())
        at = now % (SECONDS + 1)
        if self._seconds[at] != now:
            self._seconds[at], self._first[at], self._second[at] = now, 0, 0
        self._first[at] += first
        self._second[at] += second

    def per_second(self) -> tuple[float, float]:
        """Both rates over the last SECONDS, or over the whole life while that is shorter."""
        now = self._clock()
        oldest = int(now) - SECONDS
        recent = [at for at, second in enumerate(self._seconds) if second >= oldest]
        seconds = max(min(now - self._started, now - oldest), 1e-3)
        return sum(self._first[at] for at in recent) / seconds, sum(self._second[at] for at in recent) / seconds
