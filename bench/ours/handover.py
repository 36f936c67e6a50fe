"""Median time (µs) of acquire and release of a batch that is ready."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import renaissance
from bench.ours.data import endless
from bench.ours.pictures import RECIPES
from bench.rounds import serve_rounds
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation

DEPTH = 8
FILL_SECONDS = 1.0
"""Enough for one worker to fill the ring; were it not, the median would show the wait."""


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
            times = []
            for _ in range(5):
                time.sleep(FILL_SECONDS)
                for _ in range(DEPTH - 1):  # the batch taken last is given back by the next hand-over
                    start = time.perf_counter()
                    next(stream)
                    times.append(1e6 * (time.perf_counter() - start))
            return statistics.median(times)

        run_round()
        serve_rounds(run_round, {"renaissance": renaissance.__version__})


if __name__ == "__main__":
    main()
