"""Runs the suite as two pytest processes side by side, so that two cores take little more than half the time of one.

    python tests/in_parts.py [pytest options]

The parts share no fixture and no file. Each part's output is printed in one piece when it has ended; the exit status is
that of the first part that failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PARTS = {"units and CUDA": ("unit", "footguns", "cuda_host", "gpu"), "processes": ("system",)}
POLL_SECONDS = 0.2


def main(options: list[str]) -> int:
    began = time.monotonic()
    running = {}
    for name, folders in PARTS.items():
        output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as its process
        others = [f"--ignore={TESTS / f}" for part in PARTS.values() if part is not folders for f in part]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS), *others, *options]
        running[name] = (subprocess.Popen(command, cwd=TESTS.parent, stdout=output, stderr=subprocess.STDOUT), output)
    status = 0
    try:
        while running:
            for name, (process, output) in list(running.items()):
                if process.poll() is None:
                    continue
                output.seek(0)
                print(f"== {name}", flush=True)
                sys.stdout.buffer.write(output.read())
                print(f"== {name}: exit {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)
                status = status or process.returncode
                del running[name]
            time.sleep(POLL_SECONDS)
    finally:
        for process, _ in running.values():
            process.terminate()
            process.wait()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
