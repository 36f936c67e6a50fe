"""Samples/s that a consumer of our daemon receives from the example's recipe."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import renaissance
from bench.ours.example import BATCH, train_recipe
from bench.rounds import serve_rounds
from renaissance.core.dtype import DType
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import Batch, TransferStation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"))
    parser.add_argument("--batches", type=int, default=600)
    options = parser.parse_args()
    with (
        start_private_daemon({"mnist": options.folder}, workers=options.workers) as daemon,
        TransferStation(
            daemon.address,
            dataset="mnist",
            split="train",
            recipe=train_recipe(),
            seed=123,
            batch_size=BATCH,
            dtype=DType.parse(options.dtype),
        ) as station,
    ):
        stream = endless(station)

        def run_round() -> float:
            start = time.perf_counter()
            samples = sum(next(stream).valid for _ in range(options.batches))
            return samples / (time.perf_counter() - start)

        run_round()
        serve_rounds(run_round, {"renaissance": renaissance.__version__})


def endless(station: TransferStation) -> Iterator[Batch]:
    """Batches of epoch after epoch."""
    for epoch in count():
        yield from station.epoch(epoch)


if __name__ == "__main__":
    main()
