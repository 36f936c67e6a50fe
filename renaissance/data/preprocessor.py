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
from renaissance.core.errors import ValueRejected
from renaissance.core.machine import MAX_WORKERS
from renaissance.core.settings import GLOBAL_SETTING, GlobalSetting, TrainResolution, WriteOnce
from renaissance.data.catalogue import DatasetInfo, dataset_info
from renaissance.data.formats.imagenet import picture_level
from renaissance.data.protocol import (
    CORRUPT_POLICIES,
    DEFAULT_MAX_CORRUPT,
    DEFAULT_MAX_CORRUPT_SHARE,
    MAX_CORRUPT,
    ORDERS,
)
from renaissance.data.recipe import DECODE_MODES, Normalization, Recipe
from renaissance.data.resolution import MAX_EPOCH, ProgressiveResolution, SteppedResolution
from renaissance.data.stored import check_sizes, count_classes, download_missing
from renaissance.data.transforms import Transform

MIN_RING_DEPTH = 2
MAX_RING_DEPTH = 64
DEFAULT_RING_DEPTH = 4
LOADS = ("auto", "fully", "partial")
MIN_READ_AHEAD = 1 << 16
MAX_READ_AHEAD = 1 << 34

ResolutionSchedule = ProgressiveResolution | SteppedResolution


@dataclass(frozen=True, slots=True)
class CorruptPolicy:
    """What becomes of damaged samples: "fail", "substitute" or "blank", and how many a session may meet."""

    action: str = CORRUPT_POLICIES[0]
    max_samples: int = DEFAULT_MAX_CORRUPT  # distinct samples
    max_share: float = DEFAULT_MAX_CORRUPT_SHARE  # of the set; one sample is always allowed


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """The committed configuration. ``preprocess_workers`` is None when the core plan shall choose."""

    info: DatasetInfo
    num_classes: int  # of the files at hand, where the data set does not fix it
    folder: Path
    format: str  # "auto" (packed when it exists), "dts" or "raw", as open_dataset takes it
    level: int | str | None  # of packed pictures; None: the one that is there
    load: str  # "auto", "fully" or "partial"
    read_ahead: int | None  # bytes, of partial loading; None: the dataserver's default
    order: str  # "global" or "blocks"
    corrupt: CorruptPolicy
    train_recipe: Recipe
    val_recipe: Recipe
    resolutions: ResolutionSchedule | None  # of the training set; None: always that of train_recipe
    preprocess_workers: int | None
    load_workers: int
    shuffle_train: bool
    drop_last: bool
    ring_depth: int

    @property
    def dataset(self) -> str:
        """Canonical name of the data set."""
        return self.info.name

    def private_only(self) -> str:
        """The first option that only a dataserver of one's own can obey; "" when there is none."""
        asked = {
            "using_dts_format": self.format != "auto",
            "load": self.load != "auto",
            "read_ahead": self.read_ahead is not None,
        }
        return next((name for name, set_here in asked.items() if set_here), "")

    def train_recipe_at(self, epoch: int) -> Recipe:
        """The training recipe of an epoch, counted from 0: that of its resolution."""
        return (
            self.train_recipe
            if self.resolutions is None
            else self.train_recipe.with_resolution(self.resolutions.at(epoch))
        )

    def to_json(self) -> dict[str, object]:
        """Plain values for a result file; recipes appear with their fingerprints."""
        return {
            "dataset": self.info.name,
            "num_classes": self.num_classes,
            "folder": str(self.folder),
            "format": self.format,
            "level": self.level,
            "load": self.load,
            "read_ahead": self.read_ahead,
            "order": self.order,
            "on_corrupt": self.corrupt.action,
            "max_corrupt": self.corrupt.max_samples,
            "max_corrupt_share": self.corrupt.max_share,
            "train_resolutions": None if self.resolutions is None else repr(self.resolutions),
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
        for what, value in (("name", name), ("path", os.fspath(path) if isinstance(path, os.PathLike) else path)):
            if not isinstance(value, str) or not value:
                raise ValueRejected(f"dataset: {what} is {value!r}; expected text")
        self._set({"dataset": dataset_info(name).name, "path": Path(path)})
        return self

    def preprocess_workers(self, n: int) -> PreprocessorSetting:
        """Worker processes that decode and augment, 1 to 128 (unset: chosen from the cores, and printed)."""
        self._set({"preprocess_workers": _integer("preprocess_workers", n, 1, MAX_WORKERS)})
        return self

    def load_workers(self, n: int) -> PreprocessorSetting:
        """Processes that only read files. Here every worker reads what it prepares, so only 1 is possible."""
        if _integer("load_workers", n, 1, MAX_WORKERS) != 1:
            raise ValueRejected(
                f"load_workers is {n}; those that prepare also read, ahead of what they prepare, so it is always 1: "
                "read_ahead(bytes) says how far ahead, preprocess_workers(n) how many there are"
            )
        self._set({"load_workers": n})
        return self

    def color_channels(self, n: int) -> PreprocessorSetting:
        """What the pictures must have, 1 or 3; commit refuses a data set with another number."""
        if n not in (1, 3) or isinstance(n, bool):
            raise ValueRejected(f"color_channels is {n!r}; expected 1 or 3")
        self._set({"color_channels": n})
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
            try:
                value = Normalization(tuple(mode), tuple(std))
            except TypeError:
                raise ValueRejected(
                    f"normalization: mean is {mode!r} and std is {std!r}; expected a number per channel of each"
                ) from None
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

    def decode(self, mode: str) -> PreprocessorSetting:
        """How JPEG pictures become pixels: "scaled" (default), "exact" or "fast" (docs/recipes.md)."""
        self._set({"decode": _one_of("decode", mode, DECODE_MODES)})
        return self

    def train_resolutions(self, schedule: ResolutionSchedule) -> PreprocessorSetting:
        """Another training resolution from epoch to epoch; its last one is GLOBAL_SETTING's train_resolution."""
        if not isinstance(schedule, ProgressiveResolution | SteppedResolution):
            raise ValueRejected(
                f"train_resolutions is {schedule!r}; expected a ProgressiveResolution or SteppedResolution"
            )
        self._set({"train_resolutions": schedule})
        return self

    def using_dts_format(self, on: bool, level: int | str | None = None) -> PreprocessorSetting:
        """Read packed DTS files (True) or the published files (False); unset: packed ones when they exist.

        ``level``: which packed file of pictures, 0 to 3 or "RAW"; None: the only one there is.
        """
        on = _flag("using_dts_format", on)
        if level is not None:
            if not on:
                raise ValueRejected(f"using_dts_format: level {level!r} is one of packed files; give it with True only")
            level = picture_level(level).name
        self._set({"format": "dts" if on else "raw", "level": level})
        return self

    def load(self, mode: str) -> PreprocessorSetting:
        """Where samples are kept: all "fully" in memory, "partial"ly with files read ahead, or "auto" (default)."""
        self._set({"load": _one_of("load", mode, LOADS)})
        return self

    def fully_mode(self, on: bool = True) -> PreprocessorSetting:
        """``load("fully")``, or ``load("partial")`` when off."""
        return self.load("fully" if _flag("fully_mode", on) else "partial")

    def partial_mode(self, on: bool = True) -> PreprocessorSetting:
        """``load("partial")``, or ``load("fully")`` when off."""
        return self.load("partial" if _flag("partial_mode", on) else "fully")

    def read_ahead(self, size: int) -> PreprocessorSetting:
        """Bytes that each worker may hold read and not yet prepared, in partial loading (64 KiB to 16 GiB)."""
        self._set({"read_ahead": _integer("read_ahead", size, MIN_READ_AHEAD, MAX_READ_AHEAD)})
        return self

    def order(self, mode: str) -> PreprocessorSetting:
        """Shuffle the whole set ("global", default) or blocks of it ("blocks"), which reads packed files forwards."""
        self._set({"order": _one_of("order", mode, ORDERS)})
        return self

    def on_corrupt(
        self, action: str, max_samples: int = DEFAULT_MAX_CORRUPT, max_share: float = DEFAULT_MAX_CORRUPT_SHARE
    ) -> PreprocessorSetting:
        """What becomes of a damaged sample: "fail" (default), "substitute" another one, or leave its row "blank".

        More distinct damaged samples than ``max_samples``, or than ``max_share`` of the set, end the session.
        """
        _one_of("on_corrupt", action, CORRUPT_POLICIES)
        _integer("on_corrupt: max_samples", max_samples, 0, MAX_CORRUPT)
        if isinstance(max_share, bool) or not isinstance(max_share, int | float) or not 0 <= max_share <= 1:
            raise ValueRejected(f"on_corrupt: max_share is {max_share!r}; expected a number from 0 to 1")
        self._set({"on_corrupt": CorruptPolicy(action, max_samples, float(max_share))})
        return self

    def download(self, on: bool, mirrors: Sequence[str] | None = None) -> PreprocessorSetting:
        """Let commit fetch published files that are missing (MNIST, CIFAR), from ``mirrors`` or the known ones."""
        if mirrors is not None and not on:
            raise ValueRejected("download: mirrors are given and downloading is off; they act with True only")
        if isinstance(mirrors, str):
            raise ValueRejected(f"download: mirrors is {mirrors!r}; expected a list of addresses")
        self._set({"download": _flag("download", on), "mirrors": None if mirrors is None else tuple(mirrors)})
        return self

    def sdmp_factor(self, n: int) -> PreprocessorSetting:
        """Epochs that are served from one decoding. Only 1 is possible: every epoch's bytes are its own."""
        if _integer("sdmp_factor", n, 1, MAX_WORKERS) != 1:
            raise ValueRejected(
                f"sdmp_factor is {n}: epochs that replay the samples of an earlier one would depend on where a run "
                "began; it is always 1. To save decoding, pack the set at level RAW"
            )
        self._set({"sdmp_factor": n})
        return self

    def using_cpvs(self, on: bool) -> PreprocessorSetting:
        """Keep the prepared validation set in memory. Only False is possible: it is prepared anew each time."""
        if _flag("using_cpvs", on):
            raise ValueRejected(
                "using_cpvs is True: prepared validation samples are not kept (ImageNet's would take 28 GiB); leave it "
                'False, and use load("fully") to keep the stored ones in memory'
            )
        self._set({"using_cpvs": on})
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
        file that does not exist, FormatError for a set whose classes cannot be counted, DownloadFailed.
        """
        config = self._build()
        self._global.dataset_facts(config.info.type, config.num_classes, config.info.channels)
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
        info, format, level = dataset_info(name), str(get("format", "auto")), get("level")
        assert level is None or isinstance(level, int | str)
        wanted = self._global.snapshot()
        if wanted.train_resolution is None or wanted.val_resolution is None:
            missing = "train_resolution" if wanted.train_resolution is None else "val_resolution"
            raise ValueRejected(
                f"PREPROCESSOR_SETTING: {missing} is not set; call GLOBAL_SETTING.input_resolution("
                f"{info.height or 224}) before commit()"
            )
        self._check_kind(info, level)
        sides = {"train": wanted.train_resolution.end, "val": wanted.val_resolution}
        recipes = [self._recipe(split, info, side, level == "RAW") for split, side in sides.items()]
        schedule = self._schedule(info, recipes[0], wanted.train_resolution)
        if get("download"):
            mirrors = get("mirrors")
            download_missing(info, folder, format, mirrors if isinstance(mirrors, tuple) else None)
        num_classes = count_classes(info, folder, format, level, get("order") == "blocks")
        workers, read_ahead = get("preprocess_workers"), get("read_ahead")
        corrupt = get("on_corrupt", CorruptPolicy())
        assert isinstance(corrupt, CorruptPolicy)
        return PreprocessorConfig(
            info=info,
            num_classes=num_classes,
            folder=folder,
            format=format,
            level=level,
            load=str(get("load", LOADS[0])),
            read_ahead=read_ahead if isinstance(read_ahead, int) else None,
            order=str(get("order", ORDERS[0])),
            corrupt=corrupt,
            train_recipe=recipes[0],
            val_recipe=recipes[1],
            resolutions=schedule,
            preprocess_workers=workers if isinstance(workers, int) else None,
            load_workers=1,
            shuffle_train=bool(get("shuffle_train", True)),
            drop_last=bool(get("drop_last", False)),
            ring_depth=int(str(get("ring_depth", DEFAULT_RING_DEPTH))),
        )

    def _check_kind(self, info: DatasetInfo, level: int | str | None) -> None:
        """Refuse options that the chosen set cannot obey."""
        get = self._values.get
        if (channels := get("color_channels", info.channels)) != info.channels:
            raise ValueRejected(f"color_channels is {channels}; {info.name} has {info.channels}")
        if get("read_ahead") is not None and (get("load") == "fully" or (info.pixels and get("load") != "partial")):
            raise ValueRejected(
                "read_ahead acts in partial loading only, and all is held in memory; call partial_mode()"
            )
        if not info.pixels:
            return
        if level is not None:
            raise ValueRejected(
                f"using_dts_format: level is {level!r}; only packed pictures have levels, not {info.name}"
            )
        if get("order", ORDERS[0]) != ORDERS[0]:
            raise ValueRejected(f"order is 'blocks'; files of {info.name} have no blocks, leave it at 'global'")

    def _schedule(self, info: DatasetInfo, recipe: Recipe, train: TrainResolution) -> ResolutionSchedule | None:
        schedule = self._values.get("train_resolutions")
        if not isinstance(schedule, ProgressiveResolution | SteppedResolution):
            return None
        last = schedule.at(MAX_EPOCH)
        if last != train.end:
            raise ValueRejected(
                f"train_resolutions ends at {last} pixels, but GLOBAL_SETTING's train_resolution is {train.end}; "
                "make them equal"
            )
        for size in schedule.sizes():
            try:
                check_sizes(recipe.with_resolution(size), info)
            except ValueRejected as error:
                raise ValueRejected(f"train_resolutions: at {size} pixels: {error}") from None
        return schedule

    def _recipe(self, split: str, info: DatasetInfo, resolution: int, decoded: bool) -> Recipe:
        transforms = self._values.get(f"{split}_transforms", ())
        normalization = self._values.get("normalization", NormMode.NO_NORM)
        decode = self._values.get("decode", DECODE_MODES[0])
        assert isinstance(transforms, tuple)  # written only by the setters above
        assert isinstance(normalization, NormMode | Normalization)
        try:
            recipe = Recipe.build(
                transforms, normalization, resolution, info.channels, validation=split == "val", decode=str(decode)
            )
            check_sizes(recipe, info)
            if decoded:
                recipe.require_stored_pixels()
        except ValueRejected as error:
            raise ValueRejected(f"{split}_transforms: {error}") from None
        return recipe


def _one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueRejected(f"{name} is {value!r}; expected one of: {', '.join(allowed)}")
    return value


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueRejected(f"{name} is {value!r}; expected a whole number from {low} to {high}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


PREPROCESSOR_SETTING = PreprocessorSetting()
