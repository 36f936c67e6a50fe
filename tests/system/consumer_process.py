"""A consumer in a process of its own, for tests that kill it: reads epochs for ever and says where it is."""

import sys

from conftest import train_recipe

from renaissance.data.station import TransferStation


def main(address: str) -> None:
    with TransferStation(
        address, dataset="mnist", split="train", recipe=train_recipe(), seed=11, batch_size=50
    ) as station:
        for epoch in range(1 << 20):
            for batch in station.epoch(epoch):
                print(batch.epoch, batch.index, batch.digest, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
