"""What ``bench.norm`` measures, for its two sides; standard library only: the peers' environment imports it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHAPES = {
    "resnet18": ((128, 32, 32, 64), (128, 16, 16, 128), (128, 8, 8, 256), (128, 4, 4, 512)),
    "resnet50": (
        (32, 112, 112, 64),
        (32, 56, 56, 64),
        (32, 56, 56, 256),
        (32, 28, 28, 128),
        (32, 28, 28, 512),
        (32, 14, 14, 256),
        (32, 14, 14, 1024),
        (32, 7, 7, 512),
        (32, 7, 7, 2048),
    ),
}
FORMS = ("forward", "backward", "forward+residual", "backward+residual")
STREAMS = {"forward": 3, "backward": 7, "forward+residual": 4, "backward+residual": 7}
"""Feature maps that our passes read or write; what a write fetches first is not counted."""
ROTATION_BYTES = 200e6
"""Each side walks through copies of its tensors that no cache holds."""
MOST_COPIES = 24
SECONDS = 0.15
"""One round of one job lasts about as long."""


@dataclass(frozen=True, slots=True)
class Job:
    """One shape and form; every form ends with a ReLU."""

    shape: tuple[int, int, int, int]
    form: str

    @property
    def elements(self) -> int:
        n, h, w, c = self.shape
        return n * h * w * c

    @property
    def residual(self) -> bool:
        return "residual" in self.form

    @property
    def is_forward(self) -> bool:
        return self.form.startswith("forward")

    def copies(self, itemsize: int) -> int:
        """Copies of all tensors, at least 2."""
        tensors = 6 if self.residual else 4
        return max(2, min(MOST_COPIES, int(ROTATION_BYTES / (self.elements * itemsize * tensors))))

    def gigabytes(self, itemsize: int) -> float:
        return STREAMS[self.form] * self.elements * itemsize / 1e9


def fastest(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of the fastest call, while they take turns for SECONDS: what a machine gives nobody else uses."""
    best, end = math.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for call in calls:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best * 1e6


def jobs(models: list[str]) -> list[Job]:
    """All jobs of these models, in the order in which both sides run them."""
    return [Job(shape, form) for model in models for shape in SHAPES[model] for form in FORMS]
