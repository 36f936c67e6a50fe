"""Opening by name: aliases, the choice between packed and published files, and clear words about what is missing."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from renaissance.core.enums import DatasetType
from renaissance.core.errors import DigestMismatch, MissingFileError, ValueRejected
from renaissance.data.catalogue import CATALOGUE
from renaissance.data.formats import ArrayDataset, dataset_files, dataset_info, open_dataset
from renaissance.data.formats.dts import write_dts

REAL = Path(__file__).parents[2] / "data" / "mnist"
TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


@pytest.fixture
def raw_folder(tmp_path: Path) -> Path:
    """The published MNIST test files."""
    for name in TEST_FILES:
        shutil.copy(REAL / name, tmp_path)
    return tmp_path


def pack(folder: Path, dataset: ArrayDataset) -> Path:
    path = folder / "mnist_test.dts"
    write_dts(path, "mnist", "val", dataset.labels.astype(np.uint8), dataset.images)
    return path


def test_both_formats_give_equal_arrays(raw_folder):
    raw = open_dataset("mnist", raw_folder, "val")
    path = pack(raw_folder, raw)
    packed = open_dataset("mnist", raw_folder, "val")
    assert (raw.format, packed.format) == ("raw", "dts")
    assert packed.source == str(path)
    assert all(str(raw_folder / name) in raw.source for name in TEST_FILES)
    for dataset in (raw, packed):
        assert (dataset.name, dataset.split, dataset.num_classes, len(dataset)) == ("mnist", "val", 10, 10000)
        assert dataset.images.shape == (10000, 28, 28, 1)
        assert dataset.images.dtype == np.uint8
        assert dataset.images.flags.c_contiguous
        assert dataset.labels.dtype == np.int32
    assert np.array_equal(raw.images, packed.images)
    assert np.array_equal(raw.labels, packed.labels)


def test_the_format_asked_for_is_the_one_read(raw_folder):
    with pytest.raises(MissingFileError, match=r"mnist_test\.dts: no such file; make it with `renaissance pack mnist`"):
        open_dataset("mnist", raw_folder, "val", format="dts")
    pack(raw_folder, open_dataset("mnist", raw_folder, "val"))
    assert open_dataset("mnist", raw_folder, "val", format="raw").format == "raw"
    assert open_dataset("mnist", raw_folder, "val", format="dts").format == "dts"


def test_a_damaged_packed_file_is_not_replaced_by_the_published_one(raw_folder):
    path = pack(raw_folder, open_dataset("mnist", raw_folder, "val"))
    with path.open("r+b") as file:
        file.seek(20000)
        file.write(b"\x55\xaa")
    with pytest.raises(DigestMismatch, match="CRC-32"):
        open_dataset("mnist", raw_folder, "val")
    assert len(open_dataset("mnist", raw_folder, "val", verify=False)) == 10000


def test_aliases_lead_to_one_name():
    aliases = {
        "mnist": ["mnist", "MNIST"],
        "cifar10": ["cifar10", "cifar-10", "cifar_10", "cifar", "CIFAR-10"],
        "cifar100": ["cifar100", "cifar-100", "cifar_100"],
        "imagenet": ["imagenet", "image-net", "image_net", "ImageNet"],
    }
    for name, spellings in aliases.items():
        assert {dataset_info(spelling).name for spelling in spellings} == {name}
    assert set(aliases) == set(CATALOGUE)


def test_catalogue_says_what_the_sets_are():
    facts = {i.name: (i.type, i.num_classes, i.height, i.width, i.channels, i.pixels) for i in CATALOGUE.values()}
    assert facts == {
        "mnist": (DatasetType.MNIST, 10, 28, 28, 1, 784),
        "cifar10": (DatasetType.CIFAR_10, 10, 32, 32, 3, 3072),
        "cifar100": (DatasetType.CIFAR_100, 100, 32, 32, 3, 3072),
        "imagenet": (DatasetType.IMAGENET, 0, 0, 0, 3, 0),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fashion", "train"), "unknown data set 'fashion'; expected one of: mnist, cifar10, cifar100, imagenet"),
        (("mnist", "test"), "unknown split 'test'; expected one of: train, val"),
        (("mnist", "train", "tar"), "unknown data format 'tar'; expected one of: auto, dts, raw"),
        (("imagenet", "train"), "data set 'imagenet' is not one of small images .*; serve it with"),
    ],
)
def test_requests_that_cannot_be_met_say_why(tmp_path, arguments, message):
    name, split, *rest = arguments
    with pytest.raises(ValueRejected, match=message):
        open_dataset(name, tmp_path, split, *rest)


def test_missing_files_are_listed(tmp_path):
    with pytest.raises(MissingFileError, match=r"train-images-idx3-ubyte and no .*or a packed mnist_train\.dts"):
        open_dataset("mnist", tmp_path, "train")
    with pytest.raises(
        MissingFileError, match=r"no data_batch_1\.bin to data_batch_5\.bin, .*or a packed cifar10_train"
    ):
        open_dataset("cifar-10", tmp_path, "train")
    with pytest.raises(MissingFileError, match=r"no cifar-100-binary\.tar\.gz; `renaissance fetch cifar100`"):
        open_dataset("cifar100", tmp_path, "val", "raw")
    with pytest.raises(MissingFileError, match="nowhere: no such folder"):
        open_dataset("mnist", tmp_path / "nowhere", "train")


def test_packed_cifar_is_read_through_the_same_door(tmp_path):
    images = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 32, 32, 3)
    write_dts(tmp_path / "cifar100_train.dts", "cifar100", "train", np.array([99, 0], dtype=np.uint8), images)
    dataset = open_dataset("cifar-100", tmp_path, "train")
    assert (dataset.name, dataset.num_classes, dataset.labels.tolist()) == ("cifar100", 100, [99, 0])
    assert np.array_equal(dataset.images, images)


def test_files_of_a_set_are_found_in_a_fixed_order(raw_folder):
    (raw_folder / "mnist_test.dts").touch()
    (raw_folder / "t10k-labels-idx1-ubyte").touch()
    (raw_folder / "notes.txt").touch()
    names = [path.name for path in dataset_files("mnist", raw_folder)]
    assert names == ["mnist_test.dts", TEST_FILES[0], "t10k-labels-idx1-ubyte", TEST_FILES[1]]
    assert dataset_files("imagenet", raw_folder) == []
