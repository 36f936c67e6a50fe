"""Matrix products by cuBLASLt, through ctypes: CuPy's own BLAS refuses a capturing stream; this takes the stream and
the workspace with every call, keeps no state between calls and allocates nothing.

Proved without a GPU (tests/cuda_host): every constant and structure equals the library's header, and the library takes
the descriptors. Not proved without one: which algorithms its heuristics offer, and the numbers (tests/gpu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import ProductSpec
from renaissance.backend.cuda.plans import library_error, plans_digest, refuse_capture
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.cuda.tuning import PlanChoices, Question
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, DTypeError

# Constants of library_types.h, cublas_api.h and cublasLt.h.
CUDA_TYPES = {DType.FP32: 0, DType.FP16: 2, DType.BF16: 14}
"""cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF."""
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
OP_N, OP_T = 0, 1
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)
"""Of the library's A, B, C and D."""
REDUCTION_SCHEME_NONE, REDUCTION_SCHEME_COMPUTE_TYPE = 0, 2
ALGO_ATTRIBUTES: dict[str, tuple[int, type[ctypes.c_uint32] | type[ctypes.c_uint16]]] = {
    "ID": (0, ctypes.c_uint32),
    "TILE_ID": (1, ctypes.c_uint32),
    "SPLITK_NUM": (2, ctypes.c_uint32),
    "REDUCTION_SCHEME": (3, ctypes.c_uint32),
    "CTA_SWIZZLING": (4, ctypes.c_uint32),
    "CUSTOM_OPTION": (5, ctypes.c_uint32),
    "STAGES_ID": (6, ctypes.c_uint32),
    "INNER_SHAPE_ID": (7, ctypes.c_uint16),
    "CLUSTER_SHAPE_ID": (8, ctypes.c_uint16),
}
"""What an algorithm consists of: CUBLASLT_ALGO_CONFIG_* and the size of each."""

DETERMINISTIC = REDUCTION_SCHEME_NONE | REDUCTION_SCHEME_COMPUTE_TYPE
"""How the parts of a sum may be added up: in one sequence, or from float32 parts in a second pass. Not in place, where
blocks add to the result in the order in which they arrive, and not from parts rounded to the result's type."""
ASSUMED_ALIGNMENT = 256
"""Bytes: of tensors and scratch."""
CANDIDATES = 8
"""Algorithms asked for; those that keep the rules are offered."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", Algo),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtDestroy": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_POINTER,) * 7, _INT, _POINTER, _POINTER),
    "cublasLtMatmulAlgoConfigGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, _POINTER),
    "cublasLtMatmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}
"""Arguments of the functions that return a status."""


class Library:
    """The functions of libcublasLt that are used here. Loads the library; raises DeviceError without it."""

    def __init__(self) -> None:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        except (ImportError, OSError, RuntimeError) as error:
            raise library_error("cuBLASLt", error) from error
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.cublasLtGetStatusString.argtypes, library.cublasLtGetStatusString.restype = (_INT,), ctypes.c_char_p
        library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = (), ctypes.c_size_t
        self._library = library
        self.matmul: Any = library.cublasLtMatmul

    @property
    def version(self) -> str:
        """As the library reports it, e.g. "120903"."""
        return str(self._library.cublasLtGetVersion())

    def words(self, status: int) -> str:
        """The name of a cublasStatus_t."""
        text: bytes | None = self._library.cublasLtGetStatusString(status)
        return text.decode() if text else f"status {status}"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raises DeviceError with its name and the status in words unless it succeeds."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(f"{name}: {self.words(status)}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """A new object of one of the functions ``...Create``."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made


class Operation:
    """The objects that describe a product to the library; they need no device.

    Row-major C = A B is column-major C' = B' A', so the library's A is our B. A compact row-major matrix [rows, cols]
    is a column-major one of cols x rows whose columns are ``cols`` elements apart.
    """

    def __init__(self, library: Library, spec: ProductSpec, *, tf32: bool, workspace: int) -> None:
        self._library = library
        kind, result = CUDA_TYPES[spec.dtype], CUDA_TYPES[spec.result]
        compute = COMPUTE_32F_FAST_TF32 if tf32 and spec.dtype is DType.FP32 else COMPUTE_32F
        self.description = library.made("cublasLtMatmulDescCreate", compute, CUDA_TYPES[DType.FP32])
        for attribute, transposed in ((DESC_TRANSA, spec.tb), (DESC_TRANSB, spec.ta)):
            self._set("MatmulDesc", self.description, attribute, ctypes.c_int32(OP_T if transposed else OP_N))
        self.rows = {
            "A": (spec.k, spec.m) if spec.ta else (spec.m, spec.k),
            "B": (spec.n, spec.k) if spec.tb else (spec.k, spec.n),
            "C": (spec.m, spec.n),
        }
        self.layouts = {
            name: library.made("cublasLtMatrixLayoutCreate", result if name == "C" else kind, cols, rows, cols)
            for name, (rows, cols) in self.rows.items()
        }
        self.preference = library.made("cublasLtMatmulPreferenceCreate")
        self._set("MatmulPreference", self.preference, PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace))
        self._set("MatmulPreference", self.preference, PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(DETERMINISTIC))
        self.alignments = {name: alignment_of(spec, name, cols) for name, (_, cols) in self.rows.items()}
        for attribute, name in zip(PREF_MIN_ALIGNMENTS, "BACC", strict=True):
            value = ctypes.c_uint32(self.alignments[name])
            self._set("MatmulPreference", self.preference, attribute, value)

    def _set(self, what: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._library.call(f"cublasLt{what}SetAttribute", target, attribute, ctypes.byref(value), size)

    def destroy(self) -> None:
        """Give the objects back."""
        self._library.call("cublasLtMatmulPreferenceDestroy", self.preference)
        self._library.call("cublasLtMatmulDescDestroy", self.description)
        for layout in self.layouts.values():
            self._library.call("cublasLtMatrixLayoutDestroy", layout)


def alignment_of(spec: ProductSpec, name: str, cols: int) -> int:
    """Bytes of which every row of an operand starts at a multiple: what an algorithm that loads wide words may count
    on."""
    return gcd(ASSUMED_ALIGNMENT, cols * (spec.result if name == "C" else spec.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class LtPlan:
    """An algorithm for one product. Everything that the library's call takes is made here and kept alive."""

    spec: ProductSpec
    name: str
    workspace: int
    library: Library
    handle: ctypes.c_void_p
    operation: Operation
    found: HeuristicResult
    one: ctypes.c_float
    zero: ctypes.c_float

    def execute(self, stream: int, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        """out = first second on ``stream``: one foreign call. Raises DeviceError for a buffer that does not fit."""
        self._check(first, second, out, workspace)
        a, b, c = (self.operation.layouts[name] for name in "ABC")
        status = self.library.matmul(
            self.handle,
            self.operation.description,
            ctypes.byref(self.one),
            second.ptr,
            b,
            first.ptr,
            a,
            ctypes.byref(self.zero),
            out.ptr,
            c,
            out.ptr,
            c,
            ctypes.byref(self.found.algo),
            workspace.ptr,
            self.workspace,
            stream,
        )
        if status:
            raise DeviceError(f"cublasLtMatmul ({self.spec}, {self.name}): {self.library.words(status)}")

    def _check(self, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        for name, buffer in zip("ABC", (first, second, out), strict=True):
            rows, cols = self.operation.rows[name]
            need = rows * cols * (self.spec.result if name == "C" else self.spec.dtype).itemsize
            step = self.operation.alignments[name]
            if buffer.nbytes < need or buffer.ptr % step:
                given = f"{buffer.nbytes} bytes at {buffer.ptr:#x}"
                raise DeviceError(f"{self.spec}: operand {name} is {given}; expected {need} at a multiple of {step}")
        if workspace.nbytes < self.workspace:
            raise DeviceError(f"{self.spec}: {workspace.nbytes} bytes of workspace; expected {self.workspace}")


class CublasLtProducts:
    """``Products`` on cuBLASLt: one handle for all streams. Deterministic: algorithms whose sums depend on the order in
    which blocks arrive are ruled out. ``tf32`` lets float32 operands be rounded to TF32; sums are float32 always.

    ``open`` before the first plan and outside a capture; ``close`` at the end, before the streams are destroyed.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        *,
        tf32: bool = False,
        workspace: int = 32 << 20,
        target: str = "",
        choices: PlanChoices | None = None,
    ) -> None:
        """``workspace``: most bytes a plan may ask for; 32 MiB is what Hopper's algorithms are made for. ``choices``
        measures algorithms instead of taking the first, and files them under ``target``, as ``cudnn.Target.name``."""
        self._runtime, self._tf32, self._cap = runtime, tf32, workspace
        self._target, self._choices = target, choices
        self._library = Library()
        self._handle: ctypes.c_void_p | None = None
        self._streams: tuple[int, ...] = ()
        self._plans: dict[ProductSpec, LtPlan] = {}

    def open(self, streams: Sequence[int]) -> None:
        """Create the handle on the current device; ``streams`` are those on which plans will be executed."""
        self.close()
        self._streams = tuple(streams)
        refuse_capture(self._runtime, self._streams, "a cuBLASLt handle")
        self._handle = self._library.made("cublasLtCreate")

    def close(self) -> None:
        """Forget the plans and destroy the handle. May be called again."""
        for plan in self._plans.values():
            plan.operation.destroy()
        self._plans.clear()
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.call("cublasLtDestroy", handle)

    def plan(self, spec: ProductSpec) -> LtPlan:
        """The plan of ``spec``, found by the library's heuristics or chosen the first time. Raises DTypeError for types
        that do not go together, and DeviceError when there is no algorithm, before ``open`` and during a capture."""
        if spec not in self._plans:
            check_types(spec)
            if self._handle is None:
                raise DeviceError(f"a plan for {spec} before the products were opened; call open() first")
            refuse_capture(self._runtime, self._streams, f"a cuBLASLt plan for {spec}")
            self._plans[spec] = self._find(spec, self._handle)
        return self._plans[spec]

    def facts(self) -> dict[str, str]:
        """Version, whether TF32 is allowed, and a digest of the algorithms in use."""
        plans = plans_digest({spec: plan.name for spec, plan in self._plans.items()})
        return {"cublaslt": self._library.version, "products_tf32": str(self._tf32), "products_plans": plans}

    def _find(self, spec: ProductSpec, handle: ctypes.c_void_p) -> LtPlan:
        operation = Operation(self._library, spec, tf32=self._tf32, workspace=self._cap)
        try:
            plans = self._offers(spec, operation, handle)
            return plans[0] if self._choices is None else self._tuned(spec, plans, self._choices)
        except BaseException:
            operation.destroy()
            raise

    def _tuned(self, spec: ProductSpec, plans: Sequence[LtPlan], choices: PlanChoices) -> LtPlan:
        """The plan that is chosen by measurement."""
        options = f"TF32 {'on' if self._tf32 else 'off'}, cuBLASLt {self._library.version}"
        question = Question(
            f"{spec_text(spec)} | {self._target}, {options}",
            operand_bytes(spec),
            lambda: plans,
            lambda name: next((plan for plan in plans if plan.name == name), None),
        )
        return choices.of(question, self._runtime, self._streams[0])

    def _offers(self, spec: ProductSpec, operation: Operation, handle: ctypes.c_void_p) -> list[LtPlan]:
        """Plans within the rules, in the order of the library's heuristics. Raises DeviceError when there is none."""
        results, returned = (HeuristicResult * CANDIDATES)(), ctypes.c_int()
        a, b, c = (operation.layouts[name] for name in "ABC")
        try:
            self._library.call(
                "cublasLtMatmulAlgoGetHeuristic",
                handle,
                operation.description,
                b,
                a,
                c,
                c,
                operation.preference,
                CANDIDATES,
                ctypes.byref(results),
                ctypes.byref(returned),
            )
            plans: dict[str, LtPlan] = {}
            for found in results[: returned.value]:
                try:
                    settings = algo_settings(self._library, found.algo)
                except DeviceError:  # without such settings it cannot be told whether it is deterministic
                    continue
                name = "algo" + "_".join(str(value) for value in settings.values())
                if found.state == 0 and settings["REDUCTION_SCHEME"] in (0, REDUCTION_SCHEME_COMPUTE_TYPE):
                    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
                    size = found.workspaceSize
                    plan = LtPlan(spec, name, size, self._library, handle, operation, found, one, zero)
                    plans.setdefault(name, plan)
            if not plans:
                raise DeviceError(f"{returned.value} algorithms, none of them deterministic")
        except DeviceError as error:
            raise DeviceError(
                f"cuBLASLt has no plan for {spec} with {self._cap} bytes of workspace: {error}"
            ) from error
        return list(plans.values())


def operand_bytes(spec: ProductSpec) -> tuple[int, int, int]:
    """Sizes of A, B and C."""
    size = spec.dtype.itemsize
    return spec.m * spec.k * size, spec.k * spec.n * size, spec.m * spec.n * spec.result.itemsize


def spec_text(spec: ProductSpec) -> str:
    """A product in a line, for people."""
    a, b = "A^T" if spec.ta else "A", "B^T" if spec.tb else "B"
    return f"product {a} {b} {spec.m}x{spec.n}x{spec.k} {spec.dtype.name.lower()} to {spec.result.name.lower()}"


def check_types(spec: ProductSpec) -> None:
    """Raises DTypeError unless A and B are FP32, FP16 or BF16 and C is FP32 or of their type."""
    if spec.dtype not in CUDA_TYPES or spec.result not in (DType.FP32, spec.dtype):
        given = f"operands of {spec.dtype.name}, result of {spec.result.name}"
        raise DTypeError(f"{spec}: {given}; expected FP32, FP16 or BF16 and a result of that type or FP32")


def algo_settings(library: Library, algo: Algo) -> dict[str, int]:
    """The numbers that make up an algorithm."""
    settings = {}
    for name, (attribute, kind) in ALGO_ATTRIBUTES.items():
        value, written = kind(), ctypes.c_size_t()
        arguments = (ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written))
        library.call("cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algo), attribute, *arguments)
        settings[name] = value.value
    return settings
