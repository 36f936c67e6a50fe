"""The GPU under an engine: the device is opened, the rings are made readable for it, the programs are captured.

What a GPU holds is given back when the engine that uses it is gone, at the latest: until then its tensors stay
readable, also after the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from renaissance.backend.cuda import device as devices
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.cuda.libraries import Collectives
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.backend.interface import Memory
from renaissance.core.errors import DeviceError, RenaissanceError, ValueRejected
from renaissance.core.settings import require_gpus
from renaissance.graph import CompiledModel
from renaissance.task.options import runnable_backend

Slots = Sequence[tuple[Memory, Memory]]


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """Which GPU, by CUDA's index, how it multiplies FP32, what joins it to the GPUs of other ranks, and what measures
    the libraries' plans."""

    index: int = 0
    tf32: bool = False
    connect: Callable[[], Collectives] | None = None
    choices: PlanChoices | None = None


@contextmanager
def gpu_failures(what: str) -> Iterator[None]:
    """An error of CUDA's, or of one of its libraries, is raised as a DeviceError that begins with ``what``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RenaissanceError):
            raise
        raise DeviceError(f"{what}: {error}") from error


def chosen_gpu(what: str, gpu: int | GpuChoice | None) -> GpuChoice | None:
    """A choice of an index. Raises ValueRejected for anything else."""
    if gpu is None or isinstance(gpu, GpuChoice):
        return gpu
    if isinstance(gpu, bool) or not isinstance(gpu, int) or gpu < 0:
        raise ValueRejected(f"{what}: gpu is {gpu!r} ({type(gpu).__name__}); expected the index of one, such as 0")
    return GpuChoice(gpu)


def backend_or_gpu(what: str, backend: str | None, threads: int | None, gpu: GpuChoice | None) -> str:
    """The backend that ``what`` runs on: that of the CPU which was asked for or can run, or "cuda".

    Raises ValueRejected for options of the CPU beside a GPU, and DeviceError for what cannot be used here.
    """
    if gpu is None:
        return runnable_backend(backend, threads)[0]
    for option, value in (("threads", threads), ("backend", backend)):
        if value is not None:
            raise ValueRejected(f"{what}: {option} is {value!r}, which is of the CPU, and gpu is {gpu.index}; drop one")
    require_gpus((gpu.index,), what, "without gpu it runs on the CPU")
    return "cuda"


class GpuSide:
    """A device in use with the executor of one model on it. Made by ``open``."""

    def __init__(self, device: DeviceContext, executor: CudaExecutor) -> None:
        self.device, self.executor = device, executor

    @classmethod
    def open(
        cls,
        compiled: CompiledModel,
        choice: GpuChoice,
        mappings: Sequence[tuple[int, int]],
        *,
        train_slots: Slots,
        train_end_slots: Slots,
        val_slots: Slots,
    ) -> GpuSide:
        """``mappings``: (address, bytes) of the shared memory that slots lie in.

        Raises DeviceError when the GPU or a library cannot be used, and what ``CudaExecutor`` raises. Nothing is left
        behind then.
        """
        with gpu_failures(f"GPU {choice.index}"):
            device = devices.open_device(choice.index, tf32=choice.tf32, connect=choice.connect, choices=choice.choices)
        memory = HostMemory(device.runtime)
        try:
            with gpu_failures(f"GPU {choice.index} ({device.name})"):
                for mapping in mappings:
                    memory.cover(*mapping)
                executor = CudaExecutor(
                    compiled,
                    device=device,
                    memory=memory,
                    train_slots=train_slots,
                    train_end_slots=train_end_slots,
                    val_slots=val_slots,
                )
        except BaseException:
            memory.close()
            device.close()
            raise
        return cls(device, executor)

    def close_with(self, owner: object) -> None:
        """Give everything back when ``owner`` is gone. At the end of the process the driver does it."""
        weakref.finalize(owner, self.close).atexit = False

    def close(self) -> None:
        """Give back the GPU's memory and streams. May be called again."""
        with devices.after_failure():
            self.executor.close()
        self.device.close()
