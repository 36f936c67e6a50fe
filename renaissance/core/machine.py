"""What this process may use of the machine, and how workers and compute threads share it.

``allowed_cpus`` and ``cpu_quota`` read affinity and cgroup limits, never the number of installed processors: a
container with two of 64 cores gets a plan for two. Nothing here changes the process; callers apply a ``CorePlan``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from renaissance.core.errors import ValueRejected

MAX_WORKERS = 128
MAX_THREADS = 1024
MAX_CPU = 8191
"""The largest number a CPU can have in Linux."""


class WaitPolicy(Enum):
    """What an idle compute thread does: sleep in the kernel, or spin for a short time first."""

    PASSIVE = "passive"
    ACTIVE = "active"


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs this process may run on, ascending (affinity mask, hence also cpusets)."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_quota(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs allowed by the cgroup's quota (v2 ``cpu.max`` or v1 ``cpu.cfs_quota_us``), None where there is none.

    The tightest limit between the process's group and the root counts. A container sees its own group at the root,
    so the root is looked at even when the path of the membership does not exist there.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            for mount in (cgroup_root, cgroup_root / "unified"):
                limits += [q for folder in _upwards(mount, group) if (q := _quota_v2(folder)) is not None]
        elif "cpu" in controllers.split(","):
            for mount in (cgroup_root / controllers, cgroup_root / "cpu"):
                limits += [q for folder in _upwards(mount, group) if (q := _quota_v1(folder)) is not None]
    return min(limits, default=None)


def _upwards(mount: Path, group: str) -> list[Path]:
    folder = mount / group.lstrip("/")
    return [folder, *[p for p in folder.parents if p == mount or mount in p.parents]]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def available_memory(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> int:
    """Bytes that can be allocated now: the kernel's estimate, cut by what the cgroup (v2 or v1) still allows.

    A cgroup counts the file pages it has read as used; those it has not touched lately are given up when needed.
    """
    found = [1024 * int(line.split()[1]) for line in _lines(meminfo) if line.startswith("MemAvailable:")]
    for line in _lines(membership):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        names = ("memory.max", "memory.current") if not controllers else _V1_MEMORY
        if not controllers or "memory" in controllers.split(","):
            for mount in (cgroup_root, cgroup_root / "unified", cgroup_root / "memory"):
                for folder in _upwards(mount, group):
                    limit, used = (_number(folder / name) for name in names)
                    if limit is not None and used is not None:
                        cached = _statistic(
                            folder / "memory.stat", "inactive_file" if not controllers else "total_inactive_file"
                        )
                        found.append(max(0, limit - max(0, used - cached)))
    return min(found, default=0)


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _statistic(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # the file is there, and what it says must not be taken for nothing
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # v2 says "max" for no limit
        return None


def physical_cores(
    cpus: Sequence[int], topology: Path = Path("/sys/devices/system/cpu")
) -> tuple[tuple[int, ...], ...]:
    """The given CPUs grouped by physical core, each group ascending; an unknown CPU is a core of its own."""
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(cpus):
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            key = ((folder / "physical_package_id").read_text().strip(), (folder / "core_id").read_text().strip())
        except OSError:
            key = ("?", str(cpu))
        cores.setdefault(key, []).append(cpu)
    return tuple(tuple(group) for group in cores.values())


def usable_cores(cpus: Sequence[int] | None = None, quota: float | None = None) -> int:
    """How many CPUs' worth of work fits: affinity, cut by the quota (rounded down, at least 1)."""
    if cpus is None:
        cpus, quota = allowed_cpus(), cpu_quota()
    return max(1, min(len(cpus), int(quota) if quota is not None else len(cpus)))


@dataclass(frozen=True, slots=True)
class CorePlan:
    """How many preprocessing workers and compute threads run, where, and how idle threads wait."""

    cores: int
    workers: int
    compute_threads: int
    wait_policy: WaitPolicy
    worker_nice: int
    worker_cpus: tuple[int, ...]  # empty: anywhere
    compute_cpus: tuple[int, ...]  # empty: anywhere

    @classmethod
    def choose(
        cls,
        *,
        workers: int | None = None,
        compute_threads: int | None = None,
        wait_policy: WaitPolicy | None = None,
        worker_nice: int | None = None,
        cpus: Sequence[int] | None = None,
        quota: float | None = None,
    ) -> CorePlan:
        """Plan for this process's cores; every part that is given is kept as given.

        With few cores everything shares them: the workers' share of an MNIST step is small, and a niced worker
        fills the gaps between compute threads. From 8 cores on, a quarter is set aside for workers. Threads spin
        for at most a millisecond: waits inside a step are shorter than what a sleep and a wake-up cost (sleeping at
        once made an MNIST epoch on two cores a fifth slower), and a worker loses no more than that.
        """
        if cpus is None:
            cpus, quota = allowed_cpus(), cpu_quota()
        cores = usable_cores(cpus, quota)
        apart = cores >= 8 and cores == len(cpus)
        if workers is None:
            workers = min(MAX_WORKERS, max(min(2, cores), cores // 4))
        if not 1 <= workers <= MAX_WORKERS:
            raise ValueRejected(f"workers is {workers}; expected 1 to {MAX_WORKERS}")
        if compute_threads is None:
            compute_threads = min(MAX_THREADS, cores - min(workers, cores // 2) if apart else cores)
        if not 1 <= compute_threads <= MAX_THREADS:
            raise ValueRejected(f"compute threads is {compute_threads}; expected 1 to {MAX_THREADS}")
        separated = apart and workers + compute_threads <= cores
        if wait_policy is None:
            wait_policy = WaitPolicy.ACTIVE
        if worker_nice is None:
            worker_nice = 0 if separated else 5
        ordered = tuple(sorted(cpus))
        return cls(
            cores=cores,
            workers=workers,
            compute_threads=compute_threads,
            wait_policy=wait_policy,
            worker_nice=worker_nice,
            worker_cpus=ordered[compute_threads:] if separated else (),
            compute_cpus=ordered[:compute_threads] if separated else (),
        )

    @classmethod
    def beside_gpu(cls, *, workers: int | None = None, processes: int = 1) -> CorePlan:
        """Plan for ``processes`` that share the machine and compute on a GPU each, fed by one dataserver: cores are for
        its workers, but one for each process, from which work is launched. Nothing is pinned: CUDA starts threads of
        its own, which would end up on the same CPU, and the workers are niced, so that a launch waits for none."""
        plan = cls.choose(
            workers=max(1, min(MAX_WORKERS, usable_cores() - processes)) if workers is None else workers,
            compute_threads=1,
        )
        return replace(plan, worker_nice=5, worker_cpus=(), compute_cpus=())

    def text(self, *, computes: bool = True) -> str:
        """One line for the log; ``computes``: the threads do, and not a GPU."""
        workers = f"{_count(self.workers, 'worker')} {_where(self.worker_cpus)} (nice {self.worker_nice})"
        if not computes:
            place = f" {_where(self.compute_cpus)}" if self.compute_cpus else ""
            return f"{_count(self.cores, 'core')}: {workers}, a thread that launches{place}"
        threads = f"{_count(self.compute_threads, 'compute thread')} {_where(self.compute_cpus)}"
        return f"{_count(self.cores, 'core')}: {workers}, {threads}, waiting {self.wait_policy.value}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _where(cpus: Sequence[int]) -> str:
    return f"on CPUs {format_cpus(cpus)}" if cpus else "on any CPU"


def format_cpus(cpus: Sequence[int]) -> str:
    """CPU list as Linux writes it: ``0-3,8``."""
    parts: list[str] = []
    ordered = sorted(set(cpus))
    start = 0
    for i, cpu in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != cpu + 1:
            parts.append(str(cpu) if i == start else f"{ordered[start]}-{cpu}")
            start = i + 1
    return ",".join(parts)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs of a list like ``0-3,8``. Raises ValueRejected for bad text or a CPU this process may not use."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueRejected(
                f"CPU list {text!r}: {part!r} is not a number or a range; expected e.g. 0-3,8"
            ) from None
        if high > MAX_CPU:
            raise ValueRejected(f"CPU list {text!r}: {high} is no CPU; the largest possible number is {MAX_CPU}")
        cpus.update(range(low, high + 1))
    missing = cpus - set(allowed_cpus())
    if missing or not cpus:
        raise ValueRejected(
            f"CPU list {text!r}: not allowed for this process: {format_cpus(sorted(missing)) or 'empty list'}; "
            f"allowed: {format_cpus(allowed_cpus())}"
        )
    return tuple(sorted(cpus))
