"""The ops of this backend: what each module of launchers registers."""

from __future__ import annotations

from renaissance.backend.registry import OpRegistry


def register(registry: OpRegistry) -> None:
    """Register every op that CUDA runs. Touches no device and imports no library of NVIDIA's."""
    from renaissance.backend.cuda import (
        launch_collectives,
        launch_conv,
        launch_elementwise,
        launch_loss,
        launch_norm,
        launch_pool,
        launch_products,
        launch_update,
    )

    for module in (
        launch_products,
        launch_conv,
        launch_norm,
        launch_pool,
        launch_elementwise,
        launch_loss,
        launch_update,
        launch_collectives,
    ):
        module.register(registry)
