"""Loads and stores of compiled loops over feature maps: fp32 and bf16 through one source, and what may overlap.

``load(kind, address, i)`` gives element i of a stream as float32, ``store(kind, address, i, value)`` rounds it back;
``kind`` is ``FP32`` or ``BF16``, whose type (not value) picks the code, so a block function is written once and
compiled for both. The conversion stays in registers: a shift up, and one instruction down where the CPU has it.

LLVM cannot know that two addresses are different memory, and beyond a few pairs it gives up vectorising rather than
compare them all. So every access says what it belongs to: a *source* (read), a *target* (written) or a *tile* (working
memory of the kernel: per-channel factors and sums). Accesses of two classes are taken to be independent. The one
overlap that is allowed is a target that is a source of the same loop, element for element: the value stored at i
depends on what was loaded at i.
"""
# Numba-compiled functions are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.extending import intrinsic

FP32 = np.float32(0)
"""Marks a stream of float32."""
BF16 = np.uint16(0)
"""Marks a stream of bfloat16 bit patterns."""
compiled = njit(cache=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For functions that only kernels call: without the ways in from outside they compile a sixth faster."""
OPEN_SPANS = {
    "none": (0xFFFFFFFF, 0xFFFF),
    "relu": (0x7FFFFFFE, 0x7FFE),
    "relu6": (0x40C00000 - 2, 0x40C0 - 2),
}
"""Activation -> span of the outputs (float32, bfloat16) that let a gradient through: all, from the least positive
pattern up, or from there to the last one before 6. A NaN with its sign bit set does not pass."""
CLASSES = ("source", "target", "tile")

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not offer."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def code_has(feature: str) -> bool:
    """Whether code is generated for a CPU with this feature: the host, unless Numba was told otherwise."""
    if config.CPU_NAME or config.CPU_FEATURES is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "")
    return bool(llvm.get_host_cpu_features().get(feature, False))


def converts_bf16() -> bool:
    """Whether the CPU that code is generated for rounds float32 to bfloat16 in one instruction (AVX512-BF16).

    Without it LLVM would call a library function that no library here has. Both ways give the same bits, but for
    denormals, which a program flushes anyway, and the payload of a NaN.
    """
    return code_has("avx512bf16")


def _widen(builder: Any, pattern: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(pattern, _I32), ir.Constant(_I32, 16)), _F32)


def _narrow(builder: Any, value: Any, by_integers: bool) -> Any:
    """float32 -> bfloat16 pattern: nearest even, a NaN stays one."""
    if converts_bf16() and not by_integers:
        return builder.bitcast(builder.fptrunc(value, BFloat()), _I16)
    bits, upper = builder.bitcast(value, _I32), ir.Constant(_I32, 16)
    last = builder.and_(builder.lshr(bits, upper), ir.Constant(_I32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), last)
    quiet = builder.or_(bits, ir.Constant(_I32, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, upper), _I16)


def _mark(builder: Any, access: Any, own: str) -> Any:
    """Note the class of an access, and that it is independent of the other classes."""
    module = builder.module
    domain = module.add_metadata(["renaissance streams"])
    scopes = {name: module.add_metadata([name, domain]) for name in CLASSES}
    access.set_metadata("alias.scope", module.add_metadata([scopes[own]]))
    access.set_metadata("noalias", module.add_metadata([scopes[name] for name in CLASSES if name != own]))
    return access


def _element(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    element = _I16 if kind == types.uint16 else _F32
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index], inbounds=True)


def _load_pattern(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """The bits of a source's element as an integer of its size."""
    pattern = _I16 if kind == types.uint16 else _I32
    pointer = builder.gep(builder.inttoptr(address, pattern.as_pointer()), [index], inbounds=True)
    return _mark(builder, builder.load(pointer), "source")


def _in_span(builder: Any, pattern: Any, span: Any) -> Any:
    below = builder.sub(pattern, ir.Constant(pattern.type, 1))
    return builder.icmp_unsigned("<=", below, builder.trunc(span, pattern.type))


def _load(kind: Any, own: str) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value = _mark(builder, builder.load(_element(builder, kind, args[-2], args[-1])), own)
        return _widen(builder, value) if kind == types.uint16 else value

    return codegen


def _store(kind: Any, own: str, by_integers: bool = False) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value = _narrow(builder, args[-1], by_integers) if kind == types.uint16 else args[-1]
        _mark(builder, builder.store(value, _element(builder, kind, args[-3], args[-2])), own)
        return context.get_dummy_value()

    return codegen


@intrinsic
def load(typingctx, kind, address, index):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64 -> float32
    """Element ``index`` of the source at ``address``."""
    return types.float32(kind, types.int64, types.int64), _load(kind, "source")


@intrinsic
def store(typingctx, kind, address, index, value):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64, float32 -> None
    """Element ``index`` of the target at ``address`` := ``value``, rounded once."""
    return types.void(kind, types.int64, types.int64, types.float32), _store(kind, "target")


@intrinsic
def store_exact(typingctx, kind, address, index, value):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64, float32 -> None
    """As ``store`` for a value that was loaded from a stream of the same kind: nothing to round, so cheaper."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value = args[3]
        if kind == types.uint16:
            upper = builder.lshr(builder.bitcast(value, _I32), ir.Constant(_I32, 16))
            value = builder.trunc(upper, _I16)
        _mark(builder, builder.store(value, _element(builder, kind, args[1], args[2])), "target")
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), codegen


@intrinsic
def store_light(typingctx, kind, address, index, value):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64, float32 -> None
    """``store`` for a loop of few instructions: LLVM 22 takes the one that rounds to bfloat16 for a dear one and leaves
    such a loop at 4 lanes, but takes 16 if the rounding is spelt out in integers. Results are the same numbers."""
    return types.void(kind, types.int64, types.int64, types.float32), _store(kind, "target", by_integers=True)


@intrinsic
def passes(typingctx, kind, address, index, span):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64, int64 -> bool
    """Whether the bit pattern of a source's element lies in 1 to span + 1. Patterns of positive numbers are in the
    order of the numbers, so this is 0 < element < limit in one comparison of integers (see ``OPEN_SPANS``)."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _in_span(builder, _load_pattern(builder, kind, args[1], args[2]), args[3])

    return types.boolean(kind, types.int64, types.int64, types.int64), codegen


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]  # float32 x 3 -> float32
    """a * b + c, rounded once."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def tile(typingctx, address, index):  # type: ignore[no-untyped-def]  # int64, int64 -> float32
    """Element ``index`` of the tile at ``address``."""
    return types.float32(types.int64, types.int64), _load(types.float32, "tile")


@intrinsic
def set_tile(typingctx, address, index, value):  # type: ignore[no-untyped-def]  # int64, int64, float32 -> None
    """Element ``index`` of the tile at ``address`` := ``value``."""
    return types.void(types.int64, types.int64, types.float32), _store(types.float32, "tile")


@intrinsic
def ahead(typingctx, kind, address, count):  # type: ignore[no-untyped-def]  # FP32 or BF16, int64, int64 -> int64
    """The address ``count`` elements after ``address``."""
    width = 2 if kind == types.uint16 else 4

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.add(args[1], builder.mul(args[2], ir.Constant(_I64, width)))

    return types.int64(kind, types.int64, types.int64), codegen
