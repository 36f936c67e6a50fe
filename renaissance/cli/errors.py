"""One place where the errors of a command become one line and an exit code; also for scripts such as the examples.

Exit codes: 0 done, 1 an error (one line ``error: ...`` on stderr), 2 wrong arguments, 130 interrupted, 143 terminated
(the ``renaissance`` command). A traceback is shown only when the environment variable RENAISSANCE_TRACEBACK is set.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from renaissance.cli.interrupts import raise_again
from renaissance.core.errors import RenaissanceError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TRACEBACK_VARIABLE = "RENAISSANCE_TRACEBACK"


def run_command(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return the exit code (its own, or 0 when it returns None). Never raises."""
    try:
        raise_again()
        code = command()
        if sys.stdout is not None:  # None: started with stdout closed
            sys.stdout.flush()
    except SystemExit as stop:  # argparse: help, version, wrong arguments
        return OK if stop.code is None else stop.code if isinstance(stop.code, int) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader of our output has gone (`| head`)
        return FAILED
    except Exception as error:  # the last resort of a command: one line, no traceback
        _drop_output()
        return report(error)
    return OK if code is None else code


def _drop_output() -> None:
    """Write what was printed; if that is impossible, forget it: Python would complain once more at exit."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: Exception) -> int:
    """Print the one line of ``error``; returns FAILED. An error that is no one's on purpose says how to see more."""
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (RenaissanceError, OSError)):
        text = f"unexpected {type(error).__name__}: {text}; {TRACEBACK_VARIABLE}=1 shows where"
    print(f"error: {text}", file=sys.stderr)
    return FAILED
