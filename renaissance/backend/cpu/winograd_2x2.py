"""Winograd's F(2x2, 3x3) in bfloat16: a 3x3 convolution of stride 1 with 4/9 of the multiplications.

As ``winograd`` with tiles of 2x2 outputs, patches of 4x4 inputs and 16 products. Transformed operands are rounded to
bfloat16 (once more than a plain sum rounds), sums are fp32. The transforms only add, subtract and halve, which is why
bfloat16 is enough here and would not be for larger tiles.

Operands of a product come in pairs of bfloat16 along the summed dimension: V as [16][tile][C], U as [16][K/32][C/2][32]
pairs; for the weight gradient, which sums over tiles, a *step* is two tiles side by side, V [16][C/16][step][16] pairs
and Z = A dy A^T [16][K/16][step][16] pairs. Neighbouring patches share two columns, so a whole row of tiles is
transformed in one go and every column once.
"""
# Numba intrinsics are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from renaissance.backend.cpu.vectors import LANES, LINE, Emitter, multiplies_bf16
from renaissance.backend.cpu.winograd import ADD_RESIDUAL, APPLY_RELU, Vector, both_ways, existing, when

PARTS = 16
"""Products: one per element of a transformed 4x4 patch."""
TILE = 2
"""Outputs per tile and direction."""
_I64 = ir.IntType(64)


def to_v(e: Emitter, d: Sequence[Vector]) -> list[Vector]:
    """B^T d: 4 -> 4."""
    return [e.sub(d[0], d[2]), e.add(d[1], d[2]), e.sub(d[2], d[1]), e.sub(d[1], d[3])]


def to_u(e: Emitter, g: Sequence[Vector]) -> list[Vector]:
    """G g: 3 -> 4."""
    outer, inner = e.scale(0.5, e.add(g[0], g[2])), e.scale(0.5, g[1])
    return [g[0], e.add(outer, inner), e.sub(outer, inner), g[2]]


def from_m(e: Emitter, m: Sequence[Vector]) -> list[Vector]:
    """A^T m: 4 -> 2."""
    return [e.add(e.add(m[0], m[1]), m[2]), e.sub(e.sub(m[1], m[2]), m[3])]


def to_m(e: Emitter, y: Sequence[Vector]) -> list[Vector]:
    """A y: 2 -> 4, the transpose of ``from_m``."""
    return [y[0], e.add(y[0], y[1]), e.sub(y[0], y[1]), e.sub(e.zero(), y[1])]


def from_u(e: Emitter, u: Sequence[Vector]) -> list[Vector]:
    """G^T u: 4 -> 3, the transpose of ``to_u``."""
    total, difference = e.scale(0.5, e.add(u[1], u[2])), e.scale(0.5, e.sub(u[1], u[2]))
    return [e.add(u[0], total), difference, e.add(total, u[3])]


class _Columns:
    """Reads columns of ``height`` pixels from a row of patches; what does not exist is zero."""

    def __init__(
        self, e: Emitter, source: Any, row_bytes: Any, pixel_bytes: Any, rows: Any, height: int, edge: Any
    ) -> None:
        """``edge``: (column of the first pixel, columns of the image, address of zeros)."""
        self.e, self.pixel_bytes = e, pixel_bytes
        self.left, self.width, self.zeros = edge
        self.rows = [e.at(source, e.times(row_bytes, i)) for i in range(height)]
        self.exists = existing(e.builder, rows, height)

    def read(self, column: Any, offset: Any) -> list[Vector]:
        """The column at number ``column``, channels from byte ``offset`` on."""
        e, b = self.e, self.e.builder
        inside = b.icmp_unsigned("<", e.at(self.left, column), self.width)
        place = e.at(b.mul(column, self.pixel_bytes), offset)
        chosen = [
            e.choose(b.and_(inside, there), e.at(row, place), self.zeros)
            for there, row in zip(self.exists, self.rows, strict=True)
        ]
        return [e.load_half(address) for address in chosen]


@intrinsic
def read_row(typingctx, source, row_bytes, pixel_bytes, rows, left, width, zeros, target, part_bytes, tiles, channels):  # type: ignore[no-untyped-def]  # int64 x 11 -> None
    """V of ``tiles`` neighbours in a row: V[part][tile][channels] in bfloat16, parts ``part_bytes`` apart.

    ``source`` is the first pixel of the first patch, in column ``left`` of an image of ``width`` columns; ``rows`` says
    which of its 4 rows exist (see ``winograd.existing``). ``zeros``: 64 bytes.
    """

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, row_bytes, pixel_bytes, rows, left, width, zeros, target, part_bytes, tiles, channels = args
        e = Emitter(builder)
        columns = _Columns(e, source, row_bytes, pixel_bytes, rows, 4, (left, width, zeros))

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset = e.times(number, 2 * LANES)
            first = [to_v(e, columns.read(ir.Constant(_I64, j), offset)) for j in range(2)]

            def tile(t: Any, kept: list[Any]) -> list[Any]:
                column = e.times(t, 2)
                new = [to_v(e, columns.read(e.at(column, j), offset)) for j in (2, 3)]
                place = e.at(e.at(target, offset), builder.mul(t, e.times(channels, 2)))
                for i in range(4):
                    for j, value in enumerate(to_v(e, [kept[i], kept[4 + i], new[0][i], new[1][i]])):
                        e.store_half(value, e.at(place, e.times(part_bytes, 4 * i + j)))
                return [*new[0], *new[1]]

            e.loop(tiles, [*first[0], *first[1]], tile)
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11), codegen


@intrinsic
def read_row_pairs(  # type: ignore[no-untyped-def]
    typingctx,
    source,
    row_bytes,
    pixel_bytes,
    rows,
    left,
    width,
    zeros,
    target,
    part_bytes,
    block_bytes,
    steps,
    channels,
):  # int64 x 12 -> None
    """As ``read_row`` for pairs of tiles: V[part][C/16][step][16] pairs, blocks of channels ``block_bytes`` apart."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, row_bytes, pixel_bytes, rows, left, width, zeros, target, part_bytes, block_bytes, steps, channels = (
            args
        )
        e = Emitter(builder)
        columns = _Columns(e, source, row_bytes, pixel_bytes, rows, 4, (left, width, zeros))

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset = e.times(number, 2 * LANES)
            first = [to_v(e, columns.read(ir.Constant(_I64, j), offset)) for j in range(2)]

            def step(s: Any, kept: list[Any]) -> list[Any]:
                column = e.times(s, 4)
                new = [to_v(e, columns.read(e.at(column, j), offset)) for j in (2, 3, 4, 5)]
                place = e.at(e.at(target, builder.mul(number, block_bytes)), e.times(s, LINE))
                for i in range(4):
                    low = to_v(e, [kept[i], kept[4 + i], new[0][i], new[1][i]])
                    high = to_v(e, [new[j][i] for j in range(4)])
                    for j in range(4):
                        e.store_pairs(low[j], high[j], e.at(place, e.times(part_bytes, 4 * i + j)))
                return [*new[2], *new[3]]

            e.loop(steps, [*first[0], *first[1]], step)
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 12), codegen


@intrinsic
def read_gradient_pairs(  # type: ignore[no-untyped-def]
    typingctx, source, row_bytes, pixel_bytes, rows, width, zeros, target, part_bytes, block_bytes, steps, channels
):  # int64 x 11 -> None
    """Z of the pairs of tiles of a row of dy (``source`` in column 0): Z[part][K/16][step][16] pairs."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, row_bytes, pixel_bytes, rows, width, zeros, target, part_bytes, block_bytes, steps, channels = args
        e = Emitter(builder)
        columns = _Columns(e, source, row_bytes, pixel_bytes, rows, 2, (ir.Constant(_I64, 0), width, zeros))

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset = e.times(number, 2 * LANES)

            def step(s: Any, _: list[Any]) -> list[Any]:
                column = e.times(s, 4)
                made = [to_m(e, columns.read(e.at(column, j), offset)) for j in range(4)]
                place = e.at(e.at(target, builder.mul(number, block_bytes)), e.times(s, LINE))
                for i in range(4):
                    low, high = (to_m(e, [made[j][i], made[j + 1][i]]) for j in (0, 2))
                    for j in range(4):
                        e.store_pairs(low[j], high[j], e.at(place, e.times(part_bytes, 4 * i + j)))
                return []

            e.loop(steps, [], step)
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11), codegen


@intrinsic
def write_tile(  # type: ignore[no-untyped-def]
    typingctx,
    source,
    part_bytes,
    target,
    row_bytes,
    pixel_bytes,
    rows,
    columns,
    nowhere,
    bias,
    residual,
    flags,
    channels,
):  # int64 x 12 -> None
    """Products of a tile become 2x2 pixels of bfloat16: act(result + bias + residual); words as in ``winograd``."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, part_bytes, target, row_bytes, pixel_bytes, rows, columns, nowhere, bias, residual, flags, channels = (
            args
        )
        e = Emitter(builder)
        exists = [builder.and_(r, c) for r in existing(builder, rows, TILE) for c in existing(builder, columns, TILE)]
        pixels = [
            e.at(e.at(target, e.times(row_bytes, i)), e.times(pixel_bytes, j)) for i in range(2) for j in range(2)
        ]

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset, half = e.times(number, LINE), e.times(number, LINE // 2)
            lines = [[e.at(e.at(source, offset), e.times(part_bytes, 4 * i + j)) for j in range(4)] for i in range(4)]
            made = both_ways(e, from_m, [[e.load(line) for line in row] for row in lines])
            shift = e.load(e.at(bias, offset))
            values = [e.add(v, shift) for row in made for v in row]
            places = [e.choose(there, e.at(p, half), nowhere) for there, p in zip(exists, pixels, strict=True)]

            def with_residual() -> list[Vector]:
                others = (e.choose(there, e.at(p, residual), nowhere) for there, p in zip(exists, places, strict=True))
                return [e.add(v, e.load_half(other)) for v, other in zip(values, others, strict=True)]

            values = when(builder, flags, ADD_RESIDUAL, values, with_residual)
            values = when(builder, flags, APPLY_RELU, values, lambda: [e.relu(v) for v in values])
            for value, place in zip(values, places, strict=True):
                e.store_half(value, place)
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 12), codegen


@intrinsic
def read_weights(typingctx, source, tap_bytes, target, part_bytes, channels):  # type: ignore[no-untyped-def]  # int64 x 5 -> None
    """U of 3x3 taps, ``tap_bytes`` apart, in bfloat16: U[part][channels]."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, tap_bytes, target, part_bytes, channels = args
        e = Emitter(builder)

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset = e.times(number, 2 * LANES)
            for p, value in enumerate(_weights(e, e.at(source, offset), tap_bytes)):
                e.store_half(value, e.at(e.at(target, offset), e.times(part_bytes, p)))
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def read_weight_pairs(typingctx, first, second, tap_bytes, target, part_bytes):  # type: ignore[no-untyped-def]  # int64 x 5 -> None
    """U of two filters of 16 lanes as pairs, stored line by line, parts ``part_bytes`` apart."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        first, second, tap_bytes, target, part_bytes = args
        e = Emitter(builder)
        both = (_weights(e, source, tap_bytes) for source in (first, second))
        for p, (low, high) in enumerate(zip(*both, strict=True)):
            e.store_pairs(low, high, e.at(target, e.times(part_bytes, p)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def write_weights(typingctx, source, part_bytes, target, tap_bytes, channels):  # type: ignore[no-untyped-def]  # int64 x 5 -> None
    """Sums [part][channels] in fp32 become 3x3 taps of fp32, ``tap_bytes`` apart."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        source, part_bytes, target, tap_bytes, channels = args
        e = Emitter(builder)

        def block(number: Any, _: list[Any]) -> list[Any]:
            offset = e.times(number, LINE)
            lines = [[e.at(e.at(source, offset), e.times(part_bytes, 4 * i + j)) for j in range(4)] for i in range(4)]
            made = both_ways(e, from_u, [[e.load(line) for line in row] for row in lines])
            for tap, value in enumerate(v for row in made for v in row):
                e.store(value, e.at(e.at(target, offset), e.times(tap_bytes, tap)))
            return []

        e.loop(builder.sdiv(channels, ir.Constant(_I64, LANES)), [], block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


def _weights(e: Emitter, source: Any, tap_bytes: Any) -> list[Vector]:
    grid = [[e.load_half(e.at(source, e.times(tap_bytes, 3 * r + s))) for s in range(3)] for r in range(3)]
    return [v for row in both_ways(e, to_u, grid) for v in row]


def fits(c: int, k: int) -> bool:
    """Whether this machine has the instructions, and the channels come in whole vectors."""
    return multiplies_bf16() and c % LANES == 0 and k % LANES == 0
