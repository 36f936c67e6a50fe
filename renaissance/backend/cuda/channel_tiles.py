"""How the kernels of norms and pools are laid over an NHWC tensor: ``Walk`` of kernels/channels.cuh.

A thread owns a pack of neighbouring channels: 16 bytes, or one channel where C is no multiple of that. A block of 256
threads is ``columns`` packs wide and ``rows`` pixels high; the grid is tiles of columns by chunks of rows. All of it
follows from the shape and the type, never from the device (law 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from renaissance.backend.cuda.calls import BLOCK, PACK_BYTES, Dim, suffix
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError
from renaissance.tensor.dtensor import DTensor

FEW_PACKS = 2
"""Columns of a block that does all rows of its channels alone: 32 bytes of a row, what memory gives at least."""
FEW_ROWS = 8
"""Rows of one thread there, at most; then it is quicker than three launches on all of the device."""
FEW_THREADS = (128, 256, 512)
"""Sizes of such a block: the least with which a thread has at most half of FEW_ROWS, or the largest."""
LINE, WARP_OF_PACKS = 128, 512
"""Bytes of a pixel that a block is wide, at most: a cache line; or what one warp reads, for blocks that have only a few
pixels to read. Wider blocks would leave more partial results per byte that they read."""
MOST_CHUNKS = 65535
"""Blocks along the second axis of a grid."""
MOST_PIXELS = 2**31 - 2**24
"""Of a tensor: pixel numbers are 32-bit, with room for the rows of a thread that it looks at after the last one."""


@dataclass(frozen=True, slots=True)
class ChannelTiles:
    """A tensor of ``pixels`` rows of ``channels``; ``pack`` channels to a thread."""

    suffix: str
    """Ending of the kernels' names: the type, and ``_1`` for single channels."""
    pixels: int
    channels: int
    pack: int
    columns: int
    tiles: int

    @classmethod
    def of(cls, tensor: DTensor, *, single: bool = False, widest: int = LINE) -> ChannelTiles:
        """For all N*H*W pixels of ``tensor``, blocks up to ``widest`` bytes wide; ``single``: without packs. Raises
        ShapeError for too many pixels."""
        shape = tensor.shape
        pixels = shape.n * shape.h * shape.w
        if pixels > MOST_PIXELS:
            raise ShapeError(
                f"tensor {tensor.name!r} {shape} has {pixels} pixels; expected at most {MOST_PIXELS}: "
                "use a smaller batch"
            )
        return cls.make(tensor.dtype, pixels, shape.c, single=single, widest=widest)

    @classmethod
    def make(
        cls, dtype: DType, pixels: int, channels: int, *, single: bool = False, widest: int = LINE
    ) -> ChannelTiles:
        """Tiles are as equal as can be, so that few threads are left over."""
        full = PACK_BYTES // dtype.itemsize
        pack = 1 if single or channels % full else full
        packs = channels // pack
        tiles = -(-packs // (widest // (pack * dtype.itemsize)))
        ending = suffix(dtype) if pack > 1 else f"{suffix(dtype)}_1"
        return cls(ending, pixels, channels, pack, -(-packs // tiles), tiles)

    def few_rows(self) -> tuple[ChannelTiles, Dim] | None:
        """Tiles and block with which one block does all rows of its channels; None without packs or for many rows."""
        packs = self.channels // self.pack
        columns = min(packs, FEW_PACKS)
        if self.pack == 1 or self.pixels > FEW_ROWS * (FEW_THREADS[-1] // columns):
            return None
        enough = (t for t in FEW_THREADS if self.pixels <= FEW_ROWS // 2 * (t // columns))
        return replace(self, columns=columns, tiles=-(-packs // columns)), (next(enough, FEW_THREADS[-1]), 1, 1)

    @property
    def rows(self) -> int:
        """Pixels that a block looks at side by side."""
        return BLOCK[0] // self.columns

    def chunk(self, at_once: int, most_blocks: int) -> int:
        """Rows of a chunk: a multiple of ``at_once`` for each thread, with about ``most_blocks`` blocks at most."""
        step = self.rows * at_once
        chunks = max(min(most_blocks // self.tiles, MOST_CHUNKS), 1)
        return step * max(-(-self.pixels // (step * chunks)), 1)

    def grid(self, chunk: int) -> Dim:
        """Tiles by chunks."""
        return (self.tiles, -(-self.pixels // chunk), 1)
