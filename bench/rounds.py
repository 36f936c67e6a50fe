"""The contender's side of a bench: a process that runs one round each time it is asked.

Used by our contenders and, in the peers' own environment, by theirs; so it imports nothing but the standard library.
A contender prints ``{"ready": {...versions}}``, then for each line on stdin one line ``{"value": number}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

AHEAD = 4
"""Batches that a data contender may have prepared while the others ran; it takes as many before its clock starts."""


def serve_rounds(run_round: Callable[[], float], versions: dict[str, str]) -> None:
    """Answer every line on stdin with the value of one round, until stdin closes.

    Stray prints of libraries go to stderr: stdout carries answers only.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers.write(json.dumps({"ready": versions}) + "\n")
    answers.flush()
    for _ in sys.stdin:
        answers.write(json.dumps({"value": run_round()}) + "\n")
        answers.flush()
