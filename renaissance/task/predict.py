"""Inference: a saved or trained model, compiled for prediction, asked about pictures.

model = load_model("best.safetensors")
answer = model.predict(images)          # uint8 [N,H,W,C]
answer.labels, answer.probabilities
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import FormatError, ShapeError, ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.data.station import SlotView
from renaissance.graph import CompileRequest, Variant, compile_model
from renaissance.task.engine import Engine
from renaissance.task.gpu import GpuChoice, backend_or_gpu, chosen_gpu
from renaissance.task.models import SavedModel, read_model, write_tensors

DEFAULT_BATCH = 32


@dataclass(frozen=True, slots=True)
class Prediction:
    """``labels`` int32 [N]: the class with the greatest probability, the lower one of equals; -1 where the numbers are
    not finite. ``probabilities`` float32 [N, classes]."""

    labels: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]

    def top(self, count: int) -> npt.NDArray[np.int64]:
        """The ``count`` most probable classes of each sample, best first; [N, count]."""
        if not 1 <= count <= self.probabilities.shape[1]:
            raise ValueRejected(f"top({count}): expected 1 to {self.probabilities.shape[1]} classes")
        return np.argsort(-self.probabilities, axis=1, kind="stable")[:, :count]


class Predictor:
    """A model compiled for inference. Compiled once, for batches of ``batch``; a smaller last batch is masked."""

    def __init__(
        self,
        saved: SavedModel,
        *,
        batch: int = DEFAULT_BATCH,
        dtype: DType | None = None,
        threads: int | None = None,
        backend: str | None = None,
        gpu: int | GpuChoice | None = None,
    ) -> None:
        """``dtype``: FP32, BF16 or, on a GPU, FP16; the default is what the model was trained in, and FP32 on the CPU
        for a model that was trained in FP16. ``threads``: of the CPU kernels. ``gpu``: the index of one to predict on,
        instead of the CPU.

        Raises FormatError when the tensors do not fit the ArchPlan, ValueRejected for another dtype or a bad batch, and
        DeviceError for a GPU that cannot be used.
        """
        choice = chosen_gpu("predict", gpu)
        name = backend_or_gpu("predict", backend, threads, choice)
        self._dtype = _dtype(dtype, saved.dtype, choice is not None)
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueRejected(f"predict: batch {batch!r}; expected an integer of at least 1")
        self.saved, self.batch = saved, batch
        sample, side = saved.arch_plan.input, saved.recipe.resolution
        request = CompileRequest(
            height=sample.h,
            width=sample.w,
            channels=sample.c,
            num_classes=saved.arch_plan.num_classes,
            train_batch=1,
            val_batch=batch,
            val_size=None if side == sample.h else (side, side),
            half=self._dtype if self._dtype.is_half else None,
            external_inputs=choice is None,
            optimizer=OptimizerKind.SGD,
        )
        self._compiled = compile_model(saved.arch_plan, request)
        shape = self._compiled.tensor(self._compiled.inputs[0].data, Variant.VAL_BASE).shape
        self.sample_shape = shape.dims[1:]
        """(height, width, channels) of a sample."""
        self._slot = SlotView(np.zeros(shape.dims, self._dtype.numpy), np.full(batch, -1, np.int32))
        cores = replace(CorePlan.choose(compute_threads=threads), compute_cpus=())  # the caller's thread stays free
        self._engine = Engine(self._compiled, name, cores, [], [self._slot], gpu=choice)
        with self._engine.failures():
            self._engine.initialize(0)
            write_tensors(self._compiled, self._engine, saved)

    def load(self, saved: SavedModel) -> None:
        """Go on with the tensors of another model of the same layers. Raises FormatError when they differ."""
        with self._engine.failures():
            write_tensors(self._compiled, self._engine, saved)
        self.saved = saved

    def predict(self, images: npt.ArrayLike) -> Prediction:
        """Classify images [N,H,W,C]: uint8 pixels, which are normalised as in validation, or floats, taken as they are.

        Raises ShapeError for another sample size, ValueRejected for another element type.
        """
        pictures = self._checked(np.asarray(images))
        labels = np.zeros(len(pictures), np.int32)
        probabilities = np.zeros((len(pictures), self._compiled.arch_plan.num_classes), np.float32)
        for start in range(0, len(pictures), self.batch):
            part = self._normalised(pictures[start : start + self.batch])  # all at once would take 8 bytes a value
            count = len(part)
            self._slot.images[:count] = bf16_from_fp32(part) if self._dtype is DType.BF16 else part
            self._slot.images[count:] = 0
            self._slot.labels[:count] = 0  # any label: a row without one gives no probabilities
            self._slot.labels[count:] = -1
            with self._engine.failures():
                self._engine.val_step(0, count, False)
                probabilities[start : start + count] = self._read(self._compiled.val_probs, count)
                labels[start : start + count] = self._read(self._compiled.predicted, count)[:, 0]
        return Prediction(labels, probabilities)

    def _read(self, tensor: int, count: int) -> npt.NDArray[Any]:
        return self._engine.executor.read(tensor, Variant.VAL_BASE)[:count].reshape(count, -1)

    def _checked(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if images.ndim != 4 or images.shape[1:] != self.sample_shape:
            raise ShapeError(
                f"predict: images are {list(images.shape)}; expected [N, {', '.join(map(str, self.sample_shape))}]"
            )
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise ValueRejected(f"predict: images are {images.dtype}; expected uint8 pixels or normalised floats")
        return images

    def _normalised(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if images.dtype == np.uint8:
            norm = self.saved.recipe.normalization
            mean, std = (np.asarray(v, np.float64) for v in (norm.mean, norm.std))
            return ((images / 255.0 - mean) / std).astype(np.float32)
        return images.astype(np.float32)


def _dtype(wish: DType | None, trained: DType, on_gpu: bool) -> DType:
    """The element type to predict in."""
    if wish is None:
        return DType.FP32 if trained is DType.FP16 and not on_gpu else trained
    known = (DType.FP32, DType.BF16, DType.FP16) if on_gpu else (DType.FP32, DType.BF16)
    if wish not in known:
        names = " or ".join(d.name for d in known)
        raise ValueRejected(f"predict: dtype {wish.name}; expected {names}{'' if on_gpu else ' (FP16 takes a GPU)'}")
    return wish


def load_model(path: Path | str, **options: Any) -> Predictor:
    """A predictor of the model in a file; ``options`` are those of ``Predictor``."""
    saved = read_model(path)
    try:
        return Predictor(saved, **options)
    except FormatError as error:  # tensors that are not those of the layers
        raise FormatError(f"{path}: {error}") from None
