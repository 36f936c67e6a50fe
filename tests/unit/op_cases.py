"""One op on small random operands: run by a backend in its storage types, and exactly, in float64, by the reference.

A ``Case`` is plain data. ``exact`` computes it with no rounding at all, from the operands as the storage type holds
them; ``measured`` captures and runs it on a backend; ``compare`` relates the two. The cases are in ``op_sweep``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from backend_kernels_harness import Bench, node

from renaissance.backend import reference
from renaissance.backend.cpu.queue import NativeQueue
from renaissance.backend.cpu.threads import configure
from renaissance.backend.reference.operands import Operands, narrow, widen
from renaissance.backend.registry import Call, NativeCall, OpRegistry, PythonCall, default_registry
from renaissance.core.dtype import DType
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue, Node
from renaissance.tensor.dtensor import DTensor

F64 = npt.NDArray[np.float64]
ROUNDING = {DType.FP32: 2.0**-24, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}
"""Largest relative error of rounding once."""
GARBAGE = 3e30
"""What an output holds before the op overwrites it."""
HALF_COPY = "half"
"""Name of an output that exists only beside a half type."""
UNDERFLOW = {DType.FP32: 1e-37, DType.BF16: 1e-37, DType.FP16: 2.0**-25}
"""Largest error of rounding once where numbers are too small for a relative one; the first two flush to 0."""
SLACK = 4
"""Roundings of fp32 that an op may do besides those of its sums."""
DEVIATIONS = 8
"""A sum of terms that are rounded one by one stays within this many times the root of their squares' sum."""


@dataclass(frozen=True, slots=True)
class In:
    """An input tensor [N,H,W,C]. ``kind``: "f" the type under test, "fp32", "i32" or "mask" (bytes)."""

    name: str
    values: npt.NDArray[Any]
    kind: str = "f"


@dataclass(frozen=True, slots=True)
class Out:
    """An output tensor.

    ``terms``: numbers summed up in one element. ``magnitude``: what the terms add up to without their signs; None:
    found by running the op on absolute values (linear ops) or the largest result (all others). ``refits``: how often a
    term is rounded to the type under test before it is summed up. ``start``: contents that the op reads. An output with
    the name of an input is that tensor. Only the first ``rows`` samples are compared.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "f"
    terms: float = 1
    magnitude: F64 | float | None = None
    refits: int = 0
    start: F64 | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One op with its operands; ``spans`` are the regions that range ops work on, named in ``reads`` and ``writes``."""

    op: str
    title: str
    inputs: tuple[In, ...]
    outputs: tuple[Out, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    spans: Mapping[Region, F64] = field(default_factory=dict)
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    linear: bool = False


def scalar(name: str, value: float, kind: str = "fp32") -> In:
    return In(name, np.full((1, 1, 1, 1), value), kind)


def dtype_of(kind: str, f: DType) -> DType:
    return {"f": f, "fp32": DType.FP32, "i32": DType.INT32, "mask": DType.INT8}[kind]


def stored(values: npt.NDArray[Any], kind: str, f: DType) -> npt.NDArray[Any]:
    """The elements as the tensor holds them."""
    dtype = dtype_of(kind, f)
    if dtype in ROUNDING:
        return narrow(np.asarray(values, np.float64), dtype)
    return np.ascontiguousarray(values).astype(np.int64).astype(dtype.numpy)  # i32 words and bytes above 127 wrap


def loaded(raw: npt.NDArray[Any], kind: str, f: DType) -> npt.NDArray[Any]:
    dtype = dtype_of(kind, f)
    return widen(raw, dtype) if dtype in ROUNDING else raw.copy()


class Exact(Operands):
    """Operands of the reference backend that round nothing: float64 in, float64 out."""

    def __init__(self, node: Node, tensors: dict[int, npt.NDArray[Any]], spans: dict[Span, F64]) -> None:
        self.node, self._tensors, self._spans = node, tensors, spans

    def read(self, tensor_id: int) -> F64:
        return self._tensors[tensor_id].astype(np.float64)

    def write(self, tensor_id: int, values: npt.ArrayLike) -> None:
        out = self._tensors[tensor_id]
        out[...] = np.asarray(values).reshape(out.shape)

    def shape(self, tensor_id: int) -> tuple[int, ...]:
        return self._tensors[tensor_id].shape

    def raw(self, tensor_id: int) -> npt.NDArray[Any]:
        return self._tensors[tensor_id]

    def ints(self, tensor_id: int) -> npt.NDArray[Any]:
        return self._tensors[tensor_id].reshape(-1)

    def number(self, tensor_id: int) -> float:
        return float(self._tensors[tensor_id].reshape(-1)[0])

    def span(self, span: Span, dtype: DType = DType.FP32) -> npt.NDArray[Any]:
        return self._spans[span]

    def write_span(self, span: Span, values: F64) -> None:
        self._spans[span][:] = values

    def span_dtype(self, span: Span) -> DType:
        return span.first.dtype(DType.BF16)


def for_type(case: Case, f: DType) -> Case:
    """The case without the half copies of weights when the type under test is fp32."""
    if f.is_half:
        return case
    outputs = tuple(o for o in case.outputs if o.name != HALF_COPY)
    return replace(case, outputs=outputs, writes=tuple(r for r in case.writes if not r.dtype(DType.BF16).is_half))


def wiring(case: Case) -> tuple[Node, dict[str, int]]:
    """The node, and the id of every tensor by name."""
    ids: dict[str, int] = {}
    for operand in (*case.inputs, *case.outputs):
        ids.setdefault(operand.name, len(ids))
    inputs = tuple(ids[i.name] for i in case.inputs)
    outputs = tuple(ids[o.name] for o in case.outputs)
    spans = [tuple(Span(r, r) for r in regions) for regions in (case.reads, case.writes)]
    return node(case.op, inputs, outputs, *spans, **case.attrs), ids


def exact(case: Case, f: DType, power: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Every output (and span, by region name) of the case in float64. ``power``: on |operand| ** power, if it is not 0,
    and without the activation."""
    case = for_type(case, f)
    if power and "activation" in case.attrs:
        case = replace(case, attrs={**case.attrs, "activation": "none"})  # a ceiling would hide what is summed up
    wired, ids = wiring(case)
    tensors: dict[int, npt.NDArray[Any]] = {}
    for i in case.inputs:
        held = loaded(stored(i.values, i.kind, f), i.kind, f)
        tensors[ids[i.name]] = np.abs(held) ** power if power and i.kind in ("f", "fp32") else held
    for o in case.outputs:
        if ids[o.name] not in tensors:
            whole = dtype_of(o.kind, f) not in ROUNDING
            start = np.zeros(o.shape) if o.start is None else loaded(stored(o.start, o.kind, f), o.kind, f)
            tensors[ids[o.name]] = start.astype(dtype_of(o.kind, f).numpy) if whole else start.astype(np.float64)
    spans = {Span(r, r): widen(narrow(v, r.dtype(f)), r.dtype(f)) for r, v in case.spans.items()}
    reference.OPS[case.op](Exact(wired, tensors, spans))
    results = {o.name: tensors[ids[o.name]] for o in case.outputs}
    return results | {r.name: spans[Span(r, r)] for r in regions_of(case)}


def regions_of(case: Case) -> list[Region]:
    """Regions that the op may read or write: all of them are compared, so that none changes that should not."""
    return sorted({*case.reads, *case.writes})


_registries: dict[str, OpRegistry] = {}


def registry(backend: str) -> OpRegistry:
    if backend not in _registries:
        _registries[backend] = default_registry(backend)
    return _registries[backend]


class OneNode(Bench):
    """A bench that hands out what its node wants to have run before validation."""

    def __init__(self, threads: int, half: DType | None) -> None:
        super().__init__(threads, half)
        self.preparations: list[Call] = []

    def prepare(self, key: Hashable, calls: Sequence[Call]) -> None:
        self.preparations.extend(calls)


def measured(case: Case, backend: str, f: DType, threads: int = 2) -> dict[str, npt.NDArray[Any]]:
    """The same outputs, widened to float64, from one captured and launched node of a backend."""
    if backend == "cpu":
        configure(threads)
    case = for_type(case, f)
    wired, _ = wiring(case)
    bench = OneNode(threads, half=f if f.is_half else None)
    place_all(bench, case, f)
    calls = registry(backend).launcher(case.op, backend)(wired, bench)
    if backend == "cpu":
        NativeQueue([c for c in (*bench.preparations, *calls) if isinstance(c, NativeCall)]).launch()
    else:
        for call in calls:
            assert isinstance(call, PythonCall)
            call.fn()
    return results_of(case, f, bench)


class Tensors(Protocol):
    """Where operands are put: tensors by number, and numbers by name."""

    names: dict[str, int]

    def adopt(self, tensor: DTensor) -> int: ...

    def array(self, tensor_id: int) -> npt.NDArray[Any]: ...


class Operands(Tensors, Protocol):
    """Tensors and spans of one node."""

    validating: bool

    def add_span(self, region: Region, values: npt.NDArray[Any]) -> Span: ...

    def span_array(self, span: Span, dtype: DType) -> npt.NDArray[Any]: ...


def place(bench: Tensors, operand: In | Out, f: DType) -> None:
    """Make the operand the next tensor of ``bench``; an output holds its start, or garbage."""
    shape = operand.values.shape if isinstance(operand, In) else operand.shape
    values = operand.values if isinstance(operand, In) else operand.start
    if values is None:
        values = np.full(shape, GARBAGE if dtype_of(operand.kind, f) in ROUNDING else 77)
    dtype = dtype_of(operand.kind, f)
    region = Region.S_MASK if operand.kind == "mask" else Region.T_TEMP_FP32
    tensor = bench.adopt(DTensor.make(len(bench.names), operand.name, Shape(*shape), dtype, region))
    bench.array(tensor)[...] = stored(values, operand.kind, f)


def place_all(bench: Operands, case: Case, f: DType) -> None:
    """All operands and spans of a case that was made ``for_type``."""
    bench.validating = case.op.endswith("_INF")
    for operand in (*case.inputs, *case.outputs):
        if operand.name not in bench.names:
            place(bench, operand, f)
    for region, values in case.spans.items():
        bench.add_span(region, narrow(values, region.dtype(f)))


def results_of(case: Case, f: DType, bench: Operands) -> dict[str, npt.NDArray[Any]]:
    """Every output (and span, by region name) of a bench that has run, widened to float64 where it is a float."""
    case = for_type(case, f)
    results = {o.name: loaded(bench.array(bench.names[o.name]), o.kind, f) for o in case.outputs}
    for region in regions_of(case):
        dtype = region.dtype(f)
        results[region.name] = widen(bench.span_array(Span(region, region), dtype), dtype)
    return results


@dataclass(frozen=True, slots=True)
class Error:
    """Largest error of one output: relative to its largest value (to the largest magnitude, where that is a thousand
    times as large: the terms cancel), and relative to what is allowed."""

    output: str
    relative: float
    of_allowed: float
    stored: DType


def compare(case: Case, f: DType, got: Mapping[str, npt.NDArray[Any]]) -> list[Error]:
    """Errors of ``got`` against float64.

    Allowed: (terms + SLACK) roundings of fp32 of the magnitude, plus one rounding of the result to its type, plus
    ``refits`` roundings of every term to the type under test: independent ones in a linear op, else of the magnitude.
    """
    case = for_type(case, f)
    want = exact(case, f)
    sizes = exact(case, f, power=1) if case.linear else {}
    squares = exact(case, f, power=2) if case.linear else {}
    spans = [Out(r.name, case.spans[r].shape, "span") for r in regions_of(case)]
    errors = []
    for out in (*case.outputs, *spans):
        dtype = Region[out.name].dtype(f) if out.kind == "span" else dtype_of(out.kind, f)
        a, b = got[out.name][: out.rows], want[out.name][: out.rows]
        if dtype not in ROUNDING:
            wrong = float((a != b).any())
            errors.append(Error(out.name, wrong, 2 * wrong, dtype))
            continue
        largest = float(np.abs(b).max())
        size = sizes[out.name][: out.rows] if case.linear else largest if out.magnitude is None else out.magnitude
        refitted = DEVIATIONS * np.sqrt(squares[out.name][: out.rows]) if case.linear else size
        summed = (out.terms + SLACK) * ROUNDING[DType.FP32] * size
        refit = out.refits * (ROUNDING[f] * refitted + UNDERFLOW[f])
        allowed = summed + refit + ROUNDING[dtype] * np.abs(b) + UNDERFLOW[dtype]
        difference = np.abs(a - b)
        difference[np.isnan(a) & np.isnan(b)] = 0
        worst = float(np.max(np.nan_to_num(difference / allowed, nan=np.inf)))
        scale = largest if largest > float(np.max(size)) / 1000 else float(np.max(size))
        relative = float(np.max(np.nan_to_num(difference, nan=np.inf))) / (scale or 1.0)
        errors.append(Error(out.name, relative, worst, dtype))
    return errors
