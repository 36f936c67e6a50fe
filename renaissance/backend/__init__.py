"""Backends: the op registry, the arena, and the executor that captures and replays a compiled model."""

from renaissance.backend.arena import MemoryArena
from renaissance.backend.executor import GraphExecutor
from renaissance.backend.registry import OpRegistry, default_registry, why_unavailable
from renaissance.backend.slots import InputArrays

__all__ = ["GraphExecutor", "InputArrays", "MemoryArena", "OpRegistry", "default_registry", "why_unavailable"]
