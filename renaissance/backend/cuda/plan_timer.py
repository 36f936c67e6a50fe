"""PlanTimer: how long each of a library's plans takes, on operands in device memory of their own.

A plan is executed call by call first, so that its kernels are loaded, then many times in one CUDA graph, as in a
training step: the host, which needs longer to launch a small kernel than the GPU to run it, is not measured with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from math import ceil, inf
from typing import TypeVar

from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import Plan
from renaissance.backend.cuda.recording import recorded
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.errors import DeviceError, MemoryPlanError
from renaissance.core.region import align

CANDIDATES = 8
"""Plans that are measured at most."""
PATIENCE_SECONDS = 0.5
"""No further one is made when making the others, beyond the first, has taken this long: some are compiled."""
ROUNDS = 5
"""Timed launches of each plan's graph, in turns; the median counts."""
ROUND_SECONDS = 1e-3
"""About what a graph of the first plan shall take: waiting for it costs the host some microseconds."""
MOST_EXECUTIONS = 64
"""Of a plan in a graph."""
HOPELESS = 2.0
"""A plan that needs this many times the best one's time at first sight is not measured any further."""
ADVANTAGE = 0.97
"""Another plan than the first must need less than this part of its time."""
PATTERN = 0x2C
"""Byte of the operands: 0.065 in fp16, 2.4e-12 in bf16 and fp32. No zeros, which multiply faster; sums of ten million
products are finite in each type."""
P = TypeVar("P", bound=Plan)


class PlanTimer:
    """Measures on one stream. Not while a stream is capturing."""

    def __init__(self, runtime: CudaRuntime, stream: int, clock: Callable[[], float]) -> None:
        self._runtime, self._stream, self._clock = runtime, stream, clock

    def fastest(self, offers: Iterable[P], sizes: Sequence[int]) -> tuple[P, dict[str, float | None]]:
        """The fastest of the first ``CANDIDATES`` plans, and seconds by name; None: it failed. The first plan, unless
        another is clearly faster; one that is alone is not measured. ``sizes``: bytes of the three operands.

        Raises MemoryPlanError without memory for the operands, and what the first plan raises.
        """
        plans = self._made(offers)
        first = plans[0]
        if len(plans) == 1:
            return first, {}
        with self._operands(sizes, max(plan.workspace for plan in plans)) as operands:
            times = self._measured(plans, operands)
        found = {name: value for name, value in times.items() if value is not None}
        winner = min(plans, key=lambda plan: found.get(plan.name, float("inf")))
        return winner if found[winner.name] < ADVANTAGE * found[first.name] else first, times

    def _made(self, offers: Iterable[P]) -> list[P]:
        plans: list[P] = []
        start = self._clock()
        for plan in islice(offers, CANDIDATES):
            plans.append(plan)
            if len(plans) == 1:
                start = self._clock()
            if self._clock() - start > PATIENCE_SECONDS:
                break
        return plans

    @contextmanager
    def _operands(self, sizes: Sequence[int], workspace: int) -> Iterator[list[Buffer]]:
        """Three operands and a workspace; the memory is given back at the end."""
        runtime, needed = self._runtime, [*sizes, workspace]
        total = sum(align(max(size, 1)) for size in needed)
        try:
            base = runtime.malloc(total)
        except Exception as error:
            raise MemoryPlanError(
                f"the GPU has no {total / 2**20:.0f} MiB to measure plans in: {error}; use a smaller batch or drop tune"
            ) from error
        try:
            runtime.name_range(base, total, "operands of plans that are measured")
            runtime.memsetAsync(base, PATTERN, total, self._stream)
            runtime.streamSynchronize(self._stream)
            buffers, at = [], base
            for size in needed:
                buffers.append(Buffer(at, size))
                at += align(max(size, 1))
            yield buffers
        finally:
            runtime.free(base)

    def _measured(self, plans: Sequence[Plan], operands: Sequence[Buffer]) -> dict[str, float | None]:
        """Seconds of one execution of each plan, None for one that failed. A failure of the first is raised."""
        first = plans[0]
        times: dict[str, float | None] = dict.fromkeys(plan.name for plan in plans)
        for plan in plans:
            with self._failing_unless(plan is first):
                times[plan.name] = self._at_first_sight(partial(self._execute, plan, operands))
        seen = {plan.name: times[plan.name] or inf for plan in plans}
        count = min(ceil(ROUND_SECONDS / seen[first.name]) or 1, MOST_EXECUTIONS)
        worth = [p for p in plans if p is first or seen[p.name] < HOPELESS * min(seen.values())]
        with ExitStack() as stack:
            launches: dict[str, Callable[[], None]] = {}
            for plan in worth:
                with self._failing_unless(plan is first):
                    launches[plan.name] = stack.enter_context(
                        self._graph(partial(self._execute, plan, operands), count)
                    )
            rounds = [{name: self._seconds(launch) / count for name, launch in launches.items()} for _ in range(ROUNDS)]
        times |= {plan.name: None for plan in worth if plan.name not in launches}
        return times | {name: statistics.median(found[name] for found in rounds) for name in launches}

    def _execute(self, plan: Plan, operands: Sequence[Buffer]) -> None:
        first, second, out, workspace = operands
        plan.execute(self._stream, first, second, out, workspace)

    @staticmethod
    def _failing_unless(needed: bool) -> AbstractContextManager[None]:
        """A plan that the library offers and cannot execute is left out. An error of the GPU itself comes back with the
        next call."""
        return nullcontext() if needed else suppress(DeviceError, RuntimeError)

    def _at_first_sight(self, execute: Callable[[], None]) -> float:
        self._seconds(execute)  # loads its kernels
        return min(self._seconds(execute) for _ in range(2))

    @contextmanager
    def _graph(self, execute: Callable[[], None], count: int) -> Iterator[Callable[[], None]]:
        """Launches a graph of ``count`` executions, which has been launched once."""
        runtime, stream = self._runtime, self._stream

        def several() -> None:
            for _ in range(count):
                execute()

        graph = recorded(runtime, stream, several)
        try:
            executable = runtime.graphInstantiate(graph)
            try:
                launch = partial(runtime.graphLaunch, executable, stream)
                self._seconds(launch)
                yield launch
            finally:
                runtime.graphExecDestroy(executable)
        finally:
            runtime.graphDestroy(graph)

    def _seconds(self, action: Callable[[], None]) -> float:
        """Until the stream has done what ``action`` puts on it."""
        start = self._clock()
        action()
        self._runtime.streamSynchronize(self._stream)
        return self._clock() - start
