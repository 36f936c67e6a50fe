"""Every kernel for every target, compiled in processes of its own beside the tests that run before it is asked for.

That is most of a minute of NVRTC, which compiles one program at a time in a process; these wait for cores that the
tests leave idle, and leave what they make in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from renaissance.backend.cuda.modules import KERNELS, TARGETS, Cubin, cubin
from renaissance.core.errors import DeviceError

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
BEHIND_THE_TESTS = 10
"""Of os.nice."""
_running: list[subprocess.Popen[bytes]] = []


def jobs() -> list[tuple[str, str]]:
    """(file, target), the longest files first."""
    files = sorted(KERNELS.glob("*.cu"), key=lambda p: (-p.stat().st_size, p.name))
    return [(file.stem, arch) for file in files for arch in TARGETS]


def start() -> None:
    """Begin, unless it has been."""
    if not _running:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        commands = [[sys.executable, __file__, str(share)] for share in range(PROCESSES)]
        _running.extend(subprocess.Popen(c, env=environment, stdin=subprocess.DEVNULL) for c in commands)


def results() -> dict[tuple[str, str], Cubin]:
    """By file and target, when all are there. Raises DeviceError as ``cubin`` does."""
    for process in _running:
        process.wait()
    return {job: cubin(*job) for job in jobs()}


def stop() -> None:
    """End what still runs."""
    for process in _running:
        process.terminate()
        process.wait()


def main() -> None:
    os.nice(BEHIND_THE_TESTS)
    for job in jobs()[int(sys.argv[1]) :: PROCESSES]:
        with suppress(DeviceError):  # the test says so
            cubin(*job)


if __name__ == "__main__":
    main()
