"""The ``renaissance`` command: one table of subcommands, one place where errors become one line.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code); it is imported
only when it is asked for. Exit codes: 0 done, 1 an error (one line ``error: ...`` on stderr), 2 wrong arguments,
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from renaissance import __version__
from renaissance.core.errors import RenaissanceError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TRACEBACK_VARIABLE = "RENAISSANCE_TRACEBACK"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its name, the module that implements it and its line in the help."""

    name: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("pack", "renaissance.cli.pack", "pack the published files of a data set into DTS files"),
    Command("inspect", "renaissance.cli.inspect", "print the headers of DTS and idx files"),
    Command("verify", "renaissance.cli.verify", "check data files against their structure and checksums"),
)


def build_parser(argv: Sequence[str], commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of the command line; only the modules of subcommands that ``argv`` names are imported."""
    parser = argparse.ArgumentParser(
        prog="renaissance", description="Trains image classifiers and prepares their data.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"renaissance {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=command.help.capitalize() + ".", allow_abbrev=False
        )
        if command.name in argv:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code. Never raises."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = build_parser(argv).parse_args(argv)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: 0 for help and version, 2 for wrong arguments
        return stop.code if isinstance(stop.code, int) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # the last resort of a command: one line, no traceback
        return _report(error)
    return code


def _report(error: Exception) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (RenaissanceError, OSError)):
        text = f"unexpected {type(error).__name__}: {text}; {TRACEBACK_VARIABLE}=1 shows where"
    print(f"error: {text}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
