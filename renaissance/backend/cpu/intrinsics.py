"""What compiled kernels need and Numba does not offer: calls through addresses, views of raw memory, FP control.

A kernel of the CPU backend is a Numba ``cfunc`` with the signature ``KERNEL`` = void(int64). Its only argument is the
address of its context, an int64 array that lives as long as the call (see ``queue.kernel_call``):

    word 0   address of omp_get_thread_num, or 0: not run by a team
    word 1   address of omp_get_num_threads, or 0
    word 2   status; any thread that fails writes a nonzero number, which stops the replay with an error naming the node
    word 3   number of threads asked for (for information)
    word 4+  the kernel's own arguments (``ARGS`` = 4): addresses and sizes as int64

    @cfunc(KERNEL, cache=True)
    def relu_kernel(address):
        ctx = words(address)
        start, stop = my_range(ctx, ctx[ARGS + 2], 4096)       # this thread's elements, cut in chunks of 4096
        x, y = f32(ctx[ARGS], ctx[ARGS + 2]), f32(ctx[ARGS + 1], ctx[ARGS + 2])
        for i in range(start, stop):
            y[i] = max(x[i], np.float32(0))

``team_rank(ctx)`` and ``team_size(ctx)`` are the thread's number and the team's size. A kernel must be correct for
every team size, 1 included, and must give the same bits for each: a sum over everything is made of partial sums per
chunk (chunks by size, not by thread) that a second, serial kernel adds in order.
"""
# Numba-compiled functions are untyped on purpose; the comment after each gives the types it is compiled for.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

KERNEL = types.void(types.int64)
ARGS = 4
"""Index of the first argument word in a kernel's context."""
STATUS = 2
"""Index of the status word in a kernel's context."""
FLUSH_DENORMALS = 0x8040
"""MXCSR bits: flush-to-zero (0x8000) and denormals-are-zero (0x0040)."""


@intrinsic
def call4(typingctx, fn, a0, a1, a2, a3):  # type: ignore[no-untyped-def]  # int64 x 5 -> int64 (the low 32 bits matter)
    """Call the C function at address ``fn`` with four 64-bit arguments."""
    signature = types.int64(types.int64, types.int64, types.int64, types.int64, types.int64)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        i64 = ir.IntType(64)
        kind = ir.FunctionType(i64, [i64] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return signature, codegen


@intrinsic
def call0(typingctx, fn):  # type: ignore[no-untyped-def]  # int64 -> int32
    """Call the C function ``int fn(void)`` at an address."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])

    return types.int32(types.int64), codegen


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]  # int64 -> void*
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def get_mxcsr(typingctx):  # type: ignore[no-untyped-def]  # () -> int32
    """The calling thread's SSE control word."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        slot = cgutils.alloca_once(builder, ir.IntType(32))
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        store = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.stmxcsr")
        builder.call(store, [builder.bitcast(slot, cgutils.voidptr_t)])
        return builder.load(slot)

    return types.int32(), codegen


@intrinsic
def set_mxcsr(typingctx, value):  # type: ignore[no-untyped-def]  # int32 -> int32
    """Set the calling thread's SSE control word; returns the value set."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        slot = cgutils.alloca_once(builder, ir.IntType(32))
        builder.store(args[0], slot)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        load = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr")
        builder.call(load, [builder.bitcast(slot, cgutils.voidptr_t)])
        return args[0]

    return types.int32(types.int32), codegen


@njit(cache=True)
def keep_denormals():  # type: ignore[no-untyped-def]  # () -> int32, the control word before
    """Stop flushing denormals in the calling thread; ``restore_denormals`` undoes it."""
    control = get_mxcsr()
    set_mxcsr(control & ~np.int32(FLUSH_DENORMALS))
    return control


@njit(cache=True)
def restore_denormals(control):  # type: ignore[no-untyped-def]  # int32 -> None
    """Put back the control word that ``keep_denormals`` returned."""
    set_mxcsr(control)


@njit
def words(address):  # type: ignore[no-untyped-def]  # int64 -> int64[:] (length is not checked)
    """A kernel's context as an int64 array."""
    return carray(_pointer(address), (1 << 20,), np.int64)


@njit
def f32(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> float32[count]
    """``count`` float32 at an address."""
    return carray(_pointer(address), (count,), np.float32)


@njit
def f64(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> float64[count]
    """``count`` float64 at an address."""
    return carray(_pointer(address), (count,), np.float64)


@njit
def u16(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> uint16[count]
    """``count`` uint16 (BF16 bit patterns) at an address."""
    return carray(_pointer(address), (count,), np.uint16)


@njit
def u32(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> uint32[count]
    """``count`` uint32 at an address."""
    return carray(_pointer(address), (count,), np.uint32)


@njit
def i32(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> int32[count]
    """``count`` int32 at an address."""
    return carray(_pointer(address), (count,), np.int32)


@njit
def i64(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> int64[count]
    """``count`` int64 at an address."""
    return carray(_pointer(address), (count,), np.int64)


@njit
def u8(address, count):  # type: ignore[no-untyped-def]  # int64, int64 -> uint8[count]
    """``count`` bytes at an address."""
    return carray(_pointer(address), (count,), np.uint8)


@njit
def team_rank(ctx):  # type: ignore[no-untyped-def]  # int64[:] -> int64
    """Number of this thread in the team, 0 when there is none."""
    if ctx[0] == 0:
        return np.int64(0)
    return np.int64(call0(ctx[0]))


@njit
def team_size(ctx):  # type: ignore[no-untyped-def]  # int64[:] -> int64
    """Threads in the team, 1 when there is none."""
    if ctx[1] == 0:
        return np.int64(1)
    return np.int64(call0(ctx[1]))


@njit
def my_range(ctx, count, chunk):  # type: ignore[no-untyped-def]  # int64[:], int64, int64 -> (int64, int64)
    """This thread's elements [start, stop) of ``count``: whole chunks of ``chunk``, dealt in contiguous runs.

    Only for work that is independent per element (or per chunk): the cut between threads moves with the team size.
    """
    chunks = (count + chunk - 1) // chunk
    rank, size = team_rank(ctx), team_size(ctx)
    start = chunks * rank // size * chunk
    stop = min(chunks * (rank + 1) // size * chunk, count)
    return min(start, count), stop
