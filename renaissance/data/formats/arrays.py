"""A data set of small images, decoded and in memory, and the checks that every reader and writer of one shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import FormatError
from renaissance.data.catalogue import DatasetInfo

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """One split of a data set of small images. The index of an image in ``images`` is its sample id.

    ``images`` is uint8 [N,H,W,C], C-contiguous; ``labels`` is int32 [N]; ``source`` names the file or files, for
    messages; ``format`` is "dts" or "raw". Both formats of the same data give equal arrays.
    """

    name: str
    split: str
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int32]
    num_classes: int
    source: str
    format: str

    def __len__(self) -> int:
        return int(self.labels.size)


def check_labels(labels: Bytes, info: DatasetInfo, source: object, first_offset: int) -> None:
    """Raise FormatError naming the first record of uint8 ``labels`` [N] whose label is not a class of the set.

    ``first_offset`` is the offset in bytes of label 0 in the file called ``source``.
    """
    wrong = np.flatnonzero(labels >= info.num_classes)
    if wrong.size:
        record = int(wrong[0])
        raise FormatError(
            f"{source}: record {record} (offset {first_offset + record}): label is {labels[record]}; "
            f"expected 0 to {info.num_classes - 1}. {wrong.size} of {labels.size} labels are out of range; "
            f"the file is damaged or belongs to another data set"
        )
