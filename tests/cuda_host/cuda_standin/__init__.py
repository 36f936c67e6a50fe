"""A stand-in for CUDA: the runtime, cuDNN, cuBLASLt and NCCL on the CPU, with CUDA's rules and more."""

from __future__ import annotations

from pathlib import Path

from cuda_standin.errors import CudaError, Race
from cuda_standin.libraries import FakeClock, StandInConvolutions, StandInProducts, Tuning, timed
from cuda_standin.runtime import NOT_READY, SYNCHRONISING, FakeCuda
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.libraries import Collectives

KERNELS = Path(__file__).resolve().parents[3] / "kernels"

__all__ = [
    "KERNELS",
    "NOT_READY",
    "SYNCHRONISING",
    "CudaError",
    "FakeClock",
    "FakeCuda",
    "Race",
    "StandInConvolutions",
    "StandInProducts",
    "Tuning",
    "device",
    "image",
    "timed",
]


def image(name: str) -> bytes:
    """What ``FakeCuda.moduleLoadData`` takes for kernels/NAME.cu."""
    return str(KERNELS / f"{name}.cu").encode()


def device(
    fake: FakeCuda | None = None,
    *,
    seed: int = 0,
    check: bool = True,
    collectives: Collectives | None = None,
    tuning: Tuning | None = None,
) -> DeviceContext:
    """A DeviceContext on the stand-in; its ``runtime`` is the FakeCuda. ``tuning``: plans are measured."""
    fake = fake or FakeCuda(seed, check)
    convolutions, products = StandInConvolutions(fake, tuning), StandInProducts(fake, tuning)
    made = DeviceContext(
        fake,
        image,
        convolutions,
        products,
        collectives=collectives,
        name="stand-in",
        arch="90",
        choices=None if tuning is None else tuning.choices,
    )
    for library in (convolutions, products):
        library.open(tuple(made.streams.values()))
    return made
