"""DeviceArena: the one allocation of a rank: the memory plan, scratch for each stream, and named working memory.

How much working memory the launchers want is known only when all of them have run. So programs are built twice: first
against an arena that measures (its addresses are never used), then, after ``allocate``, against the real one. Launchers
are functions of node and context, so both times they ask for the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.enums import StreamKind
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import align
from renaissance.tensor.dtensor import DTensor

NOWHERE = 256
"""Where a measuring arena begins: an address that CUDA never gives out."""


class DeviceArena:
    """``plan_bytes`` for tensors at the start, then whatever was asked for before ``allocate``."""

    def __init__(self, plan_bytes: int) -> None:
        self.base = NOWHERE
        self.allocations = 0
        self._plan_bytes = align(plan_bytes)
        self._total = self._plan_bytes
        self._named: dict[tuple[Hashable, int], int] = {}
        self._scratch: dict[StreamKind, int] = dict.fromkeys(StreamKind, 0)
        self._scratch_at: dict[StreamKind, int] = {}
        self._runtime: CudaRuntime | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the allocation."""
        return self._total

    @property
    def everything(self) -> Buffer:
        """The whole allocation."""
        return Buffer(self.base, self._total)

    def tensor(self, offset: int, nbytes: int) -> Buffer:
        """A piece of the memory plan."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self._plan_bytes:
            raise MemoryPlanError(f"device arena: no bytes {offset} to {offset + nbytes} in {self._plan_bytes}")
        return Buffer(self.base + offset, nbytes)

    def scratch(self, stream: StreamKind, nbytes: int) -> Buffer:
        """Scratch of a stream; the same address each time."""
        if self._runtime is None:
            self._scratch[stream] = max(self._scratch[stream], align(nbytes))
            return Buffer(NOWHERE, nbytes)
        if nbytes > self._scratch[stream]:
            raise MemoryPlanError(
                f"scratch of stream {stream.name}: {nbytes} bytes were asked for, {self._scratch[stream]} when the "
                "programs were measured; nothing is allocated after compile"
            )
        return Buffer(self.base + self._scratch_at[stream], nbytes)

    def named(self, key: Hashable, nbytes: int) -> Buffer:
        """Memory that everybody gets who asks with this key and size; it starts as zeros."""
        if (key, nbytes) not in self._named:
            if self._runtime is not None:
                raise MemoryPlanError(f"working memory {key}: {nbytes} bytes were asked for after compile")
            self._named[key, nbytes] = self._total
            self._total += align(max(nbytes, 1))
        return Buffer(self.base + self._named[key, nbytes], nbytes)

    def allocate(self, runtime: CudaRuntime, tensors: Iterable[DTensor] = ()) -> None:
        """Take the memory from the device; ``tensors`` of the plan are named in messages.

        Raises MemoryPlanError that says how much was wanted.
        """
        for stream, nbytes in self._scratch.items():
            self._scratch_at[stream] = self._total
            self._total += nbytes
        try:
            self.base = runtime.malloc(self._total)
        except Exception as error:
            raise MemoryPlanError(
                f"the GPU has no {self._total / 2**20:.0f} MiB for this model ({self._plan_bytes / 2**20:.0f} MiB of "
                f"tensors, the rest working memory): {error}; use a smaller batch"
            ) from error
        self._runtime = runtime
        self.allocations = 1
        for stream, at in self._scratch_at.items():
            if self._scratch[stream]:
                runtime.name_range(self.base + at, self._scratch[stream], f"scratch of {stream.name}")
        for (key, nbytes), at in self._named.items():
            runtime.name_range(self.base + at, nbytes, str(key))
        for tensor in tensors:
            runtime.name_range(self.base + tensor.offset, tensor.nbytes, tensor.name)

    def clear(self, device: DeviceContext) -> None:
        """Fill everything with zeros, and wait for that."""
        whole = self.everything
        device.runtime.memsetAsync(whole.ptr, 0, whole.nbytes, device.origin)
        device.synchronize()

    def free(self) -> None:
        """Give the memory back. May be called again."""
        if self._runtime is not None:
            self._runtime.free(self.base)
            self._runtime = None
            self.base = 0
