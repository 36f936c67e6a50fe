"""What a run was: its identity (checked on resume), its configuration and the versions (kept in result.json)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

import renaissance
from renaissance.algo import LrSchedule
from renaissance.graph import CompiledModel
from renaissance.task.options import TaskOptions
from renaissance.task.setup import Setup

PACKAGES = ("numpy", "numba", "pillow", "simplejpeg", "grpcio", "protobuf", "multiprocess")


def plain_schedule(schedule: LrSchedule) -> dict[str, Any]:
    return {**asdict(schedule), "kind": schedule.kind.value}


def plain_optimizer(options: TaskOptions) -> dict[str, Any]:
    assert options.optimizer is not None  # compile() has checked
    config = options.optimizer.config()
    return {**asdict(config), "kind": config.kind.name}


def identity(
    compiled: CompiledModel,
    setup: Setup,
    schedule: LrSchedule,
    samples: tuple[int, int],
    profile: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything the weights and the delivered bytes depend on; what they do not (worker count, output) stays out.

    ``samples`` are the sizes of the training and the validation set.
    """
    options, settings, preprocessor = setup.options, setup.settings, setup.preprocessor
    return {
        "model": hashlib.sha256(compiled.arch_plan.text().encode()).hexdigest(),
        "optimizer": plain_optimizer(options),
        "schedule": plain_schedule(schedule),
        **_training(options),
        "data": {
            "dataset": preprocessor.dataset,
            "train_samples": samples[0],
            "val_samples": samples[1],
            "train_recipe": preprocessor.train_recipe.fingerprint(),
            "train_resolution": setup.sizes.steps(),
            "val_recipe": preprocessor.val_recipe.fingerprint(),
            "shuffle_train": preprocessor.shuffle_train,
            "drop_last": preprocessor.drop_last,
            "order": preprocessor.order,
            "on_corrupt": preprocessor.corrupt.action,
        },
        "seed": settings.seed,
        "batch_size": settings.local_batch_size,
        "world_size": settings.world_size,
        "numeric": dict(profile),
    }


def _training(options: TaskOptions) -> dict[str, Any]:
    """The options of a step, besides optimizer and schedule."""
    assert options.loss is not None  # compile() has checked
    return {
        "label_smoothing": options.loss.config().label_smoothing,
        "grad_clip": options.grad_clip,
        "loss_scale": options.loss_scale,
        "ema_decay": options.ema_decay if options.ema else None,
        "switch_ema": options.use_sema,
        "freeze_first_layer_after": options.freeze_after,
    }


def configuration(setup: Setup, schedule: LrSchedule) -> dict[str, Any]:
    """Every option of the run as plain values."""
    options = setup.options
    return {
        "global": setup.settings.to_json(),
        "preprocessor": setup.preprocessor.to_json(),
        "optimizer": plain_optimizer(options),
        "schedule": plain_schedule(schedule),
        **_training(options),
        "train_resolution": setup.sizes.steps(),
        "tta": options.tta.name,
        "tune": None if options.tuning is None else str(options.tuning),
        "total_epochs": options.total_epochs,
        "validate_interval": options.validate_interval,
        "validate_offset": options.validate_offset,
        "early_stop_top1": options.early_stop_top1,
        "dataserver": options.dataserver,
        "checkpoint_epochs": options.saves_every[0],
        "checkpoint_steps": options.saves_every[1],
        "resume": options.resume if isinstance(options.resume, bool) else str(options.resume),
        "check_digest": options.check_digest,
        "save_best_model": None if options.save_best is None else str(options.save_best),
        "save_model_at_epoch": {str(epoch): str(path) for epoch, path in options.save_at},
    }


def versions() -> dict[str, str]:
    """Versions of this package, Python, the system and the packages results may depend on."""
    found = {"renaissance": renaissance.__version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # vendored or installed without metadata
            continue
    return {**found, "numpy": np.__version__}
