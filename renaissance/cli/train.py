"""``renaissance train CONFIG.toml``: a training run for people who would rather not write Python."""

from __future__ import annotations

import argparse
from pathlib import Path

from renaissance.cli.model_source import blueprint_of
from renaissance.core.errors import ValueRejected
from renaissance.task.config import RunConfig
from renaissance.task.result import TrainingResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("config", type=Path, help="TOML file (docs/training.md)")
    parser.add_argument(
        "--set", dest="values", metavar="SECTION.KEY=VALUE", action="append", default=[], help="over what the file says"
    )
    parser.add_argument("--output", type=Path, help="folder for results and checkpoints; task.output of the file")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in the output folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print what would be done")


def run(arguments: argparse.Namespace) -> int:
    """Trains; prints the epochs and a summary."""
    config = RunConfig.read(arguments.config).with_values(_assignments(arguments.values))
    classes = config.configure_data(planning=arguments.dry_run)
    task = config.task(blueprint_of(*config.model(), classes))
    if arguments.output is not None:
        task.output(arguments.output)
    if arguments.resume:
        task.resume(True)
    if arguments.dry_run:
        task.dry_run()
        return 0
    with task:
        task.compile()
        result = task.run()
    if task.rank == 0:
        _print(result)
    return 0


def _assignments(values: list[str]) -> dict[str, str]:
    given = {}
    for value in values:
        place, equals, text = value.partition("=")
        if not equals:
            raise ValueRejected(f"--set {value}: expected SECTION.KEY=VALUE")
        given[place.strip()] = text.strip()
    return given


def _print(result: TrainingResult) -> None:
    best = f"{result.best_top1:.2%} (epoch {result.best_epoch} of {result.epochs})" if result.best_epoch > 0 else "none"
    average = {}
    if result.best_ema_top1 is not None:
        average["EMA top-1"] = f"{result.best_ema_top1:.2%} (epoch {result.best_ema_epoch} of {result.epochs})"
    lines = {
        "top-1": best,
        **average,
        "samples/s": f"{result.samples_per_s:,.0f} (waiting for data {result.wait_share:.1%})",
        "data digest": result.data_digest,
        "weight digest": result.weight_digest,
    }
    for name, value in lines.items():
        print(f"{name:<15} {value}")
