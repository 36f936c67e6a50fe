"""Winograd's F(4x4, 3x3): a 3x3 convolution of stride 1 with a quarter of the multiplications, in fp32.

A tile of 4x4 outputs needs 6x6 inputs d. With V = B^T d B and U = G g G^T (both 6x6), the outputs are
A^T (sum over channels of U * V) A: 36 matrix products over channels instead of 144 multiplications per channel and
tile. The gradients are the transposed steps: the data gradient is a convolution with turned weights, and the weight
gradient is G^T (sum over tiles of (A dy A^T) * (B^T d B)) G. (Lavin and Gray, arXiv 1509.09308.)

The matrices come from the interpolation points 0, +-P, +-Q and infinity. Points near 1 with P * Q near 1 keep the
rounding errors small (Barabasz et al., arXiv 1803.10986); the usual 1 and 2 lose about twice as much.

Layouts: channels in blocks of 16 lanes; V as [36][block][tile][16], U as [36][K block][C][16]. A tile past the border
reads zeros and writes nothing. NaN and Inf reach every output of their tile.
"""
# Numba intrinsics are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from renaissance.backend.cpu.vectors import LINE, Emitter, product16

P, Q = 0.625, 1.5
POSITIONS = 36
TILE_BYTES = POSITIONS * LINE
"""Bytes of a transformed tile of 16 channels."""
TILE = 4
"""Outputs per tile and direction."""
ADD_RESIDUAL, APPLY_RELU = 1, 2
_I64 = ir.IntType(64)
_NORM_0 = P * P * Q * Q
_NORM_P = 2 * P * P * (P * P - Q * Q)
_NORM_Q = 2 * Q * Q * (Q * Q - P * P)

Vector = Any
Transform = Callable[[Emitter, Sequence[Vector]], list[Vector]]


def to_v(e: Emitter, d: Sequence[Vector]) -> list[Vector]:
    """B^T d: 6 -> 6."""
    even_p, even_q = e.axpy(-Q * Q, d[2], d[4]), e.axpy(-P * P, d[2], d[4])
    odd_p, odd_q = e.axpy(-Q * Q, d[1], d[3]), e.axpy(-P * P, d[1], d[3])
    return [
        e.axpy(_NORM_0, d[0], e.axpy(-(P * P + Q * Q), d[2], d[4])),
        e.axpy(P, odd_p, even_p),
        e.axpy(-P, odd_p, even_p),
        e.axpy(Q, odd_q, even_q),
        e.axpy(-Q, odd_q, even_q),
        e.axpy(_NORM_0, d[1], e.axpy(-(P * P + Q * Q), d[3], d[5])),
    ]


def to_u(e: Emitter, g: Sequence[Vector]) -> list[Vector]:
    """G g: 3 -> 6."""
    made = [e.scale(1 / _NORM_0, g[0])]
    for point, norm in ((P, _NORM_P), (Q, _NORM_Q)):
        even = e.axpy(point * point / norm, g[2], e.scale(1 / norm, g[0]))
        made += [e.axpy(point / norm, g[1], even), e.axpy(-point / norm, g[1], even)]
    return [*made, g[2]]


def from_m(e: Emitter, m: Sequence[Vector]) -> list[Vector]:
    """A^T m: 6 -> 4."""
    sum_p, sum_q = e.add(m[1], m[2]), e.add(m[3], m[4])
    difference_p, difference_q = e.sub(m[1], m[2]), e.sub(m[3], m[4])
    return [
        e.add(m[0], e.add(sum_p, sum_q)),
        e.axpy(P, difference_p, e.scale(Q, difference_q)),
        e.axpy(P * P, sum_p, e.scale(Q * Q, sum_q)),
        e.axpy(P**3, difference_p, e.axpy(Q**3, difference_q, m[5])),
    ]


def to_m(e: Emitter, y: Sequence[Vector]) -> list[Vector]:
    """A y: 4 -> 6, the transpose of ``from_m``."""
    made = [y[0]]
    for point in (P, Q):
        even, odd = e.axpy(point * point, y[2], y[0]), e.axpy(point * point, y[3], y[1])
        made += [e.axpy(point, odd, even), e.axpy(-point, odd, even)]
    return [*made, y[3]]


def from_u(e: Emitter, u: Sequence[Vector]) -> list[Vector]:
    """G^T u: 6 -> 3, the transpose of ``to_u``."""
    sum_p, sum_q = e.add(u[1], u[2]), e.add(u[3], u[4])
    difference_p, difference_q = e.sub(u[1], u[2]), e.sub(u[3], u[4])
    return [
        e.axpy(1 / _NORM_0, u[0], e.axpy(1 / _NORM_P, sum_p, e.scale(1 / _NORM_Q, sum_q))),
        e.axpy(P / _NORM_P, difference_p, e.scale(Q / _NORM_Q, difference_q)),
        e.axpy(P * P / _NORM_P, sum_p, e.axpy(Q * Q / _NORM_Q, sum_q, u[5])),
    ]


def both_ways(e: Emitter, transform: Transform, grid: list[list[Vector]]) -> list[list[Vector]]:
    """``transform`` on the columns of a grid, then on the rows of the result."""
    columns = [transform(e, [row[j] for row in grid]) for j in range(len(grid[0]))]
    return [transform(e, [column[i] for column in columns]) for i in range(len(columns[0]))]


def _read_tile(transform: Transform, size: int, *, half: bool) -> Any:
    """Intrinsic: transform a tile of size x size pixels of 16 channels and store its 36 lines.

    ``rows`` and ``columns`` say which pixels exist: [low, high) of 0..size, as low | high << 8. Others are read from
    ``nothing``, 64 bytes of zeros.
    """

    @intrinsic
    def read(typingctx, source, row_bytes, pixel_bytes, rows, columns, nothing, target):  # type: ignore[no-untyped-def]  # int64 x 7 -> None
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            source, row_bytes, pixel_bytes, rows, columns, nothing, target = args
            e = Emitter(builder)
            there_rows, there_columns = (existing(builder, limits, size) for limits in (rows, columns))
            grid = []
            for i in range(size):
                row = e.at(source, e.times(row_bytes, i))
                line = []
                for j in range(size):
                    pixel = e.at(row, e.times(pixel_bytes, j))
                    exists = builder.and_(there_rows[i], there_columns[j])
                    address = e.choose(exists, pixel, nothing)
                    line.append(e.load_half(address) if half else e.load(address))
                grid.append(line)
            _store_positions(e, both_ways(e, transform, grid), target, None)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 7), codegen

    return read


def _write_tile(*, half: bool) -> Any:
    """Intrinsic: the 36 lines of a tile become 4x4 pixels of 16 channels: act(result + bias + residual).

    ``bias`` is the address of 16 floats. ``residual`` added to a pixel's address gives the residual's. ``flags`` are
    made of ADD_RESIDUAL and APPLY_RELU. Pixels that do not exist (see ``_read_tile``) go to ``nowhere``, 64 bytes.
    """

    @intrinsic
    def write(typingctx, source, target, row_bytes, pixel_bytes, rows, columns, nowhere, bias, residual, flags):  # type: ignore[no-untyped-def]  # int64 x 10 -> None
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            source, target, row_bytes, pixel_bytes, rows, columns, nowhere, bias, residual, flags = args
            e = Emitter(builder)
            b = e.load(bias)
            there_rows, there_columns = (existing(builder, limits, TILE) for limits in (rows, columns))
            exists = [builder.and_(r, c) for r in there_rows for c in there_columns]
            pixels = [
                e.at(e.at(target, e.times(row_bytes, i)), e.times(pixel_bytes, j)) for i in range(4) for j in range(4)
            ]
            values = [e.add(v, b) for row in both_ways(e, from_m, _positions(e, source)) for v in row]
            load, store = (e.load_half, e.store_half) if half else (e.load, e.store)

            def with_residual() -> list[Vector]:
                where = (e.choose(there, e.at(p, residual), nowhere) for there, p in zip(exists, pixels, strict=True))
                return [e.add(v, load(address)) for v, address in zip(values, where, strict=True)]

            values = when(builder, flags, ADD_RESIDUAL, values, with_residual)
            values = when(builder, flags, APPLY_RELU, values, lambda: [e.relu(v) for v in values])
            for there, pixel, value in zip(exists, pixels, values, strict=True):
                store(value, e.choose(there, pixel, nowhere))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 10), codegen

    return write


def _read_weights(*, half: bool) -> Any:
    """Intrinsic: transform 3x3 taps of 16 lanes, ``tap_bytes`` apart, and store their 36 lines. Turned by 180 degrees
    when ``source`` is the last tap and ``tap_bytes`` negative."""

    @intrinsic
    def read(typingctx, source, tap_bytes, target, position_bytes):  # type: ignore[no-untyped-def]  # int64 x 4 -> None
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            source, tap_bytes, target, position_bytes = args
            e = Emitter(builder)
            load = e.load_half if half else e.load
            grid = [[load(e.at(source, e.times(tap_bytes, 3 * r + s))) for s in range(3)] for r in range(3)]
            _store_positions(e, both_ways(e, to_u, grid), target, position_bytes)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 4), codegen

    return read


@intrinsic
def write_weights(typingctx, source, target, tap_bytes):  # type: ignore[no-untyped-def]  # int64 x 3 -> None
    """The 36 lines of a gradient become 3x3 taps of 16 lanes, ``tap_bytes`` apart."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, target, tap_bytes = args
        e = Emitter(builder)
        for r, row in enumerate(both_ways(e, from_u, _positions(e, source))):
            for s, value in enumerate(row):
                e.store(value, e.at(target, e.times(tap_bytes, 3 * r + s)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), codegen


def _positions(e: Emitter, source: Any) -> list[list[Vector]]:
    return [[e.load(e.at(source, LINE * (6 * i + j)), aligned=True) for j in range(6)] for i in range(6)]


def _store_positions(e: Emitter, grid: list[list[Vector]], target: Any, position_bytes: Any) -> None:
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            offset = e.times(position_bytes, 6 * i + j) if position_bytes is not None else LINE * (6 * i + j)
            e.store(value, e.at(target, offset), aligned=True)


def existing(builder: Any, limits: Any, size: int) -> list[Any]:
    """Truth values of low <= i < high for i < size and limits = low | high << 8."""
    low = builder.and_(limits, ir.Constant(_I64, 255))
    high = builder.lshr(limits, ir.Constant(_I64, 8))
    numbers = [ir.Constant(_I64, i) for i in range(size)]
    return [builder.and_(builder.icmp_signed("<=", low, i), builder.icmp_signed(">", high, i)) for i in numbers]


def when(builder: Any, flags: Any, flag: int, values: list[Vector], change: Callable[[], list[Vector]]) -> list[Vector]:
    """``change()`` where the flag is set, else ``values``; a branch, so that what is not wanted costs nothing."""
    wanted = builder.icmp_signed("!=", builder.and_(flags, ir.Constant(_I64, flag)), ir.Constant(_I64, 0))
    before = builder.block
    change_block, after = builder.append_basic_block("change"), builder.append_basic_block("after")
    builder.cbranch(wanted, change_block, after)
    builder.position_at_end(change_block)
    changed = change()
    builder.branch(after)
    builder.position_at_end(after)
    merged = []
    for old, new in zip(values, changed, strict=True):
        phi = builder.phi(old.type)
        phi.add_incoming(old, before)
        phi.add_incoming(new, change_block)
        merged.append(phi)
    return merged


read_input = _read_tile(to_v, 6, half=False)
read_input_half = _read_tile(to_v, 6, half=True)
read_gradient = _read_tile(to_m, TILE, half=False)
read_gradient_half = _read_tile(to_m, TILE, half=True)
write_output = _write_tile(half=False)
write_output_half = _write_tile(half=True)
read_weights = _read_weights(half=False)
read_weights_half = _read_weights(half=True)

tiles_by_lines = product16(4, TILE_BYTES, LINE, TILE_BYTES)
"""16 tiles x 16 k (the next 16 k at ``a_stride``) times 16 k x 16 lanes: of M for 16 tiles."""
tiles_by_tiles = product16(TILE_BYTES, 4, TILE_BYTES, TILE_BYTES)
"""16 tiles of 16 rows, transposed, times 16 tiles of 16 lanes: 16 rows of U."""
