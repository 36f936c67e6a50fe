"""Measured choices: which algorithm is fastest for each convolution of a model on this machine, kept in a file.

    with tuning.using(Path("choices.json")) as choices:
        executor = GraphExecutor(model)       # measures what the file does not know yet
    facts = executor.profile() | {"convolutions": choices.digest()}

Without this, a fixed rule chooses (``conv_choice``). A measured choice differs from one measurement to the next, and
with it the last bits of the results: so it is written down, used without measuring when it is known, and its digest is
part of the numeric profile. Choices are filed under shape, direction, element type, instruction set, threads and the
library's version: a file may travel, and serves only machines like the one it was measured on.

The file is JSON and replaced as a whole when a choice has been added; a killed process leaves the old one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.convolution import Direction
from renaissance.backend.cpu.conv_algorithms import Job
from renaissance.backend.cpu.onednn import explain, onednn
from renaissance.backend.cpu.queue import NativeQueue, team_call
from renaissance.backend.registry import NativeCall
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.core.files import text_if_there, written_when_complete

FORMAT = 1
ROUNDS = 5
"""Timed calls of each algorithm, in turns; the fastest counts."""
ADVANTAGE = 0.97
"""Another algorithm than the rule's must need less than this part of its time."""
ALIGNMENT = 64


class Choices:
    """The choices of one file, and those that were used. Get one with ``using``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = _read(path)
        self._used: dict[str, str] = {}
        self.measured = 0
        """Choices that the file did not hold."""

    def of(self, job: Job, classes: Sequence[Any]) -> str:
        """Name of the algorithm for a job: the stored one, else the fastest of ``classes`` (the rule's first)."""
        key = key_of(job)
        name = self._known.get(key)
        if name is None:
            name = fastest(job, classes) if len(classes) > 1 else str(classes[0].name)
            self.measured += 1
            self._known[key] = name
            self._write()
        elif name not in [a.name for a in classes]:
            raise ValueRejected(
                f"{self.path}: algorithm {name!r} for {key}; expected one of: "
                f"{', '.join(str(a.name) for a in classes)}. Remove the entry, or the file, to measure again"
            )
        self._used[key] = name
        return name

    def digest(self) -> str:
        """BLAKE2b-128 of the choices that were used: part of the numeric profile."""
        text = json.dumps(sorted(self._used.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _write(self) -> None:
        merged = _read(self.path) | self._known  # another process may have added to it
        text = json.dumps({"format": FORMAT, "choices": dict(sorted(merged.items()))}, indent=1)
        with written_when_complete(self.path) as file:
            file.write(text.encode())


_active: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextmanager
def using(path: Path) -> Iterator[Choices]:
    """Programs captured in this block take the choices of ``path``, and add to it what is missing.

    Raises FormatError for a file that is not one of these, and RenaissanceError for one that cannot be written.
    """
    choices = Choices(path)
    token = _active.set(choices)
    try:
        yield choices
    finally:
        _active.reset(token)


def chosen(job: Job, classes: Sequence[Any]) -> str:
    """Name of the algorithm for a job: by the choices in use, else by the rule, whose class is the first."""
    choices = _active.get()
    return str(classes[0].name) if choices is None else choices.of(job, classes)


def key_of(job: Job) -> str:
    """What a choice is filed under."""
    options = [name for name in ("bias", "residual", "relu") if getattr(job, name)]
    words = [job.direction.name.lower(), str(job.shape), job.dtype.name.lower(), *options]
    words += [] if job.training else ["packed"]
    return f"{' '.join(words)} | {onednn().isa}, {job.threads} thread(s), oneDNN {onednn().version}"


def fastest(job: Job, classes: Sequence[Any]) -> str:
    """Name of the fastest class, measured on random operands; the first one unless another is clearly faster."""
    memory = _Memory(job)
    runs = {str(a.name): memory.bind(a(job)) for a in classes}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    first = str(classes[0].name)
    winner = min(best, key=lambda name: best[name])
    return winner if best[winner] < ADVANTAGE * best[first] else first


class _Memory:
    """Random operands of one job."""

    def __init__(self, job: Job) -> None:
        self._job, self._kept = job, list[npt.NDArray[np.uint8]]()
        shape, size = job.shape, job.dtype.itemsize
        self._x, self._y, self._w = (self._take(n * size) for n in (shape.inputs, shape.outputs, shape.weights))
        self._dw, self._b, self._residual = (self._take(n) for n in (4 * shape.weights, 4 * shape.k, 0))
        if job.residual:
            self._residual = self._take(shape.outputs * size)

    def _take(self, nbytes: int) -> int:
        # 0x3C3C3C3C is 0.0115 in fp32, and 0x3C3C the same in bf16: no NaN, no denormal
        self._kept.append(np.full(nbytes + ALIGNMENT, 0x3C, np.uint8))
        address = int(self._kept[-1].ctypes.data)
        return address + -address % ALIGNMENT

    def bind(self, algorithm: Any) -> Callable[[], None]:
        """All calls of the algorithm, those that pack included in training, as one function."""
        job, w, scratch = self._job, self._w, self._take(algorithm.scratch_bytes)
        calls: list[NativeCall] = []
        if job.direction is not Direction.WEIGHT and algorithm.packed_bytes:
            w = self._take(algorithm.packed_bytes)
            packing = algorithm.pack(self._w, w, scratch)
            calls += packing if job.training else []
        if job.direction is Direction.FORWARD:
            calls += algorithm.run(self._x, w, self._b, self._residual, self._y, scratch)
        elif job.direction is Direction.DATA:
            calls += algorithm.run(self._y, w, self._x, scratch)
        else:
            calls += algorithm.run(self._x, self._y, self._dw, self._b, scratch)
        return NativeQueue([team_call(job.threads), *calls], explain).launch


def _read(path: Path) -> dict[str, str]:
    """The choices of a file; none when there is no file."""
    text = text_if_there(path, "measured choices")
    if text is None:
        return {}
    try:
        stored = json.loads(text)
        choices = stored["choices"]
        if stored["format"] != FORMAT or not all(isinstance(k, str) and isinstance(v, str) for k, v in choices.items()):
            raise ValueError(f"format {stored['format']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path}: not a file of measured choices ({error}); expected JSON with format {FORMAT} and choices. "
            "Remove it to measure again"
        ) from error
    return dict(choices)
