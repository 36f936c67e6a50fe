"""oneDNN through its C interface (ctypes): memory descriptors, primitives, and argument arrays bound at capture.

Only what the CPU backend uses is bound. The numbers are those of ``dnnl_types.h`` and ``dnnl_common_types.h`` of
oneDNN 3.2; the C interface is stable within major version 3, so a newer 3.x library works too. A primitive's working
memory is always the caller's (``scratchpad mode user``), so executing one allocates nothing.

The library is looked for in this order: the file named by ``RENAISSANCE_ONEDNN``, the environment's ``lib`` folder
(where pip puts ``onednn-cpu-iomp``), the system's library path.
"""

from __future__ import annotations

import ctypes
import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from renaissance.backend.cpu.intrinsics import keep_denormals, restore_denormals
from renaissance.backend.cpu.threads import LIBRARY_VARIABLE, library_folders, load_shared, runtime
from renaissance.backend.registry import NativeCall
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError

LIBRARY = "libdnnl.so.3"
COMPILER_RUNTIME = ("libintlc.so.5", "libirng.so", "libimf.so", "libsvml.so")
"""Libraries that the iomp build links against; each is loaded first if it can be found."""
INSTALL_HINT = (
    "install it with: pip install onednn-cpu-iomp intel-openmp 'intel-cmplr-lib-rt<2024', or name a oneDNN 3.x "
    f"library in {LIBRARY_VARIABLE}, or choose the reference backend"
)
MAX_DIMS = 12


class Arg(IntEnum):
    """DNNL_ARG_*: what an argument of a primitive is."""

    SRC = 1
    DST = 17
    WEIGHTS = 33
    BIAS = 41
    SCRATCHPAD = 80
    DIFF_SRC = 129
    DIFF_DST = 145
    DIFF_WEIGHTS = 161
    DIFF_BIAS = 169
    POST_OP_0 = 32768 | 2
    """Second input (SRC_1) of the first post-op."""


DATA_TYPES = {DType.FP16: 1, DType.BF16: 2, DType.FP32: 3, DType.INT32: 4, DType.INT8: 5, DType.UINT8: 6}
STATUS_NAMES = {
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "last implementation reached",
    5: "runtime error",
    6: "not required",
}
ISA_NAMES = {
    0x1: "sse41",
    0x3: "avx",
    0x7: "avx2",
    0xF: "avx2_vnni",
    0x1F: "avx2_vnni_2",
    0x27: "avx512_core",
    0x67: "avx512_core_vnni",
    0xE7: "avx512_core_bf16",
    0x1EF: "avx512_core_fp16",
    0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}

_OPENMP = 2
_CPU_ENGINE = 1
_IN_ORDER = 1
_ANY_LAYOUT = 1
_SCRATCHPAD_USER = 1
FORWARD_TRAINING = 64
FORWARD_INFERENCE = 96
_ELTWISE_RELU = 0x20
_RELU_SLOPE = 1e-45
"""oneDNN's plain ReLU is max(x, 0), which turns NaN into 0 and hides it from the NaN check. With a slope it is
``x > 0 ? x : slope * x``: NaN stays NaN. This slope is the smallest denormal, so with denormals flushed (as they are in
every replay) negative numbers become -0 exactly, and -Inf becomes NaN, which the check then sees."""
_QUERY_IMPLEMENTATION = 8
_QUERY_MD = {"src": 129, "diff_src": 130, "weights": 131, "diff_weights": 132, "dst": 133, "diff_dst": 134}
_QUERY_SCRATCHPAD = 136
_QUERY_STRIDES, _QUERY_NDIMS, _QUERY_PADDED_DIMS = 14, 256, 260
_QUERY_INNER_COUNT, _QUERY_INNER_SIZES, _QUERY_INNER_DIMS = 263, 264, 265
_BINARY_ADD = 0x1FFF0


class _Version(Structure):
    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    )


class _ExecArg(Structure):
    _fields_ = (("arg", c_int), ("memory", c_void_p))


class MemoryDesc:
    """Shape, element type and layout of an operand; owns its handle unless it was borrowed from a primitive."""

    __slots__ = ("__weakref__", "_owner", "handle")

    def __init__(self, handle: int, owner: object = None) -> None:
        self.handle = handle
        self._owner = owner


@dataclass(frozen=True, slots=True)
class PostOps:
    """What a primitive does to its result before it rounds and stores it: add a tensor, then ReLU (NaN stays NaN)."""

    add: MemoryDesc | None = None
    """Layout of the tensor that is added; it is bound as ``Arg.POST_OP_0``."""
    relu: bool = False


class Primitive:
    """A compiled operation. ``scratchpad`` is the working memory in bytes that every execution needs."""

    def __init__(self, dnn: OneDnn, descriptor: int) -> None:
        self._dnn = dnn
        self.descriptor = descriptor
        weakref.finalize(self, dnn.call, "dnnl_primitive_desc_destroy", c_void_p(descriptor))
        handle = c_void_p()
        dnn.call("dnnl_primitive_create", byref(handle), c_void_p(descriptor))
        self.handle = _value(handle)
        weakref.finalize(self, dnn.call, "dnnl_primitive_destroy", c_void_p(self.handle))
        self.scratchpad = dnn.size(MemoryDesc(self._query(_QUERY_SCRATCHPAD), self))

    @property
    def implementation(self) -> str:
        """Name of the chosen implementation, e.g. ``brgemm:avx512_core_bf16``."""
        return self._dnn.implementation(self.descriptor)

    def layout(self, operand: str) -> MemoryDesc:
        """Descriptor that the primitive chose for ``operand``: src, weights, dst, diff_src, diff_weights, diff_dst."""
        return MemoryDesc(self._query(_QUERY_MD[operand]), self)

    def bind(self, operands: Mapping[Arg, tuple[MemoryDesc, int]], scratch: int, label: str) -> NativeCall:
        """The call that executes this primitive on the given (descriptor, address) operands."""
        dnn = self._dnn
        bound = dict(operands)
        if self.scratchpad:
            bound[Arg.SCRATCHPAD] = (MemoryDesc(self._query(_QUERY_SCRATCHPAD), self), scratch)
        memories = [dnn.memory(desc, address) for desc, address in bound.values()]
        arguments = (_ExecArg * len(bound))(
            *(_ExecArg(int(arg), memory.handle) for arg, memory in zip(bound, memories, strict=True))
        )
        return NativeCall(
            dnn.execute_address,
            (self.handle, dnn.stream, len(bound), ctypes.addressof(arguments)),
            label,
            keep=(self, arguments, memories),
        )

    def _query(self, what: int) -> int:
        handle = self._dnn.library.dnnl_primitive_desc_query_md(c_void_p(self.descriptor), c_int(what), c_int(0))
        return int(handle or 0)


class _Memory:
    """A memory object: a descriptor bound to an address."""

    __slots__ = ("__weakref__", "desc", "handle")

    def __init__(self, handle: int, desc: MemoryDesc) -> None:
        self.handle = handle
        self.desc = desc


class OneDnn:
    """The loaded library with its one CPU engine and in-order stream. Get it with ``onednn()``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        if not hasattr(library, "dnnl_version"):
            raise DeviceError(f"{library._name} is not oneDNN: it has no function dnnl_version; {INSTALL_HINT}")
        library.dnnl_version.restype = POINTER(_Version)
        library.dnnl_memory_desc_get_size.restype = c_size_t
        library.dnnl_primitive_desc_query_md.restype = c_void_p
        version = library.dnnl_version().contents
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        if version.major != 3:
            raise DeviceError(f"oneDNN {self.version} in {library._name}: expected version 3.x; {INSTALL_HINT}")
        if version.cpu_runtime != _OPENMP:
            raise DeviceError(
                f"oneDNN {self.version} in {library._name} brings threads of its own (runtime {version.cpu_runtime}); "
                f"expected a build for OpenMP, which keeps to compute_threads; {INSTALL_HINT}"
            )
        engine, stream = c_void_p(), c_void_p()
        self.call("dnnl_engine_create", byref(engine), c_int(_CPU_ENGINE), c_size_t(0))
        self.engine = _value(engine)
        self.call("dnnl_stream_create", byref(stream), engine, c_uint(_IN_ORDER))
        self.stream = _value(stream)
        self.execute_address = _value(ctypes.cast(library.dnnl_primitive_execute, c_void_p))

    @property
    def isa(self) -> str:
        """The instruction set the library uses on this CPU, e.g. ``avx512_core_amx``."""
        value = int(self.library.dnnl_get_effective_cpu_isa())
        return ISA_NAMES.get(value, f"isa 0x{value:x}")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a status. Raises DeviceError with the function's name."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise DeviceError(f"oneDNN {self.version}: {function} failed: {explain(status)}")

    def desc(self, dims: Sequence[int], dtype: DType, strides: Sequence[int] | None = None) -> MemoryDesc:
        """A plain layout; ``strides`` in elements, dense row-major when left out."""
        if strides is None:
            strides = [1] * len(dims)
            for i in range(len(dims) - 2, -1, -1):
                strides[i] = strides[i + 1] * dims[i + 1]
        handle = c_void_p()
        self.call(
            "dnnl_memory_desc_create_with_strides",
            byref(handle), c_int(len(dims)), dims_array(dims), c_int(DATA_TYPES[dtype]), dims_array(strides),
        )  # fmt: skip
        return self._owned(handle)

    def any_desc(self, dims: Sequence[int], dtype: DType) -> MemoryDesc:
        """A layout that the primitive may choose (see ``Primitive.layout``)."""
        handle = c_void_p()
        self.call(
            "dnnl_memory_desc_create_with_tag",
            byref(handle), c_int(len(dims)), dims_array(dims), c_int(DATA_TYPES[dtype]), c_int(_ANY_LAYOUT),
        )  # fmt: skip
        return self._owned(handle)

    def size(self, desc: MemoryDesc) -> int:
        """Bytes that an operand of this layout takes."""
        return int(self.library.dnnl_memory_desc_get_size(c_void_p(desc.handle))) if desc.handle else 0

    def layout_key(self, desc: MemoryDesc) -> tuple[int, ...]:
        """Numbers that name a layout: strides and padded sizes of the outer dimensions, then the inner blocks. Equal
        keys of operands of equal shape and type mean equal layouts."""
        rank, blocks = c_int(), c_int()
        self._query(desc, _QUERY_NDIMS, rank)
        self._query(desc, _QUERY_INNER_COUNT, blocks)
        key: list[int] = []
        for what, count in (
            (_QUERY_STRIDES, rank),
            (_QUERY_PADDED_DIMS, rank),
            (_QUERY_INNER_SIZES, blocks),
            (_QUERY_INNER_DIMS, blocks),
        ):
            numbers = POINTER(c_int64)()
            self._query(desc, what, numbers)
            key += [numbers[i] for i in range(count.value)]
        return tuple(key)

    def _query(self, desc: MemoryDesc, what: int, result: Any) -> None:
        self.call("dnnl_memory_desc_query", c_void_p(desc.handle), c_int(what), byref(result))

    def same_layout(self, a: MemoryDesc, b: MemoryDesc) -> bool:
        """Whether two descriptors are equal in shape, type and layout."""
        return bool(self.library.dnnl_memory_desc_equal(c_void_p(a.handle), c_void_p(b.handle)))

    def memory(self, desc: MemoryDesc, address: int) -> _Memory:
        """A memory object at ``address``."""
        handle = c_void_p()
        self.call("dnnl_memory_create", byref(handle), c_void_p(desc.handle), c_void_p(self.engine), c_void_p(address))
        memory = _Memory(_value(handle), desc)
        weakref.finalize(memory, self.call, "dnnl_memory_destroy", c_void_p(memory.handle))
        return memory

    def matmul(
        self, src: MemoryDesc, weights: MemoryDesc, bias: MemoryDesc | None, dst: MemoryDesc, *, relu: bool = False
    ) -> Primitive:
        """dst[m,n] = src[m,k] x weights[k,n] (+ bias[1,n]), then ReLU when asked."""
        return self.primitive("dnnl_matmul_primitive_desc_create", (src, weights, bias, dst), post=PostOps(relu=relu))

    def inner_product_forward(
        self,
        src: MemoryDesc,
        weights: MemoryDesc,
        bias: MemoryDesc | None,
        dst: MemoryDesc,
        *,
        relu: bool = False,
        training: bool = True,
    ) -> Primitive:
        """dst[n,oc] = src[n,ic] x weights[oc,ic]^T (+ bias[oc]), then ReLU when asked."""
        kind = c_int(FORWARD_TRAINING if training else FORWARD_INFERENCE)
        return self.primitive(
            "dnnl_inner_product_forward_primitive_desc_create",
            (src, weights, bias, dst),
            post=PostOps(relu=relu),
            before=[kind],
        )

    def inner_product_backward_data(
        self, diff_src: MemoryDesc, weights: MemoryDesc, diff_dst: MemoryDesc, forward: Primitive
    ) -> Primitive:
        """diff_src[n,ic] = diff_dst[n,oc] x weights[oc,ic]."""
        return self.primitive(
            "dnnl_inner_product_backward_data_primitive_desc_create", (diff_src, weights, diff_dst), hint=forward
        )

    def inner_product_backward_weights(
        self,
        src: MemoryDesc,
        diff_weights: MemoryDesc,
        diff_bias: MemoryDesc | None,
        diff_dst: MemoryDesc,
        forward: Primitive,
    ) -> Primitive:
        """diff_weights[oc,ic] = diff_dst[n,oc]^T x src[n,ic]; diff_bias[oc] = sum over n of diff_dst."""
        return self.primitive(
            "dnnl_inner_product_backward_weights_primitive_desc_create",
            (src, diff_weights, diff_bias, diff_dst),
            hint=forward,
        )

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> Primitive:
        """Copy with a change of layout or element type."""
        descriptor, attributes = c_void_p(), self._attributes(PostOps())
        self.call(
            "dnnl_reorder_primitive_desc_create",
            byref(descriptor), c_void_p(src.handle), c_void_p(self.engine), c_void_p(dst.handle),
            c_void_p(self.engine), attributes,
        )  # fmt: skip
        self.call("dnnl_primitive_attr_destroy", attributes)
        return Primitive(self, _value(descriptor))

    def primitive(
        self,
        create: str,
        descs: Sequence[MemoryDesc | None],
        *,
        post: PostOps | None = None,
        before: Sequence[c_int] = (),
        after: Sequence[Any] = (),
        hint: Primitive | None = None,
        avoid: str = "",
    ) -> Primitive:
        """A primitive from the library's function ``create``, whose arguments are: result, engine, ``before``,
        ``descs``, ``after``, the forward primitive ``hint`` if any, attributes. An implementation whose name starts
        with ``avoid`` is passed over for the library's next one. Raises DeviceError when the library has no
        implementation for these operands."""
        control = keep_denormals()  # where they are flushed, the slope of ReLU would become 0 on its way
        attributes = self._attributes(post or PostOps())
        try:
            descriptor = c_void_p()
            arguments: list[Any] = [byref(descriptor), c_void_p(self.engine), *before]
            arguments += [c_void_p(d.handle if d else None) for d in descs]
            arguments += [*after, *([c_void_p(hint.descriptor)] if hint else [])]
            self.call(create, *arguments, attributes)
            while avoid and self.implementation(_value(descriptor)).startswith(avoid):
                self.call("dnnl_primitive_desc_next_impl", descriptor)
            return Primitive(self, _value(descriptor))
        finally:
            restore_denormals(control)
            self.call("dnnl_primitive_attr_destroy", attributes)

    def implementation(self, descriptor: int) -> str:
        """Name of the implementation that a primitive's descriptor stands for."""
        text = c_char_p()
        self.call(
            "dnnl_primitive_desc_query", c_void_p(descriptor), c_int(_QUERY_IMPLEMENTATION), c_int(0), byref(text)
        )
        return (text.value or b"").decode()

    def _attributes(self, post: PostOps) -> c_void_p:
        attributes = c_void_p()
        self.call("dnnl_primitive_attr_create", byref(attributes))
        self.call("dnnl_primitive_attr_set_scratchpad_mode", attributes, c_int(_SCRATCHPAD_USER))
        if post.add is not None or post.relu:
            ops = c_void_p()
            self.call("dnnl_post_ops_create", byref(ops))
            if post.add is not None:
                self.call("dnnl_post_ops_append_binary", ops, c_int(_BINARY_ADD), c_void_p(post.add.handle))
            if post.relu:
                self.call("dnnl_post_ops_append_eltwise", ops, c_int(_ELTWISE_RELU), c_float(_RELU_SLOPE), c_float(0))
            self.call("dnnl_primitive_attr_set_post_ops", attributes, ops)
            self.call("dnnl_post_ops_destroy", ops)
        return attributes

    def _owned(self, handle: c_void_p) -> MemoryDesc:
        desc = MemoryDesc(_value(handle))
        weakref.finalize(desc, self.call, "dnnl_memory_desc_destroy", c_void_p(desc.handle))
        return desc


_loaded: OneDnn | None = None


def onednn() -> OneDnn:
    """The library, loaded on first use. Raises DeviceError naming what to install when it cannot be loaded."""
    global _loaded
    if _loaded is None:
        _loaded = OneDnn(_load())
    return _loaded


def explain(status: int) -> str:
    """A oneDNN status number in words."""
    return f"oneDNN status {status} ({STATUS_NAMES.get(status, 'unknown')})"


def _load() -> ctypes.CDLL:
    runtime()  # the OpenMP runtime must be the one our kernels use, so it is loaded first
    for name in COMPILER_RUNTIME:
        load_shared(name)
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        candidates = [named]
    else:
        candidates = [str(f / LIBRARY) for f in library_folders() if (f / LIBRARY).exists()] + [LIBRARY]
    problems = []
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            problems.append(str(error))
    raise DeviceError(f"oneDNN could not be loaded on {platform.machine()}: {'; '.join(problems)}; {INSTALL_HINT}")


def dims_array(sizes: Sequence[int]) -> Any:
    return (c_int64 * MAX_DIMS)(*sizes)


def _value(handle: c_void_p) -> int:
    if not handle.value:
        raise DeviceError("oneDNN returned an empty handle")
    return handle.value
