"""Every data set trains, and neither the form of its files nor where they are kept changes a bit of the result."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training_support import small_task

from renaissance import GLOBAL_SETTING, PREPROCESSOR_SETTING, BluePrint, NormMode, Pad, RandomCrop, fc, relu, seq
from renaissance.cli import main as cli
from renaissance.core.errors import DataServerError, ValueRejected
from renaissance.data.preprocessor import PreprocessorSetting
from renaissance.data.resolution import ProgressiveResolution, SteppedResolution
from renaissance.data.transforms import CenterCrop, RandomHorizontalFlip, RandomResizedCrop
from renaissance.graph import bn, conv, gap
from renaissance.task import TrainingResult

Change = Callable[[PreprocessorSetting], object]


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 as published, with 305 training samples in batches of unequal length, and 90 for validation."""
    folder = tmp_path_factory.mktemp("cifar")
    generator = np.random.default_rng(3)
    for name, count in (*((f"data_batch_{i}.bin", 60 + (5 * (i == 2))) for i in range(1, 6)), ("test_batch.bin", 90)):
        records = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of four classes, one of them without validation pictures; one training picture is damaged."""
    folder = tmp_path_factory.mktemp("tree")
    for split, classes, count in (("train", 4, 12), ("val", 3, 5)):
        for label in range(classes):
            (folder / split / f"n{label}").mkdir(parents=True)
            for i in range(count):
                pixels = np.random.default_rng([label, i, len(split)]).integers(0, 256, (50, 40 + i, 3), dtype=np.uint8)
                made = io.BytesIO()
                Image.fromarray(pixels).save(made, "JPEG")
                (folder / split / f"n{label}" / f"{i}.JPEG").write_bytes(made.getvalue())
    damaged = folder / "train" / "n2" / "7.JPEG"
    damaged.write_bytes(damaged.read_bytes()[:700])
    return folder


def train(
    name: str,
    folder: Path,
    change: Change = lambda p: None,
    side: int = 32,
    epochs: int = 1,
    model: BluePrint | None = None,
) -> TrainingResult:
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_cpu().amp(False).manual_seed(9).global_batch_size(40).input_resolution(side)
        setting = PREPROCESSOR_SETTING.dataset(name, folder).preprocess_workers(2)
        if name == "imagenet":
            setting.normalization(NormMode.IMAGENET).val_transforms(CenterCrop(side))
            setting.train_transforms(RandomResizedCrop(side), RandomHorizontalFlip())
        else:
            setting.normalization(NormMode.CIFAR)
            setting.train_transforms(Pad(4), RandomCrop(side), RandomHorizontalFlip())
        change(setting)
        classes = setting.commit().config.num_classes
        task = small_task(epochs, classes=classes)
        if model is not None:
            task.model(model)
        task.compile()
        return task.run()


def test_cifar_trains_alike_from_memory_from_files_and_packed(ten, tmp_path):
    first = train("cifar10", ten)
    assert first.epochs == 1
    partial = train("cifar10", ten, lambda p: p.partial_mode().read_ahead(1 << 16))
    assert cli.main(["pack", "cifar10", "--input", str(ten), "--output", str(tmp_path)]) == 0
    packed = train("cifar10", tmp_path, lambda p: p.using_dts_format(True))
    for other in (partial, packed):
        assert (other.data_digest, other.weight_digest) == (first.data_digest, first.weight_digest)


def test_imagenet_trains_alike_from_memory_and_from_files(pictures):
    first = train("imagenet", pictures, lambda p: p.on_corrupt("substitute", 1).fully_mode(), side=24)
    second = train("imagenet", pictures, lambda p: p.on_corrupt("substitute", 1).partial_mode(), side=24)
    assert (first.data_digest, first.weight_digest) == (second.data_digest, second.weight_digest)


def test_a_damaged_picture_ends_a_run_that_did_not_say_otherwise(pictures):
    with pytest.raises(DataServerError, match=r"n2/7\.JPEG"):
        train("imagenet", pictures, side=24)


def test_pictures_are_trained_on_at_two_resolutions(pictures):
    def stepped(setting):
        setting.on_corrupt("substitute", 1).train_resolutions(SteppedResolution([(0, 16), (1, 24)]))

    network = BluePrint(seq(conv(8, 3), bn(), relu(), gap(), fc(4)))
    result = train("imagenet", pictures, stepped, side=24, epochs=2, model=network)
    assert [record.resolution for record in result.history] == [16, 24]


def test_more_than_two_resolutions_are_not_for_a_compiled_task(pictures):
    with pytest.raises(ValueRejected, match=r"3 sizes in 3 epochs \(12, 16, 20\)"):
        train("imagenet", pictures, lambda p: p.train_resolutions(ProgressiveResolution(12, 24, 3)), side=24, epochs=3)
