"""The ``renaissance`` command: one table of subcommands.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code); it is imported
only when it is asked for. ``renaissance.cli.errors`` turns its errors into one line and an exit code.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from renaissance import __version__
from renaissance.cli.errors import run_command


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its name, the module that implements it and its line in the help."""

    name: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("fetch", "renaissance.cli.fetch", "fetch the published files of a data set"),
    Command("pack", "renaissance.cli.pack", "pack published files, or a tree of pictures, into DTS files"),
    Command("inspect", "renaissance.cli.inspect", "print what the headers of data files say"),
    Command("verify", "renaissance.cli.verify", "check data files against their structure and checksums"),
    Command("preview", "renaissance.cli.preview", "draw what a recipe does to samples, before and after"),
    Command("replay", "renaissance.cli.replay", "make batches of a digest file again alone, and compare"),
    Command("train", "renaissance.cli.train", "train a model as a TOML file says"),
    Command("predict", "renaissance.cli.predict", "classify pictures with a saved model"),
    Command("export", "renaissance.cli.export", "write a saved model as ONNX"),
    Command("plan", "renaissance.cli.plan", "print and draw what a model is compiled to"),
    Command("doctor", "renaissance.cli.doctor", "check a data folder and this machine before training"),
)


def build_parser(argv: Sequence[str], commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of the command line; only the modules of subcommands that ``argv`` names are imported."""
    parser = argparse.ArgumentParser(
        prog="renaissance", description="Trains image classifiers and prepares their data.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"renaissance {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        description = command.help[0].upper() + command.help[1:] + "."
        subparser = subparsers.add_parser(command.name, help=command.help, description=description, allow_abbrev=False)
        if command.name in argv:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code. Never raises.

    SIGTERM ends a command like an error does, so that its processes and temporary files end with it.
    """
    given = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        arguments = build_parser(given).parse_args(given)
        return int(arguments.run(arguments))

    if threading.current_thread() is not threading.main_thread():  # handlers are set by that one only
        return run_command(command)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return run_command(command)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
