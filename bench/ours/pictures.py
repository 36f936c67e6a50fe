"""Samples/s that a consumer of our daemon receives: CIFAR's crop and flip, or RandomResizedCrop of photographs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import renaissance
from bench.ours.data import endless
from bench.rounds import samples_per_second, serve_rounds
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data.jpeg import decoder_identity
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation
from renaissance.data.transforms import Pad, RandomCrop, RandomHorizontalFlip, RandomResizedCrop

RECIPES = {
    "cifar10": Recipe.build([Pad(4), RandomCrop(32), RandomHorizontalFlip()], NormMode.CIFAR, resolution=32),
    "imagenet": Recipe.build([RandomResizedCrop(224), RandomHorizontalFlip()], NormMode.IMAGENET, resolution=224),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=tuple(RECIPES), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--format", choices=("raw", "dts"), default="raw")
    parser.add_argument("--level")
    parser.add_argument("--load", choices=("fully", "partial"), default="fully")
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    with (
        start_private_daemon(
            {options.data: options.folder},
            workers=options.workers,
            data_format=options.format,
            load=options.load,
            level=options.level,
        ) as daemon,
        TransferStation(
            daemon.address,
            dataset=options.data,
            split="train",
            recipe=RECIPES[options.data],
            seed=123,
            batch_size=options.batch,
            dtype=DType.parse(options.dtype),
            drop_last=True,
            timeout=300,
        ) as station,
    ):
        stream = endless(station)

        def run_round() -> float:
            return samples_per_second(lambda: next(stream).valid, options.samples)

        run_round()
        print(f"waited {station.wait_seconds:.2f} s", file=sys.stderr)
        serve_rounds(run_round, {"renaissance": renaissance.__version__, "decoder": decoder_identity()})


if __name__ == "__main__":
    main()
