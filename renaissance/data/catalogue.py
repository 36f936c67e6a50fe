"""The data sets this system knows: names and aliases, shapes, and the published files with their checksums.

Knowing a name is not the same as being able to read it; ``renaissance.data.formats`` says which readers exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from renaissance.core.enums import DatasetType
from renaissance.core.errors import ValueRejected

SPLITS = ("train", "val")
_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/"
_PRIMARY = "https://tech-renaissance.cn/download/"
"""Mirrors of the project that defined DTS (spec/data 8.1)."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file as its authors publish it. ``crc32`` is the zlib CRC-32 of the whole file, ``size`` its bytes."""

    name: str
    crc32: int
    size: int


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What is fixed about a data set. Height and width are pixels; 0 means they vary from image to image.

    ``num_classes`` 0: it is measured, being the number of class folders of the files at hand.
    """

    name: str
    type: DatasetType
    num_classes: int
    height: int
    width: int
    channels: int
    aliases: tuple[str, ...] = ()
    published: tuple[PublishedFile, ...] = ()
    mirrors: tuple[str, ...] = ()
    """URLs of folders that hold the published files, in the order in which they are tried; empty: not for download."""

    @property
    def pixels(self) -> int:
        """Values of one image, height x width x channels (0 when the size varies)."""
        return self.height * self.width * self.channels


MNIST = DatasetInfo(
    "mnist",
    DatasetType.MNIST,
    num_classes=10,
    height=28,
    width=28,
    channels=1,
    published=(
        PublishedFile("train-images-idx3-ubyte.gz", 0xEB392171, 9_912_422),
        PublishedFile("train-labels-idx1-ubyte.gz", 0x28EE680A, 28_881),
        PublishedFile("t10k-images-idx3-ubyte.gz", 0xDF9322EE, 1_648_877),
        PublishedFile("t10k-labels-idx1-ubyte.gz", 0x5C1CF43B, 4_542),
    ),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", f"{_PRIMARY}mnist/"),
)
CIFAR_10 = DatasetInfo(
    "cifar10",
    DatasetType.CIFAR_10,
    num_classes=10,
    height=32,
    width=32,
    channels=3,
    aliases=("cifar", "cifar-10", "cifar_10"),
    published=(PublishedFile("cifar-10-binary.tar.gz", 0xF709D4BA, 170_052_171),),
    mirrors=(_CIFAR_HOME, f"{_PRIMARY}cifar-10/"),
)
CIFAR_100 = DatasetInfo(
    "cifar100",
    DatasetType.CIFAR_100,
    num_classes=100,
    height=32,
    width=32,
    channels=3,
    aliases=("cifar-100", "cifar_100"),
    published=(PublishedFile("cifar-100-binary.tar.gz", 0xB2274685, 168_513_733),),
    mirrors=(_CIFAR_HOME, f"{_PRIMARY}cifar-100/"),
)
IMAGENET = DatasetInfo(
    "imagenet",
    DatasetType.IMAGENET,
    num_classes=0,
    height=0,
    width=0,
    channels=3,
    aliases=("image-net", "image_net"),
    published=(
        PublishedFile("ILSVRC2012_img_train.tar", 0x01F6E856, 147_897_477_120),
        PublishedFile("ILSVRC2012_img_val.tar", 0x7C951E53, 6_744_924_160),
    ),
)

CATALOGUE: dict[str, DatasetInfo] = {info.name: info for info in (MNIST, CIFAR_10, CIFAR_100, IMAGENET)}
_BY_ALIAS = {alias: info for info in CATALOGUE.values() for alias in (info.name, *info.aliases)}
_PUBLISHED = {file.name: file for info in CATALOGUE.values() for file in info.published}


def dataset_info(name: str) -> DatasetInfo:
    """Look a data set up by name or alias, in any case. Raises ValueRejected with the list of names."""
    info = _BY_ALIAS.get(name.lower())
    if info is None:
        raise ValueRejected(f"unknown data set {name!r}; expected one of: {', '.join(CATALOGUE)}")
    return info


def check_split(split: str) -> str:
    """Return ``split`` if it is one, else raise ValueRejected with the allowed values."""
    if split not in SPLITS:
        raise ValueRejected(f"unknown split {split!r}; expected one of: {', '.join(SPLITS)}")
    return split


def published_file(file_name: str) -> PublishedFile | None:
    """The published file of that name (no folder), or None."""
    return _PUBLISHED.get(file_name)
