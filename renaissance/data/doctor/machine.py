"""Whether this machine can hold the set and prepare it fast enough."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from renaissance.core.machine import (
    allowed_cpus,
    available_memory,
    cpu_quota,
    format_cpus,
    physical_cores,
    usable_cores,
)
from renaissance.data.doctor.files import Stored
from renaissance.data.doctor.findings import Report, Severity
from renaissance.data.sources import Encoding

MIB = 1 << 20
MEMORY_SHARE = 4
"""Pictures are kept in memory by themselves when they take at most one part in so many of it (``--load auto``)."""
COMFORTABLE_FILES = 1024
"""Descriptors that a daemon with 128 workers and 64 sessions gets along with."""
BUSY = 0.5
"""Load average per core above which others visibly use the machine."""


def examine_cores(report: Report) -> int:
    """Facts about the cores; returns how many may be used."""
    cpus, quota = allowed_cpus(), cpu_quota()
    cores, load = usable_cores(cpus, quota), os.getloadavg()[0]
    report.facts["cores"] = {
        "usable": cores,
        "cpus": format_cpus(cpus),
        "physical": len(physical_cores(cpus)),
        "quota": quota,
        "load_average": round(load, 2),
    }
    if quota is not None and quota < len(cpus):
        report.add(
            Severity.NOTE,
            "cores",
            f"the cgroup allows {quota:g} CPUs' worth of time on {len(cpus)} CPUs",
            f"more than {cores} workers would only take turns; raise the quota (docker run --cpus) if there is more",
        )
    if (os.cpu_count() or 0) > len(cpus):
        report.add(
            Severity.NOTE,
            "cores",
            f"this process may run on {len(cpus)} of {os.cpu_count()} CPUs ({format_cpus(cpus)})",
            "taskset, a cpuset or the job scheduler says which",
        )
    if load > BUSY * cores + 1:
        report.add(
            Severity.WARNING, "cores", f"the machine is busy (load average {load:.1f} on {cores} cores)",
            "the measured rate is that of cores of one's own; a run gets what the others leave",
        )  # fmt: skip
    return cores


def examine_memory(splits: Sequence[Stored], report: Report) -> None:
    """Compare the set with the memory at hand, and say how it should be loaded."""
    free = available_memory()
    stored, index = sum(s.stored_bytes for s in splits), sum(s.index_bytes for s in splits)
    pixels = all(s.encoding is Encoding.PIXELS for s in splits)
    fully = pixels or stored * MEMORY_SHARE <= free
    report.facts["memory"] = {
        "available_bytes": free,
        "set_bytes": stored,
        "index_bytes": index,
        "load": "fully" if fully else "partial",
    }
    if (stored if fully else 0) + index > free:
        report.add(
            Severity.PROBLEM,
            "memory",
            f"the set needs {_size(stored + index)}, and {_size(free)} are available",
            "free memory, or load it partly (--load partial)",
        )
    elif not fully and stored + index <= free:
        report.add(
            Severity.NOTE,
            "memory",
            f"the set ({_size(stored)}) would fit into memory ({_size(free)} available), but takes more than a quarter",
            "--load fully keeps it there; by itself the daemon reads files ahead",
        )


def examine_limits(report: Report) -> None:
    """Limits of the system that the daemon meets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = Path("/dev/shm")
    report.facts["limits"] = {
        "open_files": soft,
        "open_files_hard": hard,
        "dev_shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else 0,
        "dev_shm_used_by_us": False,  # rings and data are memfds, which its size does not limit
    }
    if soft != resource.RLIM_INFINITY and soft < COMFORTABLE_FILES:
        report.add(
            Severity.WARNING, "limits", f"a process may have {soft} files open", f"ulimit -n {COMFORTABLE_FILES}"
        )
    if not hasattr(os, "memfd_create"):
        report.add(Severity.PROBLEM, "limits", "this system has no memfd; the dataserver runs on Linux only")


def examine_disk(folder: Path, splits: Sequence[Stored], report: Report) -> None:
    """Room for packing the set where it lies."""
    usage = shutil.disk_usage(folder)
    report.facts["disk"] = {"free_bytes": usage.free, "total_bytes": usage.total}
    unpacked = sum(s.stored_bytes for s in splits if s.format == "raw" and s.encoding is Encoding.PICTURES)
    if unpacked > usage.free:
        report.add(
            Severity.NOTE,
            "disk",
            f"packing at level 0 takes about {_size(unpacked)}, and {_size(usage.free)} are free there",
            "pack to another disk, or at level 1 to 3",
        )


def examine_rate(per_core: float, cores: int, wanted: float | None, what: str, report: Report) -> None:
    """Compare the measured rate (samples/s on one core) with the one that is needed, if that is known."""
    total = per_core * cores
    report.facts["rate"] = {
        "cores": cores,
        "samples_per_second_and_core": round(per_core, 1),
        "samples_per_second": round(total, 1),
        "wanted": wanted,
        "recipe": what,
    }
    if wanted is None:
        return
    headroom = total / wanted
    report.facts["rate"]["headroom"] = round(headroom, 2)
    text = f"{cores} cores prepare about {total:.0f} samples/s ({what}); {wanted:g} are wanted"
    if headroom < 1:
        report.add(
            Severity.PROBLEM, "rate", text,
            f"{-(-wanted // per_core):.0f} such cores would do; or pack smaller pictures (level 2, 3 or RAW)",
        )  # fmt: skip
    elif headroom < 1.25:
        report.add(Severity.WARNING, "rate", text, "a trainer on the same cores takes its share of them")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / MIB:.1f} MiB"
