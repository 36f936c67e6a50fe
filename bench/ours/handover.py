"""Median time (µs) of acquire and release of a batch that is ready."""

from __future__ import annotations

import argparse
from pathlib import Path

import renaissance
from bench.ours.data import endless
from bench.ours.pictures import RECIPES
from bench.rounds import hand_over_microseconds, serve_rounds
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation

DEPTH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    with (
        start_private_daemon({"imagenet": options.folder}, workers=1, data_format="dts", level="RAW") as daemon,
        TransferStation(
            daemon.address,
            dataset="imagenet",
            split="train",
            recipe=RECIPES["imagenet"],
            seed=1,
            batch_size=64,
            depth=DEPTH,
            drop_last=True,
            timeout=300,
        ) as station,
    ):
        stream = endless(station)

        def run_round() -> float:
            # Each gives back the batch taken before, so one slot of the ring is never free.
            return hand_over_microseconds(lambda: next(stream), DEPTH - 1)

        run_round()
        serve_rounds(run_round, {"renaissance": renaissance.__version__})


if __name__ == "__main__":
    main()
