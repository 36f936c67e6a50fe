"""Runs contenders in turns on the same cores and reports the ratio of ours to the best peer variant.

A contender is a process that stays alive and runs one round when asked (``bench.rounds``), so that ours and the peers
alternate within one run. A screening pass runs each variant once, alone; then the finalists alternate; every variant is
reported. A contender that fails to start is reported by name with its error, never dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
PEERS_VENV = ROOT / ".venv-peers"
PEERS_LIST = ROOT / "bench" / "peers.txt"
PEERS_BUILT = ROOT / "bench" / "peers_built.txt"
# What a careful PyTorch user sets: freed memory is kept; where loader workers need the cores, waiting threads sleep.
TORCH_STEP_ENV = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
TORCH_ENV = {**TORCH_STEP_ENV, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
FINALISTS = 3
SETTLE_SECONDS = 1.0
"""Between rounds: a contender goes on filling its queue after its own, which must not take time from the next one's."""


class ContenderError(RuntimeError):
    """A contender did not start or broke off; the message holds the end of its stderr."""


@dataclass
class Contender:
    """One variant: ``python -m module arguments`` in our environment, or in the peers' with ``peer``."""

    name: str
    module: str
    arguments: list[str]
    peer: bool
    threads: int  # that compute or prepare samples, loader workers and our daemon's workers included
    environment: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()  # that the process and its children may use; () all
    values: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    peak_mib: int = 0  # resident memory of the contender's process, its children not counted
    error: str = ""
    process: subprocess.Popen[str] | None = None
    stderr: IO[str] | None = None

    def start(self) -> None:
        python = peers_python() if self.peer else Path(sys.executable)
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            [str(python), "-m", self.module, *self.arguments],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, self.cpus)) if self.cpus else None,
        )
        self.versions = self._answer()["ready"]

    def run_round(self) -> float:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.values.append(float(answer["value"]))
        self.peak_mib = int(answer["peak_mib"])
        return self.values[-1]

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.stderr is not None
            self.stderr.seek(0)
            raise ContenderError(f"{self.name}: {self.stderr.read()[-800:].strip()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def summary(self) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        return {
            "median": round(statistics.median(self.values), 4),
            "min": round(min(self.values), 4),
            "max": round(max(self.values), 4),
            "rounds": len(self.values),
            "peak_mib": self.peak_mib,
        }


def peers_python() -> Path:
    """The interpreter of the peers' environment, made on first use or when the lists of peers changed.

    BENCH_PEERS_PYTHON names another interpreter, on a machine that has the peers already.
    """
    if "BENCH_PEERS_PYTHON" in os.environ:
        return Path(os.environ["BENCH_PEERS_PYTHON"])
    lists = PEERS_LIST.read_bytes() + PEERS_BUILT.read_bytes()
    stamp = PEERS_VENV / f"installed-{hashlib.sha256(lists).hexdigest()[:12]}"
    python = PEERS_VENV / "bin" / "python"
    if not stamp.exists():
        print(f"making the peers' environment in {PEERS_VENV.name} (once; some GB) ...", file=sys.stderr)
        if not python.exists():
            venv.create(PEERS_VENV, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-r", PEERS_LIST], check=True)
        if subprocess.run([*install, "--no-build-isolation", "-r", PEERS_BUILT]).returncode:
            print(f"{PEERS_BUILT.name} did not build; benches report its peers as missing", file=sys.stderr)
        stamp.touch()
    return python


def run_bench(
    name: str,
    unit: str,
    ours: list[Contender],
    peers: list[Contender],
    rounds: int,
    higher_is_better: bool,
    keep: bool = False,
    settle: float = SETTLE_SECONDS,
) -> dict[str, Any]:
    """Screen every variant once, alternate the finalists for ``rounds`` rounds, print a table and one JSON line.

    ``ratio`` in the result is ours over the best peer (or its inverse for times): above 1 means ours is better.
    ``keep``: the finalists go on from the screening instead of starting again, where all of them fit beside each other
    and do nothing between rounds; ``settle``: seconds between rounds.
    """
    better = max if higher_is_better else min
    screen([*ours, *peers], keep)
    our_alive = [c for c in ours if not c.error]
    if not our_alive:
        raise SystemExit(f"bench {name}: none of our variants ran: {[c.error for c in ours]}")
    ranked = sorted((c for c in peers if not c.error), key=lambda c: c.values[0], reverse=higher_is_better)
    if not ranked:
        raise SystemExit(f"bench {name}: no peer variant ran: {[c.error for c in peers]}")
    defaults = [c for c in ranked if c.name.startswith("defaults")]
    finalists = [*our_alive, *ranked[:FINALISTS], *(c for c in defaults if c not in ranked[:FINALISTS])]
    for contender in (c for c in [*ours, *peers] if c not in finalists):
        contender.stop()
    alternate(finalists, rounds, unit, settle)

    def median(c: Contender) -> float:
        return statistics.median(c.values)

    best_ours, best_peer = better(our_alive, key=median), better(ranked[:FINALISTS], key=median)

    def ratio(peer: Contender) -> float:
        a, b = median(best_ours), median(peer)
        return round(a / b if higher_is_better else b / a, 3)

    result = {
        "name": name,
        "unit": unit,
        "ratio": ratio(best_peer),
        "ratio_to_defaults": ratio(defaults[0]) if defaults else None,
        "ours": {c.name: c.summary() for c in ours},
        "best_peer": best_peer.name,
        "peers": {c.name: c.summary() for c in peers},
        "versions": {**best_peer.versions, **best_ours.versions, "python": platform.python_version()},
        "threads": {"ours": best_ours.threads, "best_peer": best_peer.threads},
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
    }
    for c in [*ours, *peers]:
        s = c.summary()
        text = (
            s["error"]
            if c.error
            else f"{s['median']:12.4f} [{s['min']:.4f} .. {s['max']:.4f}] x{s['rounds']} {s['peak_mib']:>6} MiB"
        )
        print(f"{'peer' if c.peer else 'ours'}  {c.name:60} {text}", file=sys.stderr)
    print(json.dumps(result))
    return result


def screen(contenders: list[Contender], keep: bool = False) -> None:
    """One round of each, one process at a time unless they are kept; those that fail carry their error instead of a
    value."""
    for contender in contenders:
        try:
            contender.start()
            contender.run_round()
        except ContenderError as error:
            contender.error = str(error)
        finally:
            if contender.error or not keep:
                contender.stop()


def alternate(contenders: list[Contender], rounds: int, unit: str, settle: float = SETTLE_SECONDS) -> None:
    """Replace the screening value of each by ``rounds`` values taken in turns, after a round that is not counted."""
    try:
        for contender in contenders:
            if contender.process is None:
                contender.start()
            contender.run_round()
            time.sleep(settle)
            contender.values.clear()
        for number in range(rounds):
            for contender in contenders:
                value = contender.run_round()
                time.sleep(settle)
                print(f"  round {number + 1}/{rounds}  {contender.name:60} {value:12.4f} {unit}", file=sys.stderr)
    finally:
        for contender in contenders:
            contender.stop()


def one_core() -> tuple[int]:
    """The last core this process may use: for benches that give every contender, children included, the same one."""
    return (max(os.sched_getaffinity(0)),)


def cpu_name() -> str:
    """Model name and the instruction sets that decide the figures."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    sets = [s for s in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {s}" in text]
    return f"{model} ({', '.join(sets)})"
