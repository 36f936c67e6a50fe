"""Measured choices: which plan of cuDNN or cuBLASLt is fastest for each convolution and product of a model on this
GPU, kept in a file.

    choices = PlanChoices(Path("plans.json"))
    device = open_device(0, choices=choices)
    executor = CudaExecutor(model, device=device)       # measures what the file does not know yet
    facts = executor.profile() | {"tuned": choices.digest()}

Without this, a plan is the first that the library's heuristics offer within the rules. A measured choice differs from
one measurement to the next, and with it the last bits of the results: so it is written down, used without measuring
when it is known, and its digest is part of the numeric profile. Choices are filed under sizes, types, GPU, library
versions and TF32: a file may travel, and serves only GPUs like the one it was measured on.

Plans are measured when a program is built for the first time: before the arena is allocated, and never in a capture of
the program. Of several ranks the first one measures, and all take its choices.

The file is JSON and replaced as a whole when a choice has been added; a killed process leaves the old one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from renaissance.backend.cuda.libraries import Plan
from renaissance.backend.cuda.plan_timer import PlanTimer
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.core.files import text_if_there, written_when_complete

FORMAT = 1
P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, slots=True)
class Question(Generic[P]):
    """Which plan? ``key``: what the answer is filed under; ``sizes``: bytes of the operands, the result last.

    ``offers`` makes the plans within the rules one by one, best first by the heuristics; ``named`` the one of that
    name, None when the rules or the library do not allow it.
    """

    key: str
    sizes: tuple[int, ...]
    offers: Callable[[], Iterable[P]]
    named: Callable[[str], P | None]


class PlanChoices:
    """The choices of one file, and those that were used."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        share: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``share`` gives what rank 0 calls it with to all ranks; the others need no file.

        Raises FormatError for a file that is not one of these.
        """
        self.path = path
        self.clock = clock
        self._rank, self._share = rank, share
        self._known = _read(path) if rank == 0 else {}
        self._used: dict[str, dict[str, Any]] = {}
        self.measured = 0
        """Choices that the file did not hold."""
        self._seconds = 0.0

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around all that asks for plans: of several ranks the first one goes before the others."""
        if self._share is not None and self._rank:
            self._known = json.loads(self._share(""))
        yield
        if self._share is not None and not self._rank:
            self._share(json.dumps(self._used))

    def of(self, question: Question[P], runtime: CudaRuntime, stream: int) -> P:
        """The stored plan, else the fastest, measured on ``stream``. Raises ValueRejected for a stored one that is not
        to be had, MemoryPlanError without memory for the operands, RenaissanceError for a file that cannot be written.
        """
        key = question.key
        stored = self._known.get(key)
        plan = self._measure(question, runtime, stream) if stored is None else question.named(stored["plan"])
        if plan is None:
            raise ValueRejected(
                f"{self.path}: the library offers no plan {self._known[key]['plan']!r} for {key}. Remove the entry, or "
                "the file, to measure again"
            )
        self._used[key] = self._known[key]
        return plan

    def digest(self) -> str:
        """BLAKE2b-128 of the choices that were used: part of the numeric profile."""
        text = json.dumps(sorted((key, choice["plan"]) for key, choice in self._used.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def text(self) -> str:
        """What was done, in a line."""
        faster = [c for c in self._used.values() if c["plan"] != next(iter(c["ms"]), c["plan"])]
        measured = f"{self.measured} measured now in {self._seconds:.1f} s" if self.measured else "none measured now"
        return f"{self.path}: {len(self._used)} plans, {measured}, {len(faster)} of them faster than the first offered"

    def _measure(self, question: Question[P], runtime: CudaRuntime, stream: int) -> P:
        if self._rank:
            raise ValueRejected(
                f"{self.path}: rank 0 has chosen no plan for {question.key}, which rank {self._rank} needs: their GPUs "
                "or libraries differ. Use equal ones, or drop tune"
            )
        start = self.clock()
        plan, times = PlanTimer(runtime, stream, self.clock).fastest(question.offers(), question.sizes)
        self._seconds += self.clock() - start
        self.measured += 1
        self._known[question.key] = {"plan": plan.name, "ms": _milliseconds(times)}
        self._write()
        return plan

    def _write(self) -> None:
        merged = _read(self.path) | self._known  # another process may have added to it
        text = json.dumps({"format": FORMAT, "plans": dict(sorted(merged.items()))}, indent=1)
        with written_when_complete(self.path) as file:
            file.write(text.encode())


def _milliseconds(times: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(1e3 * value, 5) for name, value in times.items()}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The choices of a file; none when there is no file."""
    text = text_if_there(path, "measured plans")
    if text is None:
        return {}
    try:
        stored = json.loads(text)
        plans = stored["plans"]
        if stored["format"] != FORMAT or not all(
            isinstance(choice["plan"], str) and isinstance(choice["ms"], dict) for choice in plans.values()
        ):
            raise ValueError(f"format {stored['format']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path}: not a file of measured plans ({error}); expected JSON with format {FORMAT} and plans. Remove it "
            "to measure again; what is chosen on a CPU and on a GPU goes to different files"
        ) from error
    return dict(plans)
