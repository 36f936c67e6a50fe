"""Errors of the stand-in: CUDA's by their names, and those that CUDA would not report."""

from __future__ import annotations


class CudaError(RuntimeError):
    """A call failed as CUDA would make it fail (or more strictly): ``name`` without the prefix cudaError."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"cudaError{name}: {message}")
        self.name = name


class Race(AssertionError):
    """Two operations without an order touch the same bytes, and one of them writes."""
