"""What the training and validation data are: ``PREPROCESSOR_SETTING``, configured by chained setters and ``commit()``.

``commit`` validates everything at once, pushes the facts of the data set (type, classes, channels) into
``GLOBAL_SETTING`` and freezes a ``PreprocessorConfig``, from which a task opens its sessions. Settings are set once,
as in ``renaissance.core.settings``; after ``commit`` nothing new may be set until ``reset``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from renaissance.core.enums import NormMode
from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.core.machine import MAX_WORKERS
from renaissance.core.settings import GLOBAL_SETTING, GlobalSetting, WriteOnce
from renaissance.data.catalogue import SPLITS, DatasetInfo, dataset_info
from renaissance.data.formats.dts import LAYOUTS
from renaissance.data.recipe import Normalization, Recipe
from renaissance.data.transforms import Transform

MIN_RING_DEPTH = 2
MAX_RING_DEPTH = 64
DEFAULT_RING_DEPTH = 4


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """The committed configuration. ``preprocess_workers`` is None when the core plan shall choose."""

    info: DatasetInfo
    folder: Path
    format: str  # "auto" (packed when it exists), "dts" or "raw", as open_dataset takes it
    train_recipe: Recipe
    val_recipe: Recipe
    preprocess_workers: int | None
    load_workers: int
    shuffle_train: bool
    drop_last: bool
    ring_depth: int

    @property
    def dataset(self) -> str:
        """Canonical name of the data set."""
        return self.info.name

    def to_json(self) -> dict[str, object]:
        """Plain values for a result file; recipes appear with their fingerprints."""
        return {
            "dataset": self.info.name,
            "folder": str(self.folder),
            "format": self.format,
            "train_recipe": self.train_recipe.to_json(),
            "train_recipe_fingerprint": self.train_recipe.fingerprint(),
            "val_recipe": self.val_recipe.to_json(),
            "val_recipe_fingerprint": self.val_recipe.fingerprint(),
            "preprocess_workers": self.preprocess_workers,
            "load_workers": self.load_workers,
            "shuffle_train": self.shuffle_train,
            "drop_last": self.drop_last,
            "ring_depth": self.ring_depth,
        }


class PreprocessorSetting(WriteOnce):
    """Builder of the data configuration; ``GLOBAL_SETTING`` gives the resolutions."""

    def __init__(self, global_setting: GlobalSetting = GLOBAL_SETTING) -> None:
        super().__init__("PREPROCESSOR_SETTING")
        self._global = global_setting

    def dataset(self, name: str, path: str | os.PathLike[str]) -> PreprocessorSetting:
        """Which data set, by name or alias, and the folder that holds its files."""
        for what, value in (("name", name), ("path", os.fspath(path))):
            if not isinstance(value, str) or not value:
                raise ValueRejected(f"dataset: {what} is {value!r}; expected text")
        self._set({"dataset": dataset_info(name).name, "path": Path(path)})
        return self

    def preprocess_workers(self, n: int) -> PreprocessorSetting:
        """Worker processes that decode and augment, 1 to 128 (unset: chosen from the cores, and printed)."""
        self._set({"preprocess_workers": _integer("preprocess_workers", n, 1, MAX_WORKERS)})
        return self

    def load_workers(self, n: int) -> PreprocessorSetting:
        """Workers that read files. The data sets of this version are held in memory, so only 1 is possible."""
        if _integer("load_workers", n, 1, MAX_WORKERS) != 1:
            raise ValueRejected(f"load_workers is {n}; data sets that are held in memory take exactly 1")
        self._set({"load_workers": n})
        return self

    def normalization(
        self, mode: NormMode | Normalization | Sequence[float], std: Sequence[float] | None = None
    ) -> PreprocessorSetting:
        """A preset, a ``Normalization``, or a mean and a std per channel on the 0..1 scale (default: divide by 255).

        Applied to both sets.
        """
        value: NormMode | Normalization
        if isinstance(mode, NormMode | Normalization):
            if std is not None:
                raise ValueRejected(f"normalization: std is {std!r}, but {mode} already has its own; drop one")
            value = mode
        elif std is None:
            raise ValueRejected(f"normalization is {mode!r}; expected a NormMode, a Normalization, or a mean and a std")
        else:
            value = Normalization(tuple(mode), tuple(std))
        self._set({"normalization": value})
        return self

    def train_transforms(self, *transforms: Transform) -> PreprocessorSetting:
        """What is done to every training sample, in order."""
        self._set({"train_transforms": transforms})
        return self

    def val_transforms(self, *transforms: Transform) -> PreprocessorSetting:
        """What is done to every validation sample, in order; random transforms are refused by commit."""
        self._set({"val_transforms": transforms})
        return self

    def using_dts_format(self, on: bool) -> PreprocessorSetting:
        """Read packed DTS files (True) or the published files (False); unset: packed ones when they exist."""
        self._set({"format": "dts" if _flag("using_dts_format", on) else "raw"})
        return self

    def shuffle_train(self, on: bool) -> PreprocessorSetting:
        """Shuffle the training set every epoch (default True); validation is never shuffled."""
        self._set({"shuffle_train": _flag("shuffle_train", on)})
        return self

    def drop_last(self, on: bool) -> PreprocessorSetting:
        """Leave out the last batch of a training epoch when it is not full (default False)."""
        self._set({"drop_last": _flag("drop_last", on)})
        return self

    def ring_depth(self, n: int) -> PreprocessorSetting:
        """Batches in shared memory at a time, an even number from 2 to 64 (default 4)."""
        n = _integer("ring_depth", n, MIN_RING_DEPTH, MAX_RING_DEPTH)
        if n % 2:
            raise ValueRejected(f"ring_depth is {n}; expected an even number, because slots alternate between A and B")
        self._set({"ring_depth": n})
        return self

    def commit(self) -> PreprocessorSetting:
        """Validate everything and freeze the configuration; committing again changes nothing.

        Raises ValueRejected naming the option, transform or missing setting, MissingFileError for a folder or packed
        file that does not exist.
        """
        config = self._build()
        self._global.dataset_facts(config.info.type, config.info.num_classes, config.info.channels)
        self._values["committed"] = config
        self.lock("commit()")
        return self

    @property
    def config(self) -> PreprocessorConfig:
        """The committed configuration. Raises ValueRejected before ``commit``."""
        config = self._values.get("committed")
        if not isinstance(config, PreprocessorConfig):
            raise ValueRejected("PREPROCESSOR_SETTING: nothing is committed yet; call dataset(...) and then commit()")
        return config

    @property
    def committed(self) -> bool:
        return "committed" in self._values

    def _build(self) -> PreprocessorConfig:
        get = self._values.get
        name, folder = get("dataset"), get("path")
        if not isinstance(name, str) or not isinstance(folder, Path):
            raise ValueRejected("PREPROCESSOR_SETTING: no data set is chosen; call dataset(name, path) before commit()")
        info, format = dataset_info(name), str(get("format", "auto"))
        _check_files(info, folder, format)
        wanted = self._global.snapshot()
        if wanted.train_resolution is None or wanted.val_resolution is None:
            missing = "train_resolution" if wanted.train_resolution is None else "val_resolution"
            raise ValueRejected(
                f"PREPROCESSOR_SETTING: {missing} is not set; call GLOBAL_SETTING.input_resolution({info.height}) "
                "before commit()"
            )
        workers = get("preprocess_workers")
        return PreprocessorConfig(
            info=info,
            folder=folder,
            format=format,
            train_recipe=self._recipe("train", info, wanted.train_resolution.end),
            val_recipe=self._recipe("val", info, wanted.val_resolution),
            preprocess_workers=workers if isinstance(workers, int) else None,
            load_workers=1,
            shuffle_train=bool(get("shuffle_train", True)),
            drop_last=bool(get("drop_last", False)),
            ring_depth=int(str(get("ring_depth", DEFAULT_RING_DEPTH))),
        )

    def _recipe(self, split: str, info: DatasetInfo, resolution: int) -> Recipe:
        transforms = self._values.get(f"{split}_transforms", ())
        normalization = self._values.get("normalization", NormMode.NO_NORM)
        assert isinstance(transforms, tuple)  # written only by the setters above
        assert isinstance(normalization, NormMode | Normalization)
        try:
            recipe = Recipe.build(transforms, normalization, resolution, info.channels, validation=split == "val")
            recipe.canvas_sizes(info.height, info.width)
        except ValueRejected as error:
            raise ValueRejected(f"{split}_transforms: {error}") from None
        return recipe


def _check_files(info: DatasetInfo, folder: Path, format: str) -> None:
    """Refuse a data set that cannot be read, before a process is started for it."""
    layout = LAYOUTS.get(info.name)
    if layout is None:
        raise ValueRejected(
            f"dataset: {info.name!r} is known, but this version cannot read it; it reads: {', '.join(LAYOUTS)}"
        )
    if not folder.is_dir():
        raise MissingFileError(f"dataset {info.name!r}: {folder}: no such folder; give the one that holds its files")
    if format == "dts":
        for packed in (folder / layout.file_name(split) for split in SPLITS):
            if not packed.is_file():
                raise MissingFileError(
                    f"using_dts_format: {packed}: no such file; make it with `renaissance pack {info.name}`"
                )


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueRejected(f"{name} is {value!r}; expected a whole number from {low} to {high}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


PREPROCESSOR_SETTING = PreprocessorSetting()
