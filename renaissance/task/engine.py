"""Engine: the compiled model as the training loop sees it. Steps on slots, metrics, and tensors by id.

A thin layer over an executor (``backend.interface``): which program a step runs, how weights start, what persists.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy.typing as npt

from renaissance.backend.executor import GraphExecutor
from renaissance.backend.initial import initialize
from renaissance.backend.interface import ACCUMULATORS, Executor
from renaissance.core.errors import ValueRejected
from renaissance.core.gpus import driver_version
from renaissance.core.machine import CorePlan
from renaissance.core.region import Region
from renaissance.data.station import SlotView
from renaissance.graph import CompiledModel, Variant
from renaissance.task.gpu import GpuChoice, GpuSide, Slots, gpu_failures
from renaissance.task.loop import SlotBatch, Sums


class Engine:
    """Runs one compiled model on the slots of two stations (even slots are A, odd ones B)."""

    def __init__(
        self,
        compiled: CompiledModel,
        backend: str,
        cores: CorePlan,
        train_slots: Sequence[SlotView],
        val_slots: Sequence[SlotView],
        train_end_slots: Sequence[SlotView] = (),
        *,
        gpu: GpuChoice | None = None,
        mappings: Sequence[tuple[int, int]] = (),
        rank: int = 0,
    ) -> None:
        """``train_end_slots``: those of the resolution training ends with, for a model that was compiled with one.

        ``gpu`` is of use for backend "cuda", and ``mappings`` there: (address, bytes) of the shared memory that slots
        lie in. Ranks draw their own dropout masks. Raises DeviceError for a GPU that cannot be used.
        """
        self.compiled, self.gpu, self._rank = compiled, gpu, rank
        self._former_cpus = _pin(cores.compute_cpus)
        slots = tuple(
            [(slot.images, slot.labels) for slot in side] for side in (train_slots, train_end_slots, val_slots)
        )
        try:
            self.executor = self._executor(backend, cores, slots, mappings)
        except BaseException:
            _pin(self._former_cpus)
            raise

    def _executor(
        self, backend: str, cores: CorePlan, slots: Sequence[Slots], mappings: Sequence[tuple[int, int]]
    ) -> Executor:
        """``slots``: training, training at the final resolution, validation."""
        train, train_end, val = slots
        if backend == "cuda":
            choice = self.gpu or GpuChoice()
            side = GpuSide.open(
                self.compiled, choice, mappings, train_slots=train, train_end_slots=train_end, val_slots=val
            )
            side.close_with(self)
            return side.executor
        return GraphExecutor(
            self.compiled,
            backend=backend,
            threads=cores.compute_threads,
            wait_policy=cores.wait_policy.value if backend == "cpu" else None,
            train_slots=train,
            train_end_slots=train_end,
            val_slots=val,
        )

    def failures(self) -> AbstractContextManager[None]:
        """Inside, an error of CUDA's is raised as a DeviceError that names the GPU."""
        return nullcontext() if self.gpu is None else gpu_failures(f"GPU {self.gpu.index} failed")

    # -- steps --------------------------------------------------------------------------------------------------

    def train_step(
        self, slot: int, valid: int, lr: float, last: bool, *, end: bool = False, frozen: bool = False
    ) -> None:
        """One training step: ``last`` for the tail batch's variant, ``end`` for the resolution training ends with,
        ``frozen`` to leave the first layer as it is."""
        self.executor.run_train_step(slot, _TRAIN[end][last], lr=lr, valid=valid, frozen=frozen)

    def freeze_first_layer(self, frozen: bool) -> None:
        """Set the flag that keeps the update away from the first layer; goes with ``frozen`` of ``train_step``."""
        self.executor.write_scalar("first_frozen", frozen)

    def prepare_validation(self, ema: bool = False) -> None:
        """Before a validation pass: fold batch norms, pack weights; of the main weights or their moving average."""
        self.executor.prepare_validation(ema)

    def val_step(self, slot: int, valid: int, last: bool, *, ema: bool = False) -> None:
        self.executor.run_val_step(slot, Variant.VAL_LAST if last else Variant.VAL_BASE, valid=valid, ema=ema)

    def release(self, batch: SlotBatch) -> None:
        """Give a batch back once nothing reads it any more; its step is the last one that was asked for."""
        self.executor.release_when_copied(batch.slot, batch.release)

    def drain(self) -> None:
        """Every batch is given back when this returns."""
        self.executor.drain()

    def switch_ema(self) -> None:
        """Copy the moving averages into the weights (switch-EMA), but for a first layer that is frozen."""
        frozen = "first_frozen" in self.compiled.scalars and self.executor.read_scalar("first_frozen")
        for parameter in self.compiled.parameters:
            if parameter.ema is None:
                raise ValueRejected("switch_ema: the model was compiled without EMA; compile it with ema=True")
            if not (frozen and self.compiled.tensor(parameter.weight).region is Region.W_FIRST_CONV):
                self.write(parameter.weight, self.read(parameter.ema))
        self.weights_written()

    def clear_metrics(self) -> None:
        self.executor.clear_metrics()

    def reduce_metrics(self) -> None:
        """After a validation pass of several ranks: the accumulators become their mean over the ranks."""
        self.executor.reduce_metrics()

    def metrics(self) -> Sums:
        """The accumulators after every step so far; waits for them."""
        return _sums(self.executor.scalars())

    def progress(self) -> Sums:
        """The accumulators as far as they are known without waiting."""
        return _sums(self.executor.scalars_soon())

    def close(self) -> None:
        """No more steps: give back and forget the stations' slots, so that their memory can be unmapped, and give the
        calling thread its CPUs back. Tensors stay readable. May be called again."""
        try:
            self.executor.release_slots()
        finally:
            _pin(self._former_cpus)
            self._former_cpus = ()

    # -- tensors ------------------------------------------------------------------------------------------------

    def read(self, tensor_id: int) -> npt.NDArray[Any]:
        """A tensor's logical elements [N,H,W,C], for reading: a view on the host, a copy of what lies on a GPU."""
        return self.executor.read(tensor_id)

    def write(self, tensor_id: int, values: npt.NDArray[Any]) -> None:
        """Copy ``values`` into a tensor. After writing weights call ``weights_written``."""
        self.executor.write(tensor_id, values)

    def weights_written(self) -> None:
        """Make again what is derived from the weights: half copies, and what validation folds and packs."""
        self.executor.cast_weights()

    def initialize(self, seed: int) -> None:
        """Everything that persists as it is before the first step: see ``backend.initial``."""
        initialize(self.executor, self.compiled, seed, self._rank)

    # -- facts --------------------------------------------------------------------------------------------------

    def profile(self) -> Mapping[str, Any]:
        """The numeric profile: what besides data, model and options the bits of the weights may depend on."""
        return self.executor.profile()

    def versions(self) -> Mapping[str, str]:
        """Versions of the native libraries in use, and of a GPU's driver."""
        driver = {} if self.gpu is None else {"cuda_driver": driver_version()}
        return {**self.executor.versions(), **driver}

    def notes(self) -> Mapping[str, str]:
        """What a run prints of choices that were made for it, by a short name."""
        return self.executor.notes()


_TRAIN = (
    (Variant.TRAIN_BASE, Variant.TRAIN_LAST),
    (Variant.TRAIN_LOWRES, Variant.TRAIN_LOWRES_LAST),
)
"""Variant by [final resolution][tail batch]."""


def _sums(scalars: Mapping[str, float]) -> Sums:
    return Sums(*(scalars[name] for name in ACCUMULATORS))


def _pin(cpus: Collection[int]) -> tuple[int, ...]:
    """Let the calling thread, and the compute threads it will start, run on ``cpus`` only; returns the former CPUs.

    Nothing happens, and () is returned, when ``cpus`` is empty.
    """
    if not cpus:
        return ()
    former = tuple(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus)
    return former
