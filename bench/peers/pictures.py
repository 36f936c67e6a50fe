"""What the peers of the data benches read: CIFAR's binary files and a folder tree of photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_cifar(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N,32,32,3] and labels int64 [N] of the training files in ``folder``/cifar-10-batches-bin."""
    files = sorted((folder / "cifar-10-batches-bin").glob("data_batch_*.bin"))
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)


def photo_files(folder: Path) -> list[tuple[Path, int]]:
    """(file, label) of ``folder``/train, in order of class and name."""
    classes = sorted(path for path in (folder / "train").iterdir() if path.is_dir())
    return [(file, label) for label, path in enumerate(classes) for file in sorted(path.glob("*.JPEG"))]
