"""The cuBLASLt binding without a GPU: constants and structures are the header's, the library takes the descriptors, and
what it refuses is said in words."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from renaissance.backend.cuda import cublaslt as lt
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import ProductSpec
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.cuda.tuning import PlanChoices, Question
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, DTypeError, ValueRejected

SPEC = ProductSpec(64, 10, 784, False, True, DType.FP16, DType.FP32)
"""A dense layer: 64 samples of 784 numbers to 10 classes."""


def headers() -> Path:
    """The folder of cublasLt.h."""
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="no cuda-pathfinder")
    folder = pathfinder.find_nvidia_header_directory("cublas")
    if folder is None:
        pytest.skip("no cublasLt.h (nvidia-cublas-cu12)")
    return Path(folder)


@pytest.fixture(scope="module")
def library() -> lt.Library:
    headers()
    return lt.Library()


def constants(text: str) -> dict[str, int]:
    """NAME = number of every enumerator."""
    return {
        name: int(value, 0) for name, value in re.findall(r"\b([A-Z][A-Za-z0-9_]+)\s*=\s*(0x[0-9a-f]+|\d+)\b", text)
    }


def test_constants_are_those_of_the_headers() -> None:
    folder = headers()
    pathfinder = pytest.importorskip("cuda.pathfinder")
    types = Path(pathfinder.find_nvidia_header_directory("cudart")) / "library_types.h"
    found = constants(
        "".join((folder / name).read_text() for name in ("cublasLt.h", "cublas_api.h")) + types.read_text()
    )
    expected = {
        "CUDA_R_32F": lt.CUDA_TYPES[DType.FP32],
        "CUDA_R_16F": lt.CUDA_TYPES[DType.FP16],
        "CUDA_R_16BF": lt.CUDA_TYPES[DType.BF16],
        "CUBLAS_COMPUTE_32F": lt.COMPUTE_32F,
        "CUBLAS_COMPUTE_32F_FAST_TF32": lt.COMPUTE_32F_FAST_TF32,
        "CUBLAS_OP_N": lt.OP_N,
        "CUBLAS_OP_T": lt.OP_T,
        "CUBLASLT_MATMUL_DESC_TRANSA": lt.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_TRANSB": lt.DESC_TRANSB,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": lt.PREF_MAX_WORKSPACE_BYTES,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": lt.PREF_REDUCTION_SCHEME_MASK,
        "CUBLASLT_REDUCTION_SCHEME_NONE": lt.REDUCTION_SCHEME_NONE,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": lt.REDUCTION_SCHEME_COMPUTE_TYPE,
    }
    expected |= {f"CUBLASLT_ALGO_CONFIG_{name}": number for name, (number, _) in lt.ALGO_ATTRIBUTES.items()}
    for operand, number in zip("ABCD", lt.PREF_MIN_ALIGNMENTS, strict=True):
        expected[f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{operand}_BYTES"] = number
    assert {name: found.get(name) for name in expected} == expected
    # Sums in place, or from parts in the type of the result, are ruled out.
    mask = found["CUBLASLT_REDUCTION_SCHEME_INPLACE"] | found["CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE"]
    assert not lt.DETERMINISTIC & mask


def test_structures_and_signatures_are_those_of_the_header() -> None:
    text = (headers() / "cublasLt.h").read_text()
    assert ctypes.sizeof(lt.Algo) == 64
    assert ctypes.sizeof(lt.HeuristicResult) == 96
    result = re.search(r"typedef struct \{((?:(?!typedef).)*)\} cublasLtMatmulHeuristicResult_t;", text, re.S)
    assert result is not None
    fields = re.findall(r"^  [\w ]+ (\w+)(?:\[\d+\])?;", result.group(1), re.M)
    assert fields == [field[0] for field in lt.HeuristicResult._fields_]
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    kinds = {"size_t": ctypes.c_size_t, "uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "int": ctypes.c_int}
    handles = ("cublasLtHandle_t", "cublasLtMatmulDesc_t", "cublasLtMatrixLayout_t", "cublasLtMatmulPreference_t")
    for name, given in lt.SIGNATURES.items():
        declared = re.search(rf"cublasStatus_t CUBLASWINAPI {name}\(([^)]*)\)", plain)
        assert declared is not None, name
        arguments = []
        for argument in declared.group(1).split(","):
            words = argument.replace("const ", "").split()
            points = "*" in argument or "[]" in argument or words[0] in (*handles, "cudaStream_t")
            arguments.append(ctypes.c_void_p if points else kinds.get(words[0], ctypes.c_int))
        assert tuple(arguments) == given, name


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_the_library_takes_the_description_of_every_product(library: lt.Library, ta: bool, tb: bool) -> None:
    for dtype, result in ((DType.FP32,) * 2, (DType.FP16,) * 2, (DType.FP16, DType.FP32), (DType.BF16, DType.FP32)):
        spec = ProductSpec(10, 7, 13, ta, tb, dtype, result)
        operation = lt.Operation(library, spec, tf32=True, workspace=1 << 20)
        # Column-major with the library's A our B: rows of C' = B' A' and what lies between its columns.
        assert read_layout(library, operation.layouts["C"]) == (lt.CUDA_TYPES[result], 7, 10, 7)
        assert read_layout(library, operation.layouts["A"]) == (
            lt.CUDA_TYPES[dtype],
            *((10, 13) if ta else (13, 10)),
            10 if ta else 13,
        )
        assert read_layout(library, operation.layouts["B"]) == (
            lt.CUDA_TYPES[dtype],
            *((13, 7) if tb else (7, 13)),
            13 if tb else 7,
        )
        assert [read(library, "MatmulDesc", operation.description, n, ctypes.c_int32) for n in (3, 4)] == [
            int(tb),
            int(ta),
        ]
        compute = read(library, "MatmulDesc", operation.description, 0, ctypes.c_int32)
        assert compute == (lt.COMPUTE_32F_FAST_TF32 if dtype is DType.FP32 else lt.COMPUTE_32F)
        assert read(library, "MatmulPreference", operation.preference, 1, ctypes.c_uint64) == 1 << 20
        assert read(library, "MatmulPreference", operation.preference, 3, ctypes.c_uint32) == lt.DETERMINISTIC
        operation.destroy()


def read(library: lt.Library, what: str, target: ctypes.c_void_p, attribute: int, kind: type[Any]) -> int:
    """An attribute of an object of the library's."""
    function = getattr(library._library, f"cublasLt{what}GetAttribute")
    value, written = kind(), ctypes.c_size_t()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    assert function(target, attribute, ctypes.byref(value), size, ctypes.byref(written)) == 0
    assert written.value == size.value
    return int(value.value)


def read_layout(library: lt.Library, layout: ctypes.c_void_p) -> tuple[int, int, int, int]:
    """Type, rows, columns and leading dimension."""
    kinds = (ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
    return tuple(read(library, "MatrixLayout", layout, n, kind) for n, kind in zip((0, 2, 3, 4), kinds, strict=True))  # type: ignore[return-value]


def test_alignments_are_what_every_row_keeps(library: lt.Library) -> None:
    for spec, expected in (
        (SPEC, {"A": 32, "B": 32, "C": 8}),
        (ProductSpec(64, 1000, 2048, False, True, DType.FP32, DType.FP32), {"A": 256, "B": 256, "C": 32}),
        (ProductSpec(10, 7, 13, True, False, DType.FP16, DType.FP32), {"A": 4, "B": 2, "C": 4}),
    ):
        operation = lt.Operation(library, spec, tf32=False, workspace=0)
        assert operation.alignments == expected
        for attribute, name in zip(lt.PREF_MIN_ALIGNMENTS, "BACC", strict=True):
            value = read(library, "MatmulPreference", operation.preference, attribute, ctypes.c_uint32)
            assert value == expected[name]
        operation.destroy()


def test_an_algorithm_is_named_after_its_settings(library: lt.Library) -> None:
    algo = lt.Algo()
    write = library._library.cublasLtMatmulAlgoConfigSetAttribute
    settings = dict(zip(lt.ALGO_ATTRIBUTES, (0, 20, 3, 2, 1, 4, 11, 2, 5), strict=True))
    for name, value in list(settings.items())[1:]:
        number, kind = lt.ALGO_ATTRIBUTES[name]
        packed = kind(value)
        size = ctypes.c_size_t(ctypes.sizeof(packed))
        assert write(ctypes.byref(algo), number, ctypes.byref(packed), size) == 0, name
    assert lt.algo_settings(library, algo) == settings


def test_a_status_is_said_in_words(library: lt.Library) -> None:
    assert int(library.version) >= 120800
    made, value = library.made("cublasLtMatmulPreferenceCreate"), ctypes.c_uint64(1)
    with pytest.raises(DeviceError, match="cublasLtMatmulPreferenceSetAttribute: an unsupported value or parameter"):
        library.call("cublasLtMatmulPreferenceSetAttribute", made, 1, ctypes.byref(value), 3)
    library.call("cublasLtMatmulPreferenceDestroy", made)
    assert "not supported" in library.words(15)


class FakeLibrary(lt.Library):
    """The library's calls, recorded. Heuristics offer ``offered``; every algorithm's settings are its first words."""

    def __init__(self, offered: list[tuple[int, int]]) -> None:
        self.offered, self.calls = offered, list[tuple[Any, ...]]()
        self.status = 0
        self.matmul = self._matmul

    @property
    def version(self) -> str:
        return "120903"

    def words(self, status: int) -> str:
        return f"words of {status}"

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == "cublasLtMatmulAlgoGetHeuristic":
            results, returned = arguments[-2]._obj, arguments[-1]._obj
            for result, (scheme, state) in zip(results, self.offered, strict=False):
                result.algo.data[3], result.state, result.workspaceSize = scheme, state, 4096
            returned.value = len(self.offered)
        if name == "cublasLtMatmulAlgoConfigGetAttribute":
            arguments[2]._obj.value = arguments[0]._obj.data[arguments[1]] if arguments[1] < 8 else 0

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        self.calls.append((name, *arguments))
        return ctypes.c_void_p(len(self.calls))

    def _matmul(self, *arguments: Any) -> int:
        self.calls.append(("cublasLtMatmul", *arguments))
        return self.status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary([(1, 0), (2, 15), (2, 0), (0, 0)])
    monkeypatch.setattr(lt, "Library", lambda: library)
    return library


def runtime(streams: set[int]) -> CudaRuntime:
    return cast(CudaRuntime, SimpleNamespace(streamIsCapturing=lambda stream: stream in streams))


@pytest.fixture
def products(fake: FakeLibrary) -> Iterator[lt.CublasLtProducts]:
    opened = lt.CublasLtProducts(runtime(set()))
    opened.open([11, 12])
    yield opened
    opened.close()


def test_a_product_is_one_call_with_operands_swapped(products: lt.CublasLtProducts, fake: FakeLibrary) -> None:
    plan = products.plan(SPEC)
    assert products.plan(SPEC) is plan
    assert plan.name == "algo0_0_0_2_0_0_0_0_0"  # the first that works and adds up in a fixed order
    assert plan.workspace == 4096
    before = len(fake.calls)
    plan.execute(12, Buffer(1024, 100352), Buffer(2048, 15680), Buffer(4096, 2560), Buffer(8192, 4096))
    (call,) = fake.calls[before:]
    name, handle, description, one, a, a_layout, b, b_layout, zero, c, c_layout, d, d_layout, algo, *rest = call
    assert (name, a, b, c, d, rest) == ("cublasLtMatmul", 2048, 1024, 4096, 4096, [8192, 4096, 12])
    assert (one._obj.value, zero._obj.value) == (1.0, 0.0)
    assert handle.value
    layouts = plan.operation.layouts
    assert (a_layout, b_layout, c_layout, d_layout) == (layouts["B"], layouts["A"], layouts["C"], layouts["C"])
    assert (description, algo._obj.data[3]) == (plan.operation.description, 2)


class Last(PlanChoices):
    """Chooses the plan that is offered last, or what a file holds."""

    def _measure(self, question: Question[Any], runtime: CudaRuntime, stream: int) -> Any:
        *_, plan = question.offers()
        self.asked = (question.key, question.sizes, stream)
        self._known[question.key] = {"plan": plan.name, "ms": {}}
        self._write()
        return plan


def test_a_measured_algorithm_is_one_within_the_rules(fake: FakeLibrary, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"

    def planned() -> str:
        choices = Last(file)
        opened = lt.CublasLtProducts(runtime(set()), target="NVIDIA H200 sm_90, 132 SMs", choices=choices)
        opened.open([11, 12])
        fake.calls.clear()
        try:
            return opened.plan(SPEC).name
        finally:
            opened.close()
            made = [call[0] for call in fake.calls if call[0].endswith("Create") and call[0] != "cublasLtCreate"]
            assert len(made) == 5
            destroyed = [call[0] for call in fake.calls if call[0].endswith("Destroy")]
            assert len(destroyed) == 5 + 1, "each once, and the handle"

    fake.offered = [(1, 0), (2, 0), (2, 0), (0, 0), (4, 0)]
    assert planned() == "algo0_0_0_0_0_0_0_0_0"
    assert planned() == "algo0_0_0_0_0_0_0_0_0", "as the file says"
    (key,) = json.loads(file.read_text())["plans"]
    assert key == "product A B^T 64x10x784 fp16 to fp32 | NVIDIA H200 sm_90, 132 SMs, TF32 off, cuBLASLt 120903"
    fake.offered = [(2, 0)]
    with pytest.raises(ValueRejected, match=r"the library offers no plan 'algo0_0_0_0_.*' for product A B\^T"):
        planned()


def test_buffers_that_do_not_fit_and_failures_are_named(products: lt.CublasLtProducts, fake: FakeLibrary) -> None:
    plan, room = products.plan(SPEC), Buffer(8192, 1 << 20)
    for wrong, text in (
        ((Buffer(8192, 100351), room, room, room), r"operand A is 100351 bytes at 0x2000; expected 100352"),
        ((room, Buffer(8200, 1 << 20), room, room), r"operand B is .* at 0x2008; expected 15680 at a multiple of 32"),
        ((room, room, Buffer(8192, 2559), room), "operand C is 2559 bytes"),
        ((room, room, room, Buffer(8192, 4095)), "4095 bytes of workspace; expected 4096"),
    ):
        with pytest.raises(DeviceError, match=text):
            plan.execute(11, *wrong)
    fake.status = 13
    with pytest.raises(DeviceError, match=r"cublasLtMatmul \(ProductSpec.*algo0_0_0_2.*words of 13"):
        plan.execute(11, room, room, room, room)


def test_plans_are_refused_by_name(fake: FakeLibrary) -> None:
    capturing: set[int] = set()
    products = lt.CublasLtProducts(runtime(capturing))
    with pytest.raises(DeviceError, match="before the products were opened"):
        products.plan(SPEC)
    products.open([11])
    with pytest.raises(DTypeError, match="operands of FP16, result of BF16; expected FP32, FP16 or BF16"):
        products.plan(ProductSpec(1, 1, 1, False, False, DType.FP16, DType.BF16))
    capturing.add(11)
    with pytest.raises(DeviceError, match=r"a cuBLASLt plan for ProductSpec.*while a stream is capturing"):
        products.plan(SPEC)
    with pytest.raises(DeviceError, match="a cuBLASLt handle was asked for while a stream is capturing"):
        lt.CublasLtProducts(runtime({7})).open([7])
    capturing.clear()
    fake.offered = [(1, 0), (4, 0)]
    with pytest.raises(DeviceError, match=r"no plan for ProductSpec.*2 algorithms, none of them deterministic"):
        products.plan(SPEC)


def test_facts_name_the_algorithms_whatever_their_order(fake: FakeLibrary) -> None:
    other = ProductSpec(8, 8, 8, False, False, DType.FP32, DType.FP32)
    facts = []
    for specs in ((SPEC, other), (other, SPEC), (SPEC,)):
        products = lt.CublasLtProducts(runtime(set()), tf32=True)
        products.open([11])
        for spec in specs:
            products.plan(spec)
        facts.append(products.facts())
    assert facts[0] == facts[1] != facts[2]
    assert facts[0] | {"products_plans": ""} == {"cublaslt": "120903", "products_tf32": "True", "products_plans": ""}


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(DeviceError, match=r"cuBLASLt cannot be loaded: .*; pip install 'renaissance\[cuda12\]'"):
        lt.Library()
