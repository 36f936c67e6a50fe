"""Ctrl-C never shows a traceback: not while a script imports, and not in what it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from renaissance.cli import interrupts

WHILE_IMPORTING = "import renaissance.cli.quiet_start, signal; print('ready', flush=True); signal.pause()"
WHILE_RUNNING = """
import renaissance.cli.quiet_start, signal, sys
from renaissance.cli.errors import run_command
sys.exit(run_command(lambda: (print("ready", flush=True), signal.pause())))
"""


@pytest.mark.parametrize(("code", "expected"), [(WHILE_IMPORTING, -signal.SIGINT), (WHILE_RUNNING, 130)])
def test_interrupted_script_ends_without_a_traceback(code: str, expected: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (expected, "")


def test_examples_begin_with_it() -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    for path in examples.glob("*.py"):
        text = path.read_text()
        if "run_command" in text:
            first = next(
                line for line in text.splitlines() if "import renaissance" in line or "from renaissance" in line
            )
            assert first.startswith("import renaissance.cli.quiet_start"), path.name


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        interrupts.end_quietly()
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
