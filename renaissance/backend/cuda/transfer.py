"""Transfers: a slot of host memory to the input regions A or B of the arena, beside the step that computes.

Each slot of a ring has a small program of its own on the stream TRANS: images, labels, and the step scalars that the
host owns (learning rate, valid rows), which travel with the batch: the host runs ahead of the GPU, so a scalar written
at once would reach a step that is still to come. The scalars land in a staging place of A or B; the step's first kernel
moves them to where every op reads them.

Order: a transfer into A waits for the last step that read A; a step waits for its transfer. So the batch of the next
step is copied while this one computes, and the host waits for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import ONE_THREAD, Buffer, CopyCall, KernelCall
from renaissance.backend.cuda.device import ORIGIN, DeviceContext, give_back
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.cuda.program import Item, Program
from renaissance.backend.cuda.runtime import CopyKind
from renaissance.backend.programs import Side
from renaissance.core.enums import StreamKind
from renaissance.core.errors import ValueRejected
from renaissance.graph import CompiledModel, Variant

STAGED_BYTES = 8
"""Learning rate (float32) and valid rows (int32)."""
SCALAR_STRIDE = 64
PARITIES = (0, 1)


@dataclass(frozen=True, slots=True)
class HostSlot:
    """Where a slot's batch lies on the host. ``own``: nobody gives the slot back, so a transfer is waited for."""

    images: Buffer
    labels: Buffer
    own: bool = False


@dataclass(slots=True)
class _Slot:
    """A slot with its program; ``copied``: event after its last transfer; ``sent``: there has been one."""

    host: HostSlot
    scalars: npt.NDArray[np.int32]  # [2], page-locked; the first holds a float32
    parity: int
    program: Program
    copied: int
    sent: bool = False


class Transfers:
    """All input slots of a model. Made before the arena is allocated; it can ``build`` its programs after that."""

    def __init__(
        self,
        device: DeviceContext,
        model: CompiledModel,
        arena: DeviceArena,
        memory: HostMemory,
        slots: dict[Side, Sequence[HostSlot]],
    ) -> None:
        self._device, self._model, self._arena, self._memory = device, model, arena, memory
        self._host = slots
        self._slots: dict[Side, list[_Slot]] = {}
        self._block = device.page_locked(SCALAR_STRIDE * max(1, sum(map(len, slots.values()))))
        self._read = [device.event() for _ in PARITIES]  # after the last step that read A, B
        self._held: deque[tuple[Side, int, Callable[[], None]]] = deque()
        self._last: tuple[Side, int] | None = None

    @property
    def counts(self) -> dict[Side, int]:
        """Slots of each side."""
        return {side: len(self._host.get(side, ())) for side in Side}

    def staged(self, parity: int) -> Buffer:
        """Where the scalars of the next step on A or B arrive."""
        return self._arena.named(f"staged scalars {'AB'[parity]}", STAGED_BYTES)

    def first_item(self, parity: int) -> Item:
        """What a step begins with: its scalars move to their places."""
        staged = self.staged(parity)
        lr, valid = (self._tensor(self._model.scalar(name)) for name in ("lr", "batch_valid"))
        args = (staged.part(0, 4), staged.part(4, 4), lr, valid)
        return Item("step scalars", ORIGIN, (KernelCall("scalars", "stage_scalars", *ONE_THREAD, args, ""),))

    def build(self) -> list[Program]:
        """The programs of all slots; the arena has been allocated."""
        row = 0
        for side, hosts in self._host.items():
            variant = _VARIANT[side]
            self._slots[side] = []
            for index, host in enumerate(hosts):
                scalars = self._block.view(SCALAR_STRIDE * row, 2, np.dtype(np.int32))
                source = self._block.buffer.part(SCALAR_STRIDE * row, STAGED_BYTES)
                copies = self._copies(host, index % 2, variant, source, f"{side.name} slot {index}")
                program = Program(self._device, copies, StreamKind.TRANS)
                self._slots[side].append(_Slot(host, scalars, index % 2, program, self._device.event()))
                row += 1
        for event in self._read:
            self._device.runtime.eventRecord(event, self._device.origin)
        return [slot.program for slots in self._slots.values() for slot in slots]

    def _copies(self, host: HostSlot, parity: int, variant: Variant, scalars: Buffer, name: str) -> list[Item]:
        inputs = self._model.inputs[parity]
        pairs = [(self.staged(parity), scalars), (self._tensor(inputs.label, variant), self._page_locked(host.labels))]
        pairs.append((self._tensor(inputs.data, variant), self._page_locked(host.images)))
        kind = CopyKind.HOST_TO_DEVICE
        calls = tuple(CopyCall(target, source, name, kind) for target, source in pairs)
        return [Item(name, StreamKind.TRANS, calls)]

    def _page_locked(self, part: Buffer) -> Buffer:
        return Buffer(self._memory.slot(part.ptr, part.nbytes), part.nbytes)

    def _tensor(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> Buffer:
        tensor = self._model.tensor(tensor_id, variant)
        return self._arena.tensor(tensor.offset, tensor.nbytes)

    # -- steps --------------------------------------------------------------------------------------------------

    def send(self, side: Side, index: int, lr: float, valid: int) -> None:
        """Start the transfer of a slot; steps launched from now on wait for it. Returns at once, unless the slot's
        former batch is still on its way."""
        slot, runtime = self._slots[side][index], self._device.runtime
        if slot.sent and runtime.eventQuery(slot.copied) != 0:  # done long since when the slot has been given back
            runtime.eventSynchronize(slot.copied)
        slot.scalars[:1].view(np.float32)[0] = lr
        slot.scalars[1] = valid
        for part in (slot.host.images, slot.host.labels):
            self._memory.before_copy(part.ptr)
        trans = self._device.streams[StreamKind.TRANS]
        runtime.streamWaitEvent(trans, self._read[slot.parity])
        if self._memory.eager:
            slot.program.issue()
        else:
            slot.program.launch()
        runtime.eventRecord(slot.copied, trans)
        runtime.streamWaitEvent(self._device.origin, slot.copied)
        if slot.host.own:
            runtime.eventSynchronize(slot.copied)
        slot.sent = True
        self._last = (side, index)

    def step_launched(self, index: int) -> None:
        """The step on slot ``index`` is on its stream: what it reads must stay until it is done."""
        self._device.runtime.eventRecord(self._read[index % 2], self._device.origin)

    def release_when_copied(self, index: int, release: Callable[[], None]) -> None:
        """See ``backend.interface.Executor``."""
        if self._last is None or self._last[1] != index:
            raise ValueRejected(f"slot {index} cannot be given back: the last step was on {self._last}")
        self._held.append((*self._last, release))
        runtime = self._device.runtime
        while self._held:
            side, first, _ = self._held[0]
            event, full = self._slots[side][first].copied, len(self._held) >= len(self._slots[side])
            if runtime.eventQuery(event) != 0:
                if not full:
                    return
                runtime.eventSynchronize(event)
            self._held.popleft()[2]()

    def drain(self) -> None:
        """Wait for every transfer under way and give all slots back, also after a failed kernel, whose error is raised
        then: the daemon wants its slots."""
        failure: RuntimeError | None = None
        while self._held:
            side, first, release = self._held.popleft()
            try:
                self._device.runtime.eventSynchronize(self._slots[side][first].copied)
            except RuntimeError as error:
                failure = failure or error
            release()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Forget the slots. May be called again."""
        try:
            self.drain()
        finally:
            programs = [slot.program for slots in self._slots.values() for slot in slots]
            # A transfer that nobody waited for, because its step failed, still reads the block.
            give_back([self._device.synchronize, *(program.close for program in programs), self._block.free])
            self._slots, self._host = {}, {}


_VARIANT = {Side.TRAIN: Variant.TRAIN_BASE, Side.TRAIN_END: Variant.TRAIN_LOWRES, Side.VAL: Variant.VAL_BASE}
