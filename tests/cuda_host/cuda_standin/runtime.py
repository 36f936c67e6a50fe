"""FakeCuda: every call of ``renaissance.backend.cuda.runtime`` without a GPU, stricter than CUDA.

- Nothing runs when it is issued. Work is ordered by streams and events only, and runs when the host waits (or asks), in
  a random order that this allows: a missing event or synchronisation gives wrong data or an error, not luck.
- A capture follows CUDA's states and error names. Beyond CUDA, a launch outside the running capture is refused, and so
  are the first launch of a kernel and the first execution of a library's plan inside one: they may load code.
- Two operations without an order between them that touch the same bytes are an error (Race): inside a graph when its
  capture ends, between graphs and operations of different streams when they are issued. What an operation touches comes
  from the constness of a kernel's pointers and the hinted sizes.
- Device memory lies between guard pages and is NaN until written; copies need page-locked host memory.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes

from cuda_standin.capture import Capture
from cuda_standin.errors import CudaError
from cuda_standin.kernels import DeviceFunction, DeviceModule
from cuda_standin.machine import Event, Executable, Machine, Stream
from cuda_standin.memory import Range
from cuda_standin.work import Graph, Op, merge
from renaissance.backend.cuda.runtime import THREAD_LOCAL, CopyKind

NOT_READY = 600
"""cudaErrorNotReady."""
SYNCHRONISING = ("deviceSynchronize", "streamSynchronize", "eventSynchronize", "free", "freeHost", "hostUnregister")
"""Calls that make the host wait."""


def _move(dst: int, src: int | bytes, size: int) -> None:
    ctypes.memmove(dst, src, size)


def _fill(ptr: int, value: int, size: int) -> None:
    ctypes.memset(ptr, value, size)


class FakeCuda(Machine):
    """The stand-in. ``seed`` draws the order of execution; ``check=False``: no race checks; ``drop_wait`` leaves out
    the streamWaitEvent of this number (from 0, counted from the start). Use it from one thread at a time."""

    def __init__(
        self,
        seed: int = 0,
        check: bool = True,
        drop_wait: int | None = None,
        *,
        registers: bool = True,
        largest_locked: int | None = None,
        pageable: bool = False,
    ) -> None:
        """``registers``: whether host memory can be registered; ``largest_locked``: bytes that hostAlloc gives at most;
        ``pageable``: let copies to the device read pageable memory, which happens at once then."""
        super().__init__(seed, check)
        self.drop_wait = drop_wait
        self._registers, self._largest_locked, self._pageable = registers, largest_locked, pageable

    # -- devices ------------------------------------------------------------------------------------------------

    def setDevice(self, device: int) -> None:
        self._called("setDevice")
        if device != 0:
            raise CudaError("InvalidDevice", f"device {device}; there is one, 0")

    def deviceSynchronize(self) -> None:
        self._outside_capture("deviceSynchronize")
        self._drain()
        self.memory.intact()

    # -- memory -------------------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        self._outside_capture("malloc")
        return self.memory.allocate(size)

    def free(self, ptr: int) -> None:
        self._outside_capture("free")
        self._drain()
        self.memory.release(ptr)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._outside_capture("hostAlloc")
        if self._largest_locked is not None and size > self._largest_locked:
            raise CudaError("MemoryAllocation", f"{size} bytes of page-locked memory")
        return self.memory.allocate(size, host=True)

    def freeHost(self, ptr: int) -> None:
        self._outside_capture("freeHost")
        self._idle(ptr, "freeHost")
        self.memory.release(ptr, host=True)

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self._outside_capture("hostRegister")
        if not self._registers:
            raise CudaError("NotSupported", "hostRegister")
        if self.memory.host.meets(ptr, size):
            raise CudaError("HostMemoryAlreadyRegistered", f"{size} bytes at {ptr:#x}")
        self.memory.host.add(ptr, size)

    def hostUnregister(self, ptr: int) -> None:
        self._outside_capture("hostUnregister")
        if not self.memory.host.starts_at(ptr) or ptr in self.memory.blocks:
            raise CudaError("HostMemoryNotRegistered", f"{ptr:#x}")
        self._idle(ptr, "hostUnregister")
        self.memory.host.remove(ptr)
        self.memory.generation += 1

    def _idle(self, ptr: int, call: str) -> None:
        """Nothing that the host has not waited for may touch host memory that goes away."""
        found = self.memory.host.find(ptr)
        op = self._history.using(*found) if found else None
        if op:
            raise CudaError("InvalidValue", f'{call}: "{op.title(self.memory)}" may not be done; wait for it first')

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._called("memcpyAsync")
        name = f"copy {CopyKind(kind).name.lower().replace('_', ' ')}"
        if self._pageable and kind == CopyKind.HOST_TO_DEVICE and not self.memory.host.find(src) and not self._capture:
            self._copy_pageable(dst, src, size, stream)
            return
        target = self.memory.range(dst, size, f"target of {name}", host=kind == CopyKind.DEVICE_TO_HOST)
        source = self.memory.range(src, size, f"source of {name}", host=kind == CopyKind.HOST_TO_DEVICE)
        if target[0] < source[1] and source[0] < target[1]:
            raise CudaError("InvalidValue", f"{name}: source and target overlap at {self.memory.name(dst)}")
        self.counts["copy"] += 1
        self.issue(stream, Op(name, lambda: _move(dst, src, size), (source,), (target,)))

    def _copy_pageable(self, dst: int, src: int, size: int, stream: int) -> None:
        """The driver copies pageable memory to a place of its own before the call returns."""
        target, held = self.memory.range(dst, size, "target of a copy"), ctypes.string_at(src, size)
        self.counts["pageable"] += 1
        self.issue(stream, Op("copy of pageable memory", lambda: _move(dst, held, size), (), (target,)))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._called("memsetAsync")
        target = self.memory.range(ptr, size, "memset")
        self.counts["fill"] += 1
        self.issue(stream, Op("fill", lambda: _fill(ptr, value, size), (), (target,)))

    # -- streams and events -------------------------------------------------------------------------------------

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        self._outside_capture("streamCreateWithPriority")
        if flags != 1:
            raise CudaError(
                "InvalidValue", f"stream flags {flags}: a blocking stream waits for the legacy stream; use 1"
            )
        return self._new(Stream())

    def streamDestroy(self, stream: int) -> None:
        self._get(stream, Stream)
        self._outside_capture("streamDestroy")
        del self._objects[stream]

    def streamSynchronize(self, stream: int) -> None:
        found = self._get(stream, Stream)
        self._outside_capture("streamSynchronize")
        self._wait_for(found.tail, found.clock)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        waiting, found = self._get(stream, Stream), self._get(event, Event)
        self._called("streamWaitEvent")
        if self.counts["streamWaitEvent"] - 1 == self.drop_wait:
            return
        if not found.recorded:
            raise CudaError("InvalidValue", "wait for an event that was never recorded (nothing happens on a GPU)")
        if found.capture is not None:
            if found.capture is not self._capture:
                raise CudaError("CapturedEvent", "the event was recorded in a capture that has ended")
            found.capture.wait(stream, event)
        elif self._capture and stream in self._capture:
            self._capture.broken = "a capturing stream waits for an event that was recorded outside the capture"
            raise CudaError("StreamCaptureIsolation", self._capture.broken)
        else:
            waiting.tail |= {launch for launch in found.after if not launch.done}
            merge(waiting.clock, found.clock)

    def eventCreateWithFlags(self, flags: int) -> int:
        self._called("eventCreateWithFlags")
        return self._new(Event())

    def eventDestroy(self, event: int) -> None:
        self._get(event, Event)
        self._called("eventDestroy")
        del self._objects[event]

    def eventRecord(self, event: int, stream: int) -> None:
        found, recorded = self._get(event, Event), self._get(stream, Stream)
        self._called("eventRecord")
        if self._capture and stream in self._capture:
            self._capture.record(stream, event)
            found.capture = self._capture
        else:
            found.capture = None
            found.after = {launch for launch in recorded.tail if not launch.done}
            found.clock = dict(recorded.clock)
        found.recorded = True

    def _uncaptured(self, event: int, name: str) -> Event:
        found = self._get(event, Event)
        self._outside_capture(name)
        if found.capture is not None:
            raise CudaError("CapturedEvent", f"{name} of an event that was recorded in a capture")
        return found

    def eventQuery(self, event: int) -> int:
        """0 or cudaErrorNotReady; time may pass meanwhile."""
        found = self._uncaptured(event, "eventQuery")
        self._run(self._scheduler.progress)
        if any(not launch.done for launch in found.after):
            return NOT_READY
        self._history.waited(found.clock)
        return 0

    def eventSynchronize(self, event: int) -> None:
        found = self._uncaptured(event, "eventSynchronize")
        if not found.recorded:
            raise CudaError("InvalidValue", "wait for an event that was never recorded (nothing happens on a GPU)")
        self._wait_for(found.after, found.clock)

    # -- capture and graphs -------------------------------------------------------------------------------------

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self._get(stream, Stream)
        self._called("streamBeginCapture")
        if mode != THREAD_LOCAL:
            raise CudaError("InvalidValue", f"capture mode {mode}; expected {THREAD_LOCAL}, thread-local")
        if self._capture:
            self._capture.broken = "streamBeginCapture while a stream is capturing"
            raise CudaError("IllegalState", self._capture.broken)
        self._capture = Capture(stream)

    def streamIsCapturing(self, stream: int) -> bool:
        self._get(stream, Stream)
        self._called("streamIsCapturing")
        return self._capture is not None and stream in self._capture

    def streamEndCapture(self, stream: int) -> int:
        self._get(stream, Stream)
        self._called("streamEndCapture")
        capture = self._capture
        if capture is None or stream not in capture:
            raise CudaError("IllegalState", "the stream is not capturing")
        if capture.origin != stream:
            capture.broken = "the capture was ended on a stream where it did not begin"
            raise CudaError("StreamCaptureUnmatched", capture.broken)
        self._capture = None
        graph = capture.finish()
        if self._check:
            graph.check(self.memory)
        return self._new(graph)

    def graphInstantiate(self, graph: int) -> int:
        found = self._get(graph, Graph)
        self._outside_capture("graphInstantiate")
        return self._new(Executable(found))

    def graphUpload(self, graphExec: int, stream: int) -> None:
        self._get(graphExec, Executable)
        self._get(stream, Stream)
        self._outside_capture("graphUpload")

    def graphLaunch(self, graphExec: int, stream: int) -> None:
        executable = self._get(graphExec, Executable)
        self._outside_capture("graphLaunch")
        graph = executable.graph
        if graph.generation != self.memory.generation:
            for op in graph.ops:
                for low, high in (*op.reads, *op.writes):
                    if low < high and not self.memory.alive(low, high):
                        raise CudaError("IllegalAddress", f'graph: "{op.name}" uses memory that is gone: {low:#x}')
            graph.generation = self.memory.generation
        last = executable.last  # launches of one executable run one after the other, whatever their streams
        self.launched.append(graphExec)
        executable.last = self._launch(stream, graph, [last] if last else [])

    def graphDestroy(self, graph: int) -> None:
        self._get(graph, Graph)
        self._called("graphDestroy")
        del self._objects[graph]

    def graphExecDestroy(self, graphExec: int) -> None:
        self._get(graphExec, Executable)
        self._outside_capture("graphExecDestroy")
        del self._objects[graphExec]

    # -- modules and kernels ------------------------------------------------------------------------------------

    def moduleLoadData(self, image: bytes) -> int:
        """``image`` is the path of a .cu file."""
        self._outside_capture("moduleLoadData")
        return self._new(DeviceModule(image.decode()))

    def moduleGetFunction(self, module: int, funcname: str) -> int:
        found = self._get(module, DeviceModule)
        self._called("moduleGetFunction")
        return self._new(found.function(funcname))

    def launchKernel(
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None:
        """Arguments are copied now. Extents of pointers are those of the last ``hint``."""
        function = self._get(f, DeviceFunction)
        self._called("launchKernel")
        self.warm(f, function.name)
        hints, self._hints = self._hints, None
        grid, block = (grid_dim_x, grid_dim_y, grid_dim_z), (block_dim_x, block_dim_y, block_dim_z)
        run, pointers = function.bound(grid, block, shared_mem_bytes, kernel_params)
        if hints is None or len(hints) != len(pointers):
            given = "none" if hints is None else len(hints)
            raise CudaError("InvalidValue", f"{function.name}: {len(pointers)} pointers, hinted sizes: {given}")
        reads: list[Range] = []
        writes: list[Range] = []
        for (where, address, constant), size in zip(pointers, hints, strict=True):
            (reads if constant else writes).append(self.memory.range(address, size, f"{function.name}, {where}"))
        function.check_aliases([(address, size) for (_, address, _), size in zip(pointers, hints, strict=True)])
        self.counts["kernel"] += 1
        self.issue(stream, Op(function.name, run, tuple(reads), tuple(writes)))
