"""CUDA source files on the CPU: kernels/*.cu, unchanged, built with g++ and run thread by thread.

    kernels = Module(Path("kernels/elementwise.cu"))
    kernels["add_f32"](grid=(4, 1, 1), block=(256, 1, 1), args=[a, b, y, 1000])

Caught, as a ``KernelError`` that names kernel, source line, thread and block: divergent barriers and warp intrinsics,
deadlocks, indices out of bounds, misaligned vectors, signed overflow, accesses of memory that is not there (put arrays
into ``GuardedMemory``), blocks over the launch bounds, calls with wrong arguments. Shared memory starts as NaN in each
block. ``thread_order`` changes the order in which threads run. ``Module(path, race=True)`` finds accesses of two
threads to the same bytes without a barrier between them.

Not modelled: speed, memory-model reorderings, warp-synchronous code without intrinsics, inline PTX, cooperative groups.
Products and sums are not fused as a GPU does, and the functions of libm differ from CUDA's by an ulp or two.
"""

from cuda_emulator.build import KernelError, compiler
from cuda_emulator.memory import GuardedMemory
from cuda_emulator.module import Dim, Kernel, Module, Parameter, set_thread_order, thread_order

__all__ = [
    "Dim",
    "GuardedMemory",
    "Kernel",
    "KernelError",
    "Module",
    "Parameter",
    "compiler",
    "set_thread_order",
    "thread_order",
]
