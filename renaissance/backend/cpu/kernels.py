"""The Numba kernels of the CPU backend, by family; matrix products are in ``products``."""

from __future__ import annotations

from renaissance.backend.cpu import (
    kernels_dropout,
    kernels_elementwise,
    kernels_guard,
    kernels_lars,
    kernels_memory,
    kernels_norm,
    kernels_pool,
    kernels_shape,
    kernels_softmax,
    kernels_update,
)
from renaissance.backend.registry import OpRegistry


def register(registry: OpRegistry) -> None:
    """Add the launchers of every family to ``registry``."""
    for family in (
        kernels_memory,
        kernels_elementwise,
        kernels_norm,
        kernels_shape,
        kernels_softmax,
        kernels_pool,
        kernels_dropout,
        kernels_guard,
        kernels_update,
        kernels_lars,
    ):
        family.register(registry)
