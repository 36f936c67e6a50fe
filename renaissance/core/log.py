"""Logging: the standard library's, with the project's line format. The library logs, only commands print."""

from __future__ import annotations

import logging
import sys

FORMAT = "[%(asctime)s.%(msecs)03d] [%(levelname)s] [%(name)s] %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def get_logger(module: str) -> logging.Logger:
    """The logger of one module, below the root ``renaissance``."""
    return logging.getLogger(f"renaissance.{module}")


def configure(level: str = "INFO") -> None:
    """Send the project's log lines to stderr. Called by commands, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    root = logging.getLogger("renaissance")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
