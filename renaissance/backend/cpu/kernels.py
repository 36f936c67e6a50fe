"""The Numba kernels of the CPU backend, by family; matrix products are in ``products``."""

from __future__ import annotations

from renaissance.backend.cpu import kernels_guard, kernels_memory, kernels_softmax, kernels_update
from renaissance.backend.registry import OpRegistry


def register(registry: OpRegistry) -> None:
    """Add the launchers of every family to ``registry``."""
    for family in (kernels_memory, kernels_softmax, kernels_guard, kernels_update):
        family.register(registry)
