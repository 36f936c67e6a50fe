"""Batches of a dataserver as JAX arrays.

JAX takes an array for immutable and computes behind the caller's back, while a slot is overwritten once it is given
back. So arrays are copies unless ``copy=False`` says that the caller waits for what it computed (``block_until_ready``)
before it asks for the next batch; then they are the slot itself on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from renaissance.data.station import TransferStation


def jax_batches(
    station: TransferStation, epoch: int, start_batch: int = 0, *, copy: bool = True
) -> Iterator[tuple[Any, Any, int]]:
    """(images, labels, valid) of one epoch: jax arrays [B,H,W,C] and int32[B], and how many rows hold a sample.

    All batches have the full shape, so a compiled step is compiled once; rows past ``valid`` are zero with label -1.
    """
    for batch in station.epoch(epoch, start_batch):
        images = jax.dlpack.from_dlpack(batch)
        labels = jax.dlpack.from_dlpack(batch.labels)
        if copy:
            images, labels = jnp.copy(images), jnp.copy(labels)
            images.block_until_ready(), labels.block_until_ready()  # the slot is given back before the next batch
        yield images, labels, batch.valid
