"""The command line of a contender of the step benches; both sides take the same."""

from __future__ import annotations

import argparse


def step_parser() -> argparse.ArgumentParser:
    """Options that say which network is trained on what."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--channels", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a round")
    parser.add_argument("--batches", type=int, required=True, help="batches in memory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    return parser
