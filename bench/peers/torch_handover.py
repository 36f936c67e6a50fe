"""Median time (µs) of taking a batch that is ready from a DataLoader with one worker process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

from bench.rounds import hand_over_microseconds, serve_rounds

DEPTH = 8


class EmptyBatches(IterableDataset):
    """Batches that cost the worker nothing but their memory."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.zeros(64, 224, 224, 3), torch.zeros(64, dtype=torch.int64)


def main() -> None:
    stream = iter(DataLoader(EmptyBatches(), batch_size=None, num_workers=1, prefetch_factor=DEPTH))

    def run_round() -> float:
        return hand_over_microseconds(lambda: next(stream), DEPTH - 1)

    run_round()
    serve_rounds(run_round, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
