"""Metrics count every sample once: loss and hit rates of a validation with a tail batch equal NumPy's in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from training_support import TRAIN, VAL, cut_mnist, settings, small_task

from renaissance import DeepLearningTask
from renaissance.data.formats import open_dataset
from renaissance.data.preprocessor import PREPROCESSOR_SETTING

SMOOTHING = 0.1
"""Of ``small_task``."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_mnist(tmp_path_factory.mktemp("mnist"))


def forward(task: DeepLearningTask, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logits [N, 10] of images [N, 784] by the task's weights."""
    for layer in ("fc1", "fc2", "fc3"):
        weight = task.fetch(f"{layer}.weight").numpy().astype(np.float64)
        bias = task.fetch(f"{layer}.bias").numpy().astype(np.float64).reshape(-1)
        x = x @ weight.reshape(bias.size, -1).T + bias
        x = x if layer == "fc3" else np.maximum(x, 0)
    return x


@pytest.mark.parametrize("batch", [128, 250, 3000])
def test_validation_metrics_equal_numpy(batch: int, data: Path) -> None:
    with settings(data, amp=False, batch=batch):
        norm = PREPROCESSOR_SETTING.config.val_recipe.normalization
        task = small_task(1)
        task.compile()
        record = task.run().history[0]
    samples = open_dataset("mnist", data, "val")
    x = (samples.images.reshape(VAL, -1) / 255.0 - norm.mean[0]) / norm.std[0]
    z, y = forward(task, x), samples.labels
    log_p = z - z.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    rank = (z > z[np.arange(VAL), y][:, None]).sum(axis=1)
    loss = -(1 - SMOOTHING) * log_p[np.arange(VAL), y].mean() - SMOOTHING * log_p.mean()
    assert record.val_loss == pytest.approx(loss, rel=1e-6)
    assert record.top1 == (rank < 1).sum() / VAL
    assert record.top5 == (rank < 5).sum() / VAL
    assert record.samples == TRAIN
