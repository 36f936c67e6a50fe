"""Batches as JAX arrays. Skipped by name where jax is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import train_recipe

from renaissance.core.dtype import DType
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.UINT8])
def test_arrays_hold_the_bytes_of_the_station(dts_folder: Path, copy: bool, dtype: DType) -> None:
    from renaissance.core.enums import NormMode
    from renaissance.data.adapters.jax import jax_batches
    from renaissance.data.recipe import Recipe

    recipe = train_recipe()
    if dtype is DType.UINT8:
        recipe = Recipe.build(recipe.transforms, NormMode.NO_NORM, resolution=28, color_channels=1)
    options = {"dataset": "mnist", "split": "train", "recipe": recipe, "seed": 5, "batch_size": 64, "dtype": dtype}
    with (
        start_private_daemon({"mnist": dts_folder}, workers=1) as daemon,
        TransferStation(daemon.address, **options) as ours,
        TransferStation(daemon.address, **options) as other,
    ):
        kept = []
        for (images, labels, valid), batch in zip(jax_batches(ours, 0, copy=copy), other.epoch(0), strict=True):
            bits = np.asarray(images).view(batch.images.dtype)
            assert valid == batch.valid
            assert np.array_equal(bits, batch.images)
            assert np.array_equal(np.asarray(labels), batch.labels)
            kept.append((images, bits.copy()))
        if copy:  # later batches did not write into earlier arrays
            assert all(np.array_equal(np.asarray(i).view(b.dtype), b) for i, b in kept)
