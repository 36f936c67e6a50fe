"""Page-locked host memory of our own: what the copy engine can reach without the host waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.registry import flat_view
from renaissance.core.errors import DeviceError


class PinnedBlock:
    """``nbytes`` of zeroed page-locked memory. Raises DeviceError when the system gives none."""

    def __init__(self, runtime: CudaRuntime, nbytes: int) -> None:
        self._runtime = runtime
        try:
            self._address = runtime.hostAlloc(nbytes, 0)
        except Exception as error:
            raise DeviceError(
                f"{nbytes} bytes of page-locked memory were refused: {error}; raise the limit of locked memory "
                "(ulimit -l)"
            ) from error
        self.bytes: npt.NDArray[np.uint8] = flat_view(self._address, nbytes, np.dtype(np.uint8))
        self.bytes[:] = 0

    @property
    def buffer(self) -> Buffer:
        """Address and size."""
        return Buffer(self._address, self.bytes.size)

    def view(self, offset: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Writable view of ``count`` elements from byte ``offset`` on."""
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def free(self) -> None:
        """Give it back; views of it must not be used any more. May be called again."""
        if self._address:
            self._runtime.freeHost(self._address)
            self._address = 0
