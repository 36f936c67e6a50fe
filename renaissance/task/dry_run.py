"""What a run would do: epochs, resolutions, learning rates, validation and memory, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from renaissance.algo import LrSchedule
from renaissance.backend.registry import default_registry
from renaissance.core.errors import ValueRejected
from renaissance.data.formats import open_dataset
from renaissance.data.order import batches_per_epoch
from renaissance.data.protocol import RingLayout
from renaissance.data.sources import Source
from renaissance.graph import CompiledModel, compile_model
from renaissance.task.dataplane import tails
from renaissance.task.ranks import require_equal_shares
from renaissance.task.setup import Setup
from renaissance.tensor import Initializer


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """One epoch of a dry run."""

    epoch: int  # from 1
    resolution: int  # side of the training samples, pixels
    first_lr: float  # of the first step
    last_lr: float  # of the last step
    warmup: bool
    frozen: bool  # the first layer
    validated: bool
    switched: bool  # starts from the moving averages


@dataclass(frozen=True, slots=True)
class DryRun:
    """What ``DeepLearningTask.dry_run`` returns."""

    epochs: tuple[PlannedEpoch, ...]
    train_samples: int
    val_samples: int
    train_steps: int  # per epoch
    val_steps: int  # per pass
    parameters: int  # numbers that are trained
    arena_bytes: int
    ring_bytes: int  # shared memory with the data server, all sessions
    lines: tuple[str, ...]  # the rest, as text

    def text(self) -> str:
        """Stable text: one line per stretch of epochs that are alike."""
        rows = [f"{'epochs':>11}  {'pixels':>6}  {'first lr':>12}  {'last lr':>12}  note"]
        for (pixels, warmup, frozen), group in groupby(self.epochs, lambda e: (e.resolution, e.warmup, e.frozen)):
            found = list(group)
            span = f"{found[0].epoch}" + (f"-{found[-1].epoch}" if len(found) > 1 else "")
            note = ", ".join(text for text, on in (("warm-up", warmup), ("first layer frozen", frozen)) if on)
            row = f"{span:>11}  {pixels:>6}  {found[0].first_lr:>12.8f}  {found[-1].last_lr:>12.8f}  {note}"
            rows.append(row.rstrip())
        return "\n".join((*self.lines, *rows))


def dry_run(setup: Setup, initializer: Initializer) -> DryRun:
    """Plan the run. Samples are counted in the files of the data folder; the model is compiled, but not captured.

    Raises as ``compile`` does for whatever is wrong with data folder, model or options.
    """
    preprocessor, options = setup.preprocessor, setup.options
    train, val = _count(setup, "train"), _count(setup, "val")
    drop, batch, ranks = preprocessor.drop_last, setup.batch, setup.settings.world_size
    require_equal_shares(train, ranks, drop)
    train_steps, val_steps = batches_per_epoch(train, batch, ranks, drop), batches_per_epoch(val, batch, ranks)
    if train_steps == 0:
        raise ValueRejected(
            f"drop_last leaves no batch: {preprocessor.dataset} has {train} training samples and a batch has {batch}"
        )
    compiled = compile_model(setup.blueprint, setup.request(initializer, tails((train, val), batch, drop, ranks)))
    default_registry(setup.backend).require(compiled.training.ops | compiled.inference.ops, setup.backend)
    assert options.scheduler is not None  # make_setup has checked
    schedule = options.scheduler.prepare(options.total_epochs, train_steps)
    parameters = sum(parameter.shape.numel for parameter in compiled.parameters)
    rings = sum(_ring(setup, side).total_bytes for side in (*setup.sizes.sizes, preprocessor.val_recipe.resolution))
    return DryRun(
        epochs=tuple(_epoch(setup, schedule, epoch) for epoch in range(options.total_epochs)),
        train_samples=train,
        val_samples=val,
        train_steps=train_steps,
        val_steps=val_steps,
        parameters=parameters,
        arena_bytes=compiled.arena_bytes,
        ring_bytes=rings,
        lines=_lines(setup, compiled, (train, train_steps), (val, val_steps), parameters, rings),
    )


def _count(setup: Setup, split: str) -> int:
    """Samples of a split, from its files."""
    data = setup.preprocessor
    try:
        with Source.open(data.dataset, data.folder, split, data.format, data.level, measure=False) as source:
            return source.spec.samples
    except ValueRejected:
        if not data.info.pixels:
            raise
        # Published files that are still compressed have no index; they are small, and the daemon reads them whole, too.
        return len(open_dataset(data.dataset, data.folder, split, data.format, verify=False).labels)


def _ring(setup: Setup, side: int) -> RingLayout:
    channels = setup.preprocessor.train_recipe.color_channels
    return RingLayout(setup.preprocessor.ring_depth, setup.batch, side, side, channels, channels, setup.dtype)


def _epoch(setup: Setup, schedule: LrSchedule, epoch: int) -> PlannedEpoch:
    options = setup.options
    return PlannedEpoch(
        epoch=epoch + 1,
        resolution=setup.sizes.by_epoch[epoch],
        first_lr=schedule.lr(epoch),
        last_lr=schedule.lr(epoch, schedule.steps_per_epoch - 1),
        warmup=epoch < schedule.warmup_epochs,
        frozen=options.freeze_after is not None and epoch >= options.freeze_after,
        validated=options.validates(epoch + 1),
        switched=options.use_sema and epoch > 0,
    )


def _batch_text(setup: Setup) -> str:
    """Samples of a step."""
    ranks = setup.settings.world_size
    return f"{setup.batch}" if ranks == 1 else f"{ranks} ranks with {setup.batch} each"


def _gpus(setup: Setup) -> str:
    """Which GPUs, and how they compute; "" on the CPU."""
    if not setup.on_gpu:
        return ""
    settings = setup.settings
    kind = setup.dtype.name.lower() + (" with products in tf32" if settings.tf32 else "")
    return f" on GPU {', '.join(map(str, settings.gpus))}, {kind}"


def _lines(
    setup: Setup,
    compiled: CompiledModel,
    train: tuple[int, int],
    val: tuple[int, int],
    parameters: int,
    rings: int,
) -> tuple[str, ...]:
    options, data = setup.options, setup.preprocessor
    validated = [e for e in range(1, options.total_epochs + 1) if options.validates(e)]
    passes = "weights and moving averages" if options.ema else "weights"
    every = ", ".join(
        f"every {n} {unit}" for n, unit in zip(options.saves_every, ("epochs", "steps"), strict=True) if n
    )
    lines = [
        f"dry run of {options.total_epochs} epochs on {data.dataset} in {data.folder}",
        f"train      {train[0]} samples, {train[1]} steps of {_batch_text(setup)} an epoch",
        f"validate   {val[0]} samples at {data.val_recipe.resolution} pixels, {val[1]} steps, {passes},"
        f" after {len(validated)} epochs"
        + (f": the first is {validated[0]}, then every {options.validate_interval}" if validated else ""),
        f"model      {parameters:,} parameters, optimizer {compiled.request.optimizer.name}",
        f"memory     arena {compiled.arena_bytes / 1e6:.1f} MB, batches in shared memory {rings / 1e6:.1f} MB",
        f"cores      {setup.cores_text}",
        f"backend    {setup.backend}{setup.backend_note}{_gpus(setup)}",
        f"checkpoint {every or 'never'}; output {options.output or 'none'}",
    ]
    if options.early_stop_top1 is not None:
        lines.append(f"stop       once top-1 reaches {options.early_stop_top1:.2%}")
    if options.ema:
        switch = ", copied into the weights when an epoch starts" if options.use_sema else ""
        lines.append(f"average    of the weights with decay {options.ema_decay}{switch}")
    return tuple(lines)
