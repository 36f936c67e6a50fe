"""A hint to the memory system from inside compiled code.

Samples are read in random order, which no hardware prefetcher guesses; asking for the next sample while one is
computed hides most of the wait.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Start loading the cache line of ``array[index]``; no effect on values."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte] + [ir.IntType(32)] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # read, keep in all caches, data
        builder.call(function, [builder.bitcast(place, byte), *flags])
        return context.get_dummy_value()

    return types.void(array, index), generate
