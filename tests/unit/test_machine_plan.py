"""Cores are counted as the container sees them, and shared between workers and compute threads by rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from renaissance.core import machine
from renaissance.core.errors import ValueRejected
from renaissance.core.machine import CorePlan, WaitPolicy


def tree(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cpu_cfs", "cpu.cfs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_tightest_v2_quota_of_the_path_counts(tmp_path: Path) -> None:
    tree(tmp_path, a__cpu_max="150000 100000\n", a__b__cpu_max="max 100000\n", self="0::/a/b\n")
    assert machine.cpu_quota(tmp_path, tmp_path / "self") == 1.5


def test_container_sees_its_own_v2_group_at_the_root(tmp_path: Path) -> None:
    tree(tmp_path, cpu_max="200000 100000\n", self="0::/docker/abc\n")
    assert machine.cpu_quota(tmp_path, tmp_path / "self") == 2.0


def test_v1_quota(tmp_path: Path) -> None:
    tree(tmp_path, self="7:memory:/x\n4:cpu,cpuacct:/x\n", cpu__x__cpu_cfs_quota_us="50000\n")
    tree(tmp_path, cpu__x__cpu_cfs_period_us="100000\n")
    assert machine.cpu_quota(tmp_path, tmp_path / "self") == 0.5
    tree(tmp_path, cpu__x__cpu_cfs_quota_us="-1\n")
    assert machine.cpu_quota(tmp_path, tmp_path / "self") is None


def test_no_quota_and_no_cgroup_is_none(tmp_path: Path) -> None:
    tree(tmp_path, self="0::/\n", cpu_max="max 100000\n")
    assert machine.cpu_quota(tmp_path, tmp_path / "self") is None
    assert machine.cpu_quota(tmp_path, tmp_path / "missing") is None


def test_damaged_quota_is_no_quota(tmp_path: Path) -> None:
    for content in ("", "fast", "1 0", "a b"):
        tree(tmp_path, self="0::/\n", cpu_max=content)
        assert machine.cpu_quota(tmp_path, tmp_path / "self") is None


def test_available_memory_is_the_tightest_of_machine_and_cgroup(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    (tmp_path / "self").write_text("0::/a\n4:memory:/b\n")
    arguments = tmp_path, tmp_path / "self", tmp_path / "meminfo"
    assert machine.available_memory(*arguments) == 3000 * 1024
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.current").write_text("1000\n")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    assert machine.available_memory(*arguments) == 3000 * 1024
    (tmp_path / "a" / "memory.max").write_text("2001000\n")
    assert machine.available_memory(*arguments) == 2_000_000
    (tmp_path / "a" / "memory.current").write_text("2000000\n")  # nearly all of it files that were read once
    (tmp_path / "a" / "memory.stat").write_text("anon 1000\ninactive_file 1999000\nactive_file 0\n")
    assert machine.available_memory(*arguments) == 2_000_000
    (tmp_path / "memory" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "b" / "memory.limit_in_bytes").write_text("1500\n")
    (tmp_path / "memory" / "b" / "memory.usage_in_bytes").write_text("1600\n")
    assert machine.available_memory(*arguments) == 0


def test_allowed_cpus_follow_the_affinity_mask() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.allowed_cpus() == (min(before),)
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_hyper_threads_are_one_core(tmp_path: Path) -> None:
    for cpu, core in enumerate((0, 1, 0, 1)):
        tree(tmp_path, **{f"cpu{cpu}__topology__core_id": str(core), f"cpu{cpu}__topology__physical_package_id": "0"})
    assert machine.physical_cores(range(4), tmp_path) == ((0, 2), (1, 3))
    assert machine.physical_cores((1, 9), tmp_path) == ((1,), (9,))


def test_quota_cuts_the_cores() -> None:
    assert machine.usable_cores(range(64), 2.9) == 2
    assert machine.usable_cores(range(64), 0.2) == 1
    assert machine.usable_cores(range(4), 100.0) == 4


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        (1, "1 core: 1 worker on any CPU (nice 5), 1 compute thread on any CPU, waiting active"),
        (2, "2 cores: 2 workers on any CPU (nice 5), 2 compute threads on any CPU, waiting active"),
        (4, "4 cores: 2 workers on any CPU (nice 5), 4 compute threads on any CPU, waiting active"),
        (16, "16 cores: 4 workers on CPUs 12-15 (nice 0), 12 compute threads on CPUs 0-11, waiting active"),
    ],
)
def test_plan_by_number_of_cores(cores: int, text: str) -> None:
    assert CorePlan.choose(cpus=range(cores)).text() == text


@pytest.mark.parametrize("cores", [512, 1024, 4096])
def test_plan_of_a_huge_machine_stays_within_the_limits(cores: int) -> None:
    plan = CorePlan.choose(cpus=range(cores))
    assert plan.workers == machine.MAX_WORKERS
    assert plan.compute_threads <= machine.MAX_THREADS


def test_what_is_given_is_kept() -> None:
    plan = CorePlan.choose(cpus=range(2), workers=7, compute_threads=3, wait_policy=WaitPolicy.ACTIVE, worker_nice=0)
    assert (plan.workers, plan.compute_threads, plan.wait_policy, plan.worker_nice) == (7, 3, WaitPolicy.ACTIVE, 0)


def test_quota_below_the_cpus_never_pins() -> None:
    plan = CorePlan.choose(cpus=range(64), quota=16.0)
    assert (plan.worker_cpus, plan.compute_cpus) == ((), ())


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueRejected, match="workers is 0"):
        CorePlan.choose(workers=0)
    with pytest.raises(ValueRejected, match="compute threads is -1"):
        CorePlan.choose(compute_threads=-1)


def test_cpu_lists_read_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: tuple(range(10)))
    for text, cpus in (("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("2,4", (2, 4))):
        assert machine.parse_cpus(text) == cpus
        assert machine.format_cpus(cpus) == text
    for bad in ("", "a", "1-", "3-1", "0-99", "-1"):
        with pytest.raises(ValueRejected, match="CPU list"):
            machine.parse_cpus(bad)
