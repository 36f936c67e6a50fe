"""Global settings of a run: the device, the seed, AMP and TF32, batch size, resolutions, compute threads.

``GLOBAL_SETTING`` is the one instance that user code configures with chained setters. Rules:

- A setting may be set once. Setting the same value again is fine, another value is an error that names both.
- ``lock`` (called when a task is compiled) turns every later first assignment into an error, because a compiled task
  would not see it. ``reset`` forgets everything; ``scoped`` gives a fresh scope and restores the outer one, so tests
  and notebooks can hold several configurations in one process.
- A setting that this build cannot honour raises; nothing falls back silently.

Facts of the data set (its type, classes, colour channels) are pushed in by ``PREPROCESSOR_SETTING.commit()``; this
module knows nothing about data sets. A task works from the frozen ``snapshot``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from renaissance.core.dtype import DType
from renaissance.core.enums import DatasetType
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.gpus import WORLD_SIZES, usable_gpus
from renaissance.core.log import get_logger

_log = get_logger("settings")

MAX_SEED = 2**64 - 1
MAX_RESOLUTION = 65_535
MAX_BATCH = 2**31 - 1
MAX_CLASSES = 2**24
"""Largest count that a float32 index could still name exactly; far above any data set."""

DEFAULT_SEED = 0
ALL_GPUS = "all"
HALVES = {"fp16": DType.FP16, "bf16": DType.BF16}
_UNSET = object()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainResolution:
    """Side length in pixels of training samples: ``begin`` until ``boundary_epoch`` epochs are done, then ``end``.

    ``boundary_epoch`` is None when the resolution never changes (then begin == end).
    """

    begin: int
    end: int
    boundary_epoch: int | None = None

    @property
    def progressive(self) -> bool:
        return self.boundary_epoch is not None

    def at(self, epoch: int) -> int:
        """Resolution of a 0-based epoch."""
        return self.begin if self.boundary_epoch is not None and epoch < self.boundary_epoch else self.end


@dataclass(frozen=True, slots=True)
class SettingSnapshot:
    """What the settings were at one moment; goes into result files. None: not set."""

    device: str | None
    gpus: tuple[int, ...]  # by rank; () on the CPU
    world_size: int
    seed: int
    amp: bool
    half: DType | None  # the 16-bit type of AMP
    tf32: bool
    local_batch_size: int | None
    global_batch_size: int | None
    train_resolution: TrainResolution | None
    val_resolution: int | None
    compute_threads: int | None
    dataset_type: DatasetType
    num_classes: int | None
    color_channels: int | None

    def to_json(self) -> dict[str, object]:
        """Plain values for a JSON file."""
        plain = asdict(self)
        plain["dataset_type"] = self.dataset_type.name
        plain["half"] = None if self.half is None else self.half.name.lower()
        return plain


def per_rank_batch(global_batch: int, world_size: int) -> int:
    """Batch size of one rank. Raises ValueRejected unless ``world_size`` divides ``global_batch``."""
    if global_batch % world_size:
        lower = global_batch // world_size * world_size
        near = f"{lower} or {lower + world_size}" if lower else str(world_size)
        raise ValueRejected(
            f"global_batch_size is {global_batch}, which {world_size} ranks cannot share evenly; "
            f"use a multiple of {world_size}, such as {near}"
        )
    return global_batch // world_size


def parse_gpus(text: str) -> tuple[int, ...]:
    """GPU ids of "0,1" or "0-3", sorted, without repeats. Raises ValueRejected for anything else.

    There must be 1, 2, 4 or 8 of them.
    """
    if not isinstance(text, str):
        raise ValueRejected(f'use_gpu is {text!r} ({type(text).__name__}); expected text, such as "0", "0,1" or "0-3"')
    ids: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, flags=re.ASCII)
        if match is None:
            raise ValueRejected(f'use_gpu: cannot read {part!r} in {text!r}; expected ids such as "0,1" or "0-3"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueRejected(f"use_gpu: range {part.strip()!r} in {text!r} runs backwards; write {last}-{first}")
        ids.update(range(first, last + 1))
    if len(ids) not in WORLD_SIZES:
        raise ValueRejected(f"use_gpu: {text!r} names {len(ids)} GPUs; expected 1, 2, 4 or 8")
    return tuple(sorted(ids))


class WriteOnce:
    """Named values that may be set once; the base of the setting builders.

    ``kind`` begins every message, so that it names the builder the option belongs to.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._values: dict[str, object] = {}
        self._locked_by: str | None = None

    def reset(self) -> None:
        """Forget every value and the lock."""
        self._values = {}
        self._locked_by = None

    def lock(self, reason: str) -> None:
        """Refuse new values from now on; ``reason`` is the operation that read the settings."""
        self._locked_by = self._locked_by or reason

    @contextmanager
    def scoped(self) -> Iterator[None]:
        """A fresh scope: all values unset inside, the former ones back afterwards, also after an error."""
        saved = (self._values, self._locked_by)
        self.reset()
        try:
            yield
        finally:
            self._values, self._locked_by = saved

    def _set(self, values: dict[str, object]) -> None:
        """Store all of ``values`` or, if one of them is refused, none."""
        for name, value in values.items():
            old = self._values.get(name, _UNSET)
            if old is not _UNSET and (old != value or type(old) is not type(value)):
                raise ValueRejected(
                    f"{self._kind}: {name} is already {_text(old)} and cannot become {_text(value)}; "
                    "a setting is set once (reset() forgets all of them)"
                )
            if old is _UNSET and self._locked_by is not None:
                raise ValueRejected(
                    f"{self._kind}: {name} cannot be set to {_text(value)} after {self._locked_by}, which already "
                    "read the settings; set it before, or call reset() for a new run"
                )
        self._values.update(values)


class GlobalSetting(WriteOnce):
    """Settings of the process, by chained setters: ``GLOBAL_SETTING.use_cpu().amp(True).manual_seed(123)``."""

    def __init__(self) -> None:
        super().__init__("GLOBAL_SETTING")

    # -- device -------------------------------------------------------------------------------------------------

    def use_cpu(self) -> GlobalSetting:
        """Train on the CPU, one rank."""
        self._set_checked({"device": "cpu", "gpus": (), "world_size": 1})
        return self

    def use_gpu(self, gpus: str | None = None, *, present: bool = True) -> GlobalSetting:
        """Train on the GPUs ``"0,1"`` or ``"0-3"``, one rank each; on all visible ones when None or ``"all"``.

        ``present=False`` does not look for them, so that a run for another machine can be planned; compile() does.
        Raises ValueRejected for a list that cannot be read, and DeviceError that says what to do for a GPU that cannot
        be used: nothing falls back to the CPU.
        """
        ids = None if gpus is None or gpus == ALL_GPUS else parse_gpus(gpus)
        if _flag("use_gpu: present", present):
            ids = require_gpus(ids)
        elif ids is None:
            raise ValueRejected(
                'use_gpu: how many GPUs are visible is not asked without them; name them, such as "0-3"'
            )
        self._set_checked({"device": "cuda", "gpus": ids, "world_size": len(ids)})
        return self

    # -- numbers ------------------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> GlobalSetting:
        """The 64-bit seed of every random draw: sample order, augmentation, initial weights."""
        self._set({"seed": _integer("manual_seed", seed, 0, MAX_SEED)})
        return self

    def auto_seed(self) -> GlobalSetting:
        """Take a seed from the system's entropy and log it, so that the run can be repeated with manual_seed."""
        seed = secrets.randbits(64)
        self._set({"seed": seed})
        _log.info("auto_seed: seed is %d (0x%016X)", seed, seed)
        return self

    def amp(self, on: bool | str) -> GlobalSetting:
        """Compute in 16 bit with FP32 master weights: True takes fp16 with a loss scale on a GPU and bf16 on the CPU,
        ``"fp16"`` and ``"bf16"`` say which. The CPU has no kernels for fp16, which is refused."""
        if not isinstance(on, bool) and not (isinstance(on, str) and on in HALVES):
            raise ValueRejected(f"amp is {on!r}; expected True, False, {' or '.join(map(repr, HALVES))}")
        self._set_checked({"amp": on})
        return self

    def tf32(self, on: bool) -> GlobalSetting:
        """Let products and convolutions of FP32 round their inputs to 10 bits of mantissa, as tensor cores want it
        (default: off). On a GPU only, the CPU has nothing like it, and without ``amp``, which leaves none of FP32."""
        self._set_checked({"tf32": _flag("tf32", on)})
        return self

    def local_batch_size(self, n: int) -> GlobalSetting:
        """Samples per step and rank."""
        self._set({"local_batch_size": _integer("local_batch_size", n, 1, MAX_BATCH)})
        return self

    def global_batch_size(self, n: int) -> GlobalSetting:
        """Samples per step over all ranks. The device must be chosen first, because it gives the world size.

        Raises DeviceError without a device, ValueRejected when the ranks cannot share it evenly.
        """
        n = _integer("global_batch_size", n, 1, MAX_BATCH)
        if self.device is None:
            raise DeviceError("global_batch_size: no device chosen yet; call use_cpu() or use_gpu() before it")
        self._set({"local_batch_size": per_rank_batch(n, self.world_size)})
        return self

    def compute_threads(self, n: int) -> GlobalSetting:
        """Threads of the CPU kernels (unset: chosen from the cores this process may use)."""
        self._set({"compute_threads": _integer("compute_threads", n, 1, 4096)})
        return self

    # -- sample geometry ----------------------------------------------------------------------------------------

    def train_resolution(
        self, resolution: int | tuple[int, int], later: tuple[int, int] | None = None
    ) -> GlobalSetting:
        """Side length in pixels of training samples, or two steps ``(0, b), (E, e)``: e once E epochs are done.

        So the first E epochs are trained at b and the rest at e. Transforms are written for e;
        ``Recipe.with_resolution`` says what becomes of them at b.
        """
        self._set({"train_resolution": _train_resolution(resolution, later)})
        return self

    def val_resolution(self, resolution: int) -> GlobalSetting:
        """Side length in pixels of validation samples."""
        self._set({"val_resolution": _integer("val_resolution", resolution, 1, MAX_RESOLUTION)})
        return self

    def input_resolution(self, resolution: int) -> GlobalSetting:
        """Both the training and the validation resolution."""
        side = _integer("input_resolution", resolution, 1, MAX_RESOLUTION)
        self._set({"train_resolution": TrainResolution(side, side), "val_resolution": side})
        return self

    def dataset_facts(self, dataset_type: DatasetType, num_classes: int, color_channels: int) -> GlobalSetting:
        """Facts of the committed data set; ``PREPROCESSOR_SETTING.commit()`` calls this.

        Channels must be 1 or 3.
        """
        if color_channels not in (1, 3):
            raise ValueRejected(f"GLOBAL_SETTING: color_channels is {color_channels!r}; expected 1 or 3")
        self._set(
            {
                "dataset_type": DatasetType(dataset_type),
                "num_classes": _integer("num_classes", num_classes, 1, MAX_CLASSES),
                "color_channels": color_channels,
            }
        )
        return self

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str | None:
        """ "cpu" or "cuda", or None before a device was chosen."""
        return self._read("device", str)

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 before a device was chosen."""
        return self._read("world_size", int) or 1

    def snapshot(self) -> SettingSnapshot:
        """The present values, frozen."""
        local = self._read("local_batch_size", int)
        amp = self._values.get("amp", False)
        return SettingSnapshot(
            device=self.device,
            gpus=self._read("gpus", tuple) or (),
            world_size=self.world_size,
            seed=self._read("seed", int) or DEFAULT_SEED,
            amp=bool(amp),
            half=HALVES[_half(amp, self.device)] if amp else None,
            tf32=self._read("tf32", bool) or False,
            local_batch_size=local,
            global_batch_size=None if local is None else local * self.world_size,
            train_resolution=self._read("train_resolution", TrainResolution),
            val_resolution=self._read("val_resolution", int),
            compute_threads=self._read("compute_threads", int),
            dataset_type=self._read("dataset_type", DatasetType) or DatasetType.NONE,
            num_classes=self._read("num_classes", int),
            color_channels=self._read("color_channels", int),
        )

    def _set_checked(self, values: dict[str, object]) -> None:
        """Store values that go together with the device, which may be chosen before or after them."""
        known = {**self._values, **values}
        if known.get("device") == "cpu" and known.get("amp") == "fp16":
            raise ValueRejected(
                "GLOBAL_SETTING: amp is 'fp16', but the CPU has kernels for bf16 only, which needs no loss scale; use"
                " amp(True), or use_gpu()"
            )
        if known.get("device") == "cpu" and known.get("tf32"):
            raise ValueRejected(
                "GLOBAL_SETTING: tf32 is True, but the CPU has no TF32, it keeps all of FP32; drop it, or use_gpu()"
            )
        if known.get("amp") and known.get("tf32"):
            raise ValueRejected(
                f"GLOBAL_SETTING: tf32 is True and amp is {known['amp']!r}, but tf32 is about products and convolutions"
                " of FP32, and with amp all of them take 16 bit; drop one of the two"
            )
        self._set(values)

    def _read(self, name: str, kind: type[T]) -> T | None:
        value = self._values.get(name)
        assert value is None or isinstance(value, kind)  # written only by the setters above
        return value


def require_gpus(
    ids: tuple[int, ...] | None, what: str = "use_gpu", instead: str = "to train on the CPU, call use_cpu()"
) -> tuple[int, ...]:
    """``ids``, or all visible GPUs for None. Raises DeviceError that says what was asked for, why it cannot be, and
    what can be done ``instead``."""
    try:
        return usable_gpus(ids)
    except DeviceError as error:
        wanted = "all visible GPUs" if ids is None else f"GPU {', '.join(map(str, ids))}"
        raise DeviceError(f"{what}: {wanted} asked for, but {error}; {instead}") from None


def _half(amp: object, device: str | None) -> str:
    """Name of the 16-bit type that an ``amp`` other than False stands for."""
    return amp if isinstance(amp, str) else "fp16" if device == "cuda" else "bf16"


def _text(value: object) -> str:
    if isinstance(value, TrainResolution):
        return f"(0, {value.begin}), ({value.boundary_epoch}, {value.end})" if value.progressive else str(value.end)
    return repr(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueRejected(f"{name} is {value!r} ({type(value).__name__}); expected a whole number")
    if not low <= value <= high:
        raise ValueRejected(f"{name} is {value}; expected {low} to {high}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueRejected(f"{name} is {value!r}; expected True or False")
    return value


def _train_resolution(resolution: int | tuple[int, int], later: tuple[int, int] | None) -> TrainResolution:
    name = "train_resolution"
    if later is None and not isinstance(resolution, tuple):
        side = _integer(name, resolution, 1, MAX_RESOLUTION)
        return TrainResolution(side, side)
    if later is None or not isinstance(resolution, tuple) or len(resolution) != 2 or len(later) != 2:
        raise ValueRejected(
            f"{name} is {resolution!r}, {later!r}; expected one size, or two pairs (0, first size), (epoch, later size)"
        )
    if resolution[0] != 0:
        raise ValueRejected(f"{name}: the first pair starts at epoch {resolution[0]!r}; expected 0")
    boundary = _integer(f"{name}: boundary epoch", later[0], 1, MAX_BATCH)
    begin = _integer(f"{name}: first size", resolution[1], 1, MAX_RESOLUTION)
    end = _integer(f"{name}: later size", later[1], 1, MAX_RESOLUTION)
    return TrainResolution(begin, end, None if begin == end else boundary)


GLOBAL_SETTING = GlobalSetting()
