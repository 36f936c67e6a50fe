"""The dataserver as a PyTorch data set: whole batches, as tensors that lie in the shared slots.

    data = DataServerDataset("unix:/run/ds.sock", dataset="cifar10", split="train", recipe=recipe, seed=1,
                             batch_size=128)
    for epoch in range(10):
        for images, labels in data:            # or DataLoader(data, batch_size=None)
            loss = criterion(model(images), labels)

A tensor is valid until ``hold`` batches later; after that the dataserver writes the next batch into its memory. Keep a
``clone()`` of what has to live longer. Every pass over the data set is the next epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from renaissance.core.errors import ValueRejected
from renaissance.data.station import Batch, TransferStation

LAYOUTS = ("NCHW", "NHWC")
Tensors = tuple[torch.Tensor, torch.Tensor]


def batch_tensors(batch: Batch, layout: str = "NCHW") -> Tensors:
    """(images, labels) of the valid rows: images without a copy, labels int64[valid], which PyTorch's losses want.

    ``layout`` "NCHW" is a view in the memory format ``channels_last`` (the bytes are NHWC), "NHWC" is the bytes.
    """
    images = torch.from_dlpack(batch)[: batch.valid]
    if layout == "NCHW":
        images = images.permute(0, 3, 1, 2)
    elif layout != "NHWC":
        raise ValueRejected(f"layout is {layout!r}; expected one of: {', '.join(LAYOUTS)}")
    return images, torch.from_numpy(batch.labels[: batch.valid]).long()


class DataServerDataset(IterableDataset[Tensors]):  # type: ignore[misc]  # torch is not looked into
    """An ``IterableDataset`` of whole batches from one session of a dataserver; ``len()`` is batches an epoch.

    The dataserver's workers take the place of the loader's, so use it directly or with ``DataLoader(data,
    batch_size=None)``; in a loader's worker process it raises. ``state_dict`` is a few integers: the batch that is
    handed out next, exact for any number of workers of the dataserver.
    """

    def __init__(self, address: str, *, layout: str = "NCHW", hold: int = 1, **options: Any) -> None:
        """``options`` are those of ``TransferStation``. ``hold``: batches that stay valid, the latest included.

        Raises what TransferStation raises, and ValueRejected for an unknown layout or more held batches than slots.
        """
        if layout not in LAYOUTS:
            raise ValueRejected(f"layout is {layout!r}; expected one of: {', '.join(LAYOUTS)}")
        depth = options.get("depth", 4)
        if not 1 <= hold < depth:
            raise ValueRejected(f"hold is {hold}; expected 1 to {depth - 1}, one less than the ring's depth ({depth})")
        self.station = TransferStation(address, **options)
        self._layout, self._hold = layout, hold
        # Not given back where an iterator ends: ``next(iter(data))`` drops its iterator before the tensors are used.
        self._held: deque[Batch] = deque()
        state = self.station.state()
        self._epoch, self._batch = state["epoch"], state["batch"]

    def __len__(self) -> int:
        return self.station.batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch, from its first batch."""
        self._epoch, self._batch = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the next batch is taken; give it to ``load_state_dict`` of a data set with the same options."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there. Raises ValueRejected for a state that is not one of ``state_dict``."""
        if set(state) != {"epoch", "batch"} or not all(type(value) is int for value in state.values()):
            raise ValueRejected(f"state is {dict(state)!r}; expected whole numbers under epoch and batch")
        if not 0 <= state["batch"] < len(self):
            raise ValueRejected(f"state: batch is {state['batch']}; expected 0 to {len(self) - 1}")
        self._epoch, self._batch = state["epoch"], state["batch"]

    def __iter__(self) -> Iterator[Tensors]:
        if get_worker_info() is not None:
            raise ValueRejected(
                "a DataServerDataset cannot be read in a worker of a DataLoader: the dataserver has its own; "
                "use DataLoader(data, batch_size=None, num_workers=0), or the data set itself"
            )
        epoch = self._epoch
        while self._epoch == epoch:
            while len(self._held) >= self._hold:
                self._held.popleft().release()
            batch = self.station.acquire(self._epoch, self._batch)
            self._held.append(batch)
            self._advance()
            yield batch_tensors(batch, self._layout)

    def _advance(self) -> None:
        self._batch += 1
        if self._batch == len(self):
            self._epoch, self._batch = self._epoch + 1, 0

    def close(self) -> None:
        """End the session. Tensors that are still held keep their memory, not their contents."""
        self.station.close()

    def __enter__(self) -> DataServerDataset:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
