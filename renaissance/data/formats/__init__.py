"""Formats of data sets: DTS (packed) and RAW (as published), behind ``open_dataset``."""

from renaissance.data.catalogue import DatasetInfo, dataset_info
from renaissance.data.formats.arrays import ArrayDataset
from renaissance.data.formats.opening import dataset_files, open_dataset

__all__ = ["ArrayDataset", "DatasetInfo", "dataset_files", "dataset_info", "open_dataset"]
