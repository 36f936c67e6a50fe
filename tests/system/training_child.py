"""A small training run as a process that tests can kill: says every step on stdout, then the digests.

python training_child.py DATA OUTPUT EPOCHS CHECKPOINT_STEPS [--resume] [--dataserver ADDRESS] [--everything]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from training_support import GROWS, everything_task, settings, small_task

from renaissance.cli.errors import run_command
from renaissance.task import SilentReporter


class Speaker(SilentReporter):
    def __init__(self) -> None:
        self._epoch = 0

    def epoch_started(self, epoch: int, steps: int, done_steps: int) -> None:
        self._epoch = epoch

    def step(self, done_steps: int, loss: float, samples_per_s: float, wait_share: float) -> None:
        print("step", self._epoch, done_steps, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("checkpoint_steps", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dataserver")
    parser.add_argument("--everything", action="store_true", help="every option that the weights depend on")
    options = parser.parse_args()
    with settings(options.data, progressive=GROWS if options.everything else None):
        task = everything_task(options.data / "choices.json") if options.everything else small_task(options.epochs)
        task.output(options.output).checkpoint_every(steps=options.checkpoint_steps)
        task.reporter(Speaker())
        if options.resume:
            task.resume(True)
        if options.dataserver:
            task.dataserver(options.dataserver)
        task.compile()
        print("compiled", flush=True)
        result = task.run()
    print("digests", result.data_digest, result.weight_digest, *filter(None, [result.ema_digest]), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
