"""DeviceContext: one GPU of this process with its five streams, its loaded kernels and its libraries.

Everything above it (arena, programs, executor) takes a context and does not know whether it is a GPU or the stand-in of
tests/cuda_host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from renaissance.backend.cuda.libraries import Collectives, Convolutions, Products
from renaissance.backend.cuda.pinned import PinnedBlock
from renaissance.backend.cuda.runtime import DISABLE_TIMING, NON_BLOCKING, CudaRuntime
from renaissance.core.enums import StreamKind
from renaissance.core.errors import DeviceError

if TYPE_CHECKING:
    from renaissance.backend.cuda.tuning import PlanChoices

ORIGIN = StreamKind.COMP_1
"""The stream that programs are launched on; in a capture the others fork from it and join it again."""
PRIORITIES: Mapping[StreamKind, int] = {ORIGIN: -1}
"""Of streams; lower is more urgent, 0 is usual. The long chain of a step is on the origin."""


def after_failure() -> AbstractContextManager[None]:
    """For giving back what a device holds: after a failed kernel every call of CUDA fails, and that error has been
    raised already; the driver gives everything back when the process ends."""
    return suppress(RuntimeError)


def give_back(actions: Iterable[Callable[[], object]]) -> None:
    """Call all of ``actions``, whichever of them fail: see ``after_failure``."""
    for action in actions:
        with after_failure():
            action()


class DeviceContext:
    """A GPU in use; a context manager. ``arch`` is the compute capability without its point, e.g. "90"."""

    def __init__(
        self,
        runtime: CudaRuntime,
        images: Callable[[str], bytes],
        convolutions: Convolutions,
        products: Products,
        *,
        collectives: Collectives | None = None,
        name: str,
        arch: str,
        choices: PlanChoices | None = None,
    ) -> None:
        """``images`` gives the loadable image of kernels/NAME.cu; ``choices`` are those that the libraries ask."""
        self.runtime, self.name, self.arch = runtime, name, arch
        self.convolutions, self.products, self._collectives = convolutions, products, collectives
        self._images, self._choices = images, choices
        self._functions: dict[tuple[str, str], int] = {}
        self._modules: dict[str, int] = {}
        self._events: list[int] = []
        self._blocks: list[PinnedBlock] = []
        self._closers: list[Callable[[], None]] = []
        self.streams: dict[StreamKind, int] = {}
        try:
            for kind in StreamKind:
                self.streams[kind] = runtime.streamCreateWithPriority(NON_BLOCKING, PRIORITIES.get(kind, 0))
        except BaseException:
            self.close()
            raise

    @property
    def origin(self) -> int:
        """Handle of the stream that programs are launched on."""
        return self.streams[ORIGIN]

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return 1 if self._collectives is None else self._collectives.size

    @property
    def collectives(self) -> Collectives:
        """NCCL; raises DeviceError when there is one rank."""
        if self._collectives is None:
            raise DeviceError("a collective of one rank; open the device with a communicator")
        return self._collectives

    def function(self, module: str, name: str) -> int:
        """Handle of kernel ``name`` of kernels/``module``.cu, which is compiled and loaded when first asked for."""
        if (module, name) not in self._functions:
            if module not in self._modules:
                self._modules[module] = self.runtime.moduleLoadData(self._images(module))
            self._functions[module, name] = self.runtime.moduleGetFunction(self._modules[module], name)
        return self._functions[module, name]

    def event(self) -> int:
        """A new event without timing that lives as long as the context."""
        self._events.append(self.runtime.eventCreateWithFlags(DISABLE_TIMING))
        return self._events[-1]

    def page_locked(self, nbytes: int) -> PinnedBlock:
        """Zeroed page-locked memory, which is given back with the context at the latest. Raises DeviceError."""
        self._blocks.append(PinnedBlock(self.runtime, nbytes))
        return self._blocks[-1]

    def planning(self) -> AbstractContextManager[None]:
        """Around what asks the libraries for a program's plans for the first time."""
        return nullcontext() if self._choices is None else self._choices.planning()

    def before_closing(self, action: Callable[[], None]) -> None:
        """Have ``action`` called when the context is closed, while its streams are still there."""
        self._closers.append(action)

    def synchronize(self) -> None:
        """Wait until all streams are idle."""
        for stream in self.streams.values():
            self.runtime.streamSynchronize(stream)

    def facts(self) -> dict[str, str | int]:
        """What the bits of a run may depend on besides data, model and options."""
        facts: dict[str, str | int] = {"gpu": self.name, "arch": f"sm_{self.arch}"}
        for library in (self.convolutions, self.products, self._collectives):
            if library is not None:
                facts |= library.facts()
        return facts | ({"world_size": self.world_size} if self.world_size > 1 else {})

    def close(self) -> None:
        """Close the libraries, free what is page-locked, destroy events and streams. May be called again."""
        give_back([self.synchronize])
        while self._closers:
            give_back([self._closers.pop()])
        give_back(block.free for block in self._blocks)
        give_back(partial(self.runtime.eventDestroy, event) for event in self._events)
        give_back(partial(self.runtime.streamDestroy, stream) for stream in self.streams.values())
        for kept in (self._blocks, self._events, self.streams):
            kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_device(
    index: int = 0,
    *,
    tf32: bool = False,
    connect: Callable[[], Collectives] | None = None,
    choices: PlanChoices | None = None,
) -> DeviceContext:
    """The GPU ``index`` of those that CUDA shows, for this thread, with NVIDIA's libraries. ``tf32`` lets float32
    operands of convolutions and products be rounded to TF32; ``connect`` joins the communicator of several ranks;
    ``choices`` lets plans be measured.

    Raises DeviceError that says what is missing: the driver, the GPU, a library or its package.
    """
    from renaissance.backend.cuda.cublaslt import CublasLtProducts
    from renaissance.backend.cuda.cudnn import CudnnConvolutions, Target
    from renaissance.backend.cuda.modules import images
    from renaissance.backend.cuda.plans import PlanFolder
    from renaissance.backend.cuda.runtime import cupy_runtime
    from renaissance.core.gpus import usable_gpus, visible_gpus
    from renaissance.core.kernel_cache import cache_folder

    usable_gpus([index])
    gpu = next(gpu for gpu in visible_gpus() if gpu.index == index)
    arch = "".join(map(str, gpu.capability))
    runtime = cupy_runtime()
    runtime.setDevice(index)
    folder = PlanFolder(cache_folder("cudnn-plans"))
    target = Target(f"{gpu.name} sm_{arch}, {gpu.multiprocessors} SMs")
    convolutions = CudnnConvolutions(runtime, target, tf32=tf32, folder=folder, choices=choices)
    products = CublasLtProducts(runtime, tf32=tf32, target=target.name, choices=choices)
    collectives = connect() if connect is not None else None
    device = DeviceContext(
        *(runtime, images(arch), convolutions, products),
        collectives=collectives,
        name=gpu.name,
        arch=arch,
        choices=choices,
    )
    if collectives is not None:
        device.before_closing(collectives.close)
    try:
        for library in (products, convolutions):
            device.before_closing(library.close)
            library.open(tuple(device.streams.values()))
    except BaseException:
        device.close()
        raise
    return device
