"""Mailbox: single tensors to and from the device between steps, and the metrics of the steps that are under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.runtime import CopyKind
from renaissance.backend.interface import ACCUMULATORS
from renaissance.core.region import ACCUMULATED_SPAN
from renaissance.graph import CompiledModel, Variant
from renaissance.tensor.dtensor import DTensor

PIECE_BYTES = 16 << 20
"""Largest piece that is copied at once."""


class DeviceCopies:
    """Copies to and from the device, of ``largest`` bytes at most, through page-locked memory that is taken once."""

    def __init__(self, device: DeviceContext, largest: int) -> None:
        self._device = device
        self._piece = device.page_locked(min(PIECE_BYTES, largest))

    def read(self, source: Buffer) -> npt.NDArray[np.uint8]:
        """The bytes of ``source`` after everything launched so far."""
        out = np.empty(source.nbytes, np.uint8)
        for at in range(0, source.nbytes, self._piece.bytes.size):
            size = min(self._piece.bytes.size, source.nbytes - at)
            self._copy(self._piece.buffer.ptr, source.ptr + at, size, CopyKind.DEVICE_TO_HOST)
            out[at : at + size] = self._piece.bytes[:size]
        return out

    def write(self, target: Buffer, values: npt.NDArray[np.uint8]) -> None:
        """Put bytes into ``target`` after everything launched so far."""
        for at in range(0, target.nbytes, self._piece.bytes.size):
            size = min(self._piece.bytes.size, target.nbytes - at)
            self._piece.bytes[:size] = values[at : at + size]
            self._copy(target.ptr + at, self._piece.buffer.ptr, size, CopyKind.HOST_TO_DEVICE)

    def read_tensor(self, arena: DeviceArena, tensor: DTensor) -> npt.NDArray[Any]:
        """A copy [N,H,W,C] of a tensor; BF16 as uint16 bit patterns."""
        raw = self.read(arena.tensor(tensor.offset, tensor.nbytes))
        return raw.view(tensor.dtype.numpy).reshape(tensor.shape.dims)

    def write_tensor(self, arena: DeviceArena, tensor: DTensor, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """Put values, which broadcast to [N,H,W,C], into a tensor; returns them as they are stored."""
        whole = np.empty(tensor.shape.dims, tensor.dtype.numpy)
        whole[...] = values
        self.write(arena.tensor(tensor.offset, tensor.nbytes), whole.reshape(-1).view(np.uint8))
        return whole

    def _copy(self, target: int, source: int, size: int, kind: CopyKind) -> None:
        runtime, origin = self._device.runtime, self._device.origin
        runtime.memcpyAsync(target, source, size, kind, origin)
        runtime.streamSynchronize(origin)

    def close(self) -> None:
        """Give the memory back. May be called again."""
        self._piece.free()


class Mailbox(DeviceCopies):
    """The tensors of a model, and its metrics."""

    def __init__(self, device: DeviceContext, model: CompiledModel, arena: DeviceArena) -> None:
        plan = model.plans[Variant.TRAIN_BASE]
        super().__init__(device, max(tensor.nbytes for tensor in plan.tensors))
        self._arena = arena
        self._span = plan.resolve_span(ACCUMULATED_SPAN)
        self._places = {name: plan.tensor(model.scalar(name)).offset - self._span[0] for name in ACCUMULATORS}
        self._letter = device.page_locked(self._span[1])
        self._arrived = device.event()
        self._asked = self._stale = False
        self._newest = dict.fromkeys(ACCUMULATORS, 0.0)

    def clear(self) -> None:
        """A new pass: what is on its way belongs to the old one."""
        self._newest = dict.fromkeys(ACCUMULATORS, 0.0)
        self._stale = self._asked

    def metrics(self) -> Mapping[str, float]:
        """The accumulators after everything launched so far."""
        self._newest = self._opened(self.read(self._arena.tensor(*self._span)))
        return self._newest

    def metrics_soon(self) -> Mapping[str, float]:
        """The newest accumulators that have arrived; asks for newer ones unless an answer is on its way."""
        runtime, origin = self._device.runtime, self._device.origin
        if self._asked and runtime.eventQuery(self._arrived) == 0:
            if not self._stale:
                self._newest = self._opened(self._letter.bytes)
            self._asked = self._stale = False
        if not self._asked:
            source = self._arena.tensor(*self._span)
            runtime.memcpyAsync(self._letter.buffer.ptr, source.ptr, source.nbytes, CopyKind.DEVICE_TO_HOST, origin)
            runtime.eventRecord(self._arrived, origin)
            self._asked = True
        return self._newest

    def _opened(self, raw: npt.NDArray[np.uint8]) -> dict[str, float]:
        return {name: float(raw[at : at + 4].view(np.float32)[0]) for name, at in self._places.items()}

    def close(self) -> None:
        super().close()
        self._letter.free()
