"""Convolutions by cuDNN, through NVIDIA's cuDNN frontend (1.18 up to 1.28, whose differences end in this file).

A plan is the first in the order of cuDNN's heuristics (mode A, then the fallbacks) that keeps the rules of ``NEVER``,
so it is the same in every run with the same library on the same device; a ``PlanFolder`` keeps it for later runs. Or it
is the fastest of the first few of these, measured (``tuning``).
Tensors are compact NHWC, which cuDNN calls dimensions N, C, H, W with a stride of 1 for C.

A result has the type of the operands: cuDNN takes a float32 result from 16-bit operands for few shapes on few devices
(of the weight's direction hardly any), so a launcher that wants float32 gets 16 bits in scratch and casts.

Proved without a GPU (tests/cuda_host): plans of every convolution of the zoo, how they are kept, and that a plan takes
its addresses. Not proved without one (tests/gpu): execution, capture, the numbers, and that a plan which was read
computes the bits of the one that was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import ConvolutionSpec
from renaissance.backend.cuda.plans import PlanFolder, StoredPlan, library_error, plans_digest, refuse_capture
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.cuda.tuning import PlanChoices, Question
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, DTypeError, ShapeError

NEEDED_FIRST = ("cudart", "nvrtc", "cublasLt", "cublas")
"""Libraries that cuDNN opens by name and finds only when they are loaded already."""
FIRST, SECOND, OUT = 1, 2, 3
"""Numbers of the tensors of a plan, by which addresses are given to it."""
NEVER = (
    "NONDETERMINISTIC",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""Numerical notes of engines that are never used: sums in an order that varies or in less than float32, and transforms
whose rounding errors exceed those of a plain sum. Of cuDNN 9.28 they rule out, among others, engines 20 (weights) and
25 (data), which cuDNN marks as nondeterministic."""
ONLY_WITH_TF32 = "TENSOR_CORE"
"""Note of engines that round float32 operands to TF32: there is no other way to use tensor cores for them. PyTorch
switches TF32 off by the same note."""
DATA_TYPES = {DType.FP32: "FLOAT", DType.FP16: "HALF", DType.BF16: "BFLOAT16"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where plans are for. ``name``: what tells devices apart in a stored plan's key, e.g. "NVIDIA H200 sm_90, 132 SMs"
    (a name is sold with different numbers of multiprocessors). ``properties``: a device descriptor of cuDNN as JSON,
    for planning without a GPU; None for the current device."""

    name: str
    properties: str | None = None


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    """An engine with its settings for one convolution."""

    spec: ConvolutionSpec
    name: str
    workspace: int
    graph: Any
    handles: dict[int, Any]
    failures: tuple[type[Exception], ...]

    def execute(self, stream: int, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        """Put the convolution on ``stream``, which must be one of those that were opened. Raises DeviceError for a
        buffer that does not fit and when cuDNN fails."""
        if stream not in self.handles:
            raise DeviceError(f"{self.spec}: stream {stream:#x} was not given to open()")
        for given, (name, need) in zip((first, second, out), operand_bytes(self.spec), strict=True):
            if given.nbytes < need:
                raise DeviceError(f"{self.spec}: {name} has {given.nbytes} bytes; expected {need}")
        if workspace.nbytes < self.workspace:
            raise DeviceError(f"{self.spec}: {workspace.nbytes} bytes of workspace; expected {self.workspace}")
        addresses = {FIRST: first.ptr, SECOND: second.ptr, OUT: out.ptr}
        try:
            self.graph.execute(addresses, workspace.ptr, handle=self.handles[stream])
        except self.failures as error:
            raise DeviceError(f"cuDNN failed on {self.spec} ({self.name}): {first_line(error)}") from error


class CudnnConvolutions:
    """``Convolutions`` on cuDNN, one handle for each stream. Deterministic. ``tf32`` lets float32 operands be rounded
    to TF32 for the tensor cores; sums are float32 always.

    ``open`` before the first plan and outside a capture; ``close`` at the end, before the streams are destroyed.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        target: Target,
        *,
        tf32: bool = False,
        workspace: int = 1 << 30,
        folder: PlanFolder | None = None,
        choices: PlanChoices | None = None,
    ) -> None:
        """``workspace``: most bytes a plan may ask for. ``folder``: where plans are kept; without one they are made
        anew in every run. ``choices`` measures plans instead of taking the first. Raises DeviceError without cuDNN or
        its frontend."""
        self._cudnn = load()
        self._failures = (RuntimeError, self._cudnn.cudnnGraphNotSupportedError)
        self._runtime, self._target, self._tf32, self._cap, self._folder = runtime, target, tf32, workspace, folder
        self._choices = choices
        self._handles: dict[int, Any] = {}
        self._plans: dict[ConvolutionSpec, CudnnPlan] = {}
        self._versions = {
            "cudnn": str(self._cudnn.backend_version_string()),
            "cudnn_frontend": str(self._cudnn.__version__),
        }

    def open(self, streams: Sequence[int]) -> None:
        """Create a handle on the current device for each stream on which plans will be executed."""
        self.close()
        refuse_capture(self._runtime, streams, "a cuDNN handle")
        try:
            for stream in streams:
                self._handles[stream] = self._cudnn.create_handle()
                self._cudnn.set_stream(handle=self._handles[stream], stream=stream)
        except self._failures as error:
            raise DeviceError(f"cuDNN cannot be opened on {self._target.name}: {first_line(error)}") from error

    def close(self) -> None:
        """Forget the plans and destroy the handles. May be called again."""
        self._plans.clear()
        while self._handles:
            self._cudnn.destroy_handle(self._handles.popitem()[1])

    def plan(self, spec: ConvolutionSpec) -> CudnnPlan:
        """The plan of ``spec``, made, read or chosen the first time. Raises DTypeError for a type without
        convolutions, ShapeError for sizes that make none, and DeviceError when cuDNN has no plan within the rules and
        the workspace, before ``open`` and during a capture."""
        if spec not in self._plans:
            check(spec)
            if self._target.properties is None and not self._handles:
                raise DeviceError(f"a plan for {spec} before the convolutions were opened; call open() first")
            refuse_capture(self._runtime, tuple(self._handles), f"a cuDNN plan for {spec}")
            if self._choices is None:
                self._plans[spec] = self._read(spec) or self._kept(spec, next(self._offers(spec)))
            else:
                self._plans[spec] = self._tuned(spec, self._choices)
        return self._plans[spec]

    def facts(self) -> dict[str, str]:
        """Versions, whether TF32 is allowed, and a digest of the plans in use."""
        plans = plans_digest({spec: plan.name for spec, plan in self._plans.items()})
        return self._versions | {"convolutions_tf32": str(self._tf32), "convolutions_plans": plans}

    def key(self, spec: ConvolutionSpec, name: str = "") -> dict[str, Any]:
        """What a stored plan is filed under: the first that the heuristics offer, or the one of this name."""
        sizes = {name: getattr(value, "name", value) for name, value in asdict(spec).items()}
        options = {"target": self._target.name, "tf32": self._tf32, "workspace": self._cap}
        return self._versions | options | {"convolution": sizes} | ({"plan": name} if name else {})

    def _place(self) -> dict[str, Any]:
        """What a graph is made for: the first handle, or a described device."""
        if self._target.properties is None:
            return {"handle": next(iter(self._handles.values()))}
        return {"device_property": self._cudnn.create_device_properties(self._target.properties)}

    def _read(self, spec: ConvolutionSpec, name: str = "") -> CudnnPlan | None:
        """The stored plan, if there is one and cuDNN takes it."""
        stored = self._folder.load(self.key(spec, name)) if self._folder is not None else None
        if stored is None:
            return None
        place = self._place()
        graph = self._cudnn.pygraph(**place)
        try:
            graph.deserialize(*([place["handle"]] if "handle" in place else []), list(stored.blob))
            workspace = int(graph.get_workspace_size())
        except self._failures:  # of another build of the library: made anew
            return None
        if workspace != stored.workspace:
            return None
        return CudnnPlan(spec, stored.name, workspace, graph, self._handles, self._failures)

    def _tuned(self, spec: ConvolutionSpec, choices: PlanChoices) -> CudnnPlan:
        """The plan that is chosen by measurement."""
        options = f"TF32 {'on' if self._tf32 else 'off'}, cuDNN {self._versions['cudnn']}"
        question = Question(
            f"{spec_text(spec)} | {self._target.name}, {options}, frontend {self._versions['cudnn_frontend']}",
            tuple(size for _, size in operand_bytes(spec)),
            lambda: self._offers(spec),
            lambda name: self._read(spec, name) or next(self._offers(spec, name), None),
        )
        plan = choices.of(question, self._runtime, next(iter(self._handles)))
        if self._folder is None or self._folder.load(self.key(spec, plan.name)) is not None:
            return plan
        return self._kept(spec, plan, plan.name)

    def _offers(self, spec: ConvolutionSpec, name: str = "") -> Iterator[CudnnPlan]:
        """Plans within the rules, in the order of the heuristics, or the one of this name. Each is built when it is
        asked for, on a graph of its own: a graph executes the plan that it has built last.

        Raises DeviceError when there is none, unless a name was given.
        """
        graph, seen, failed = self._graph(spec), set[str](), ""
        count = graph.get_execution_plan_count()
        for index in range(count):
            graph = self._graph(spec) if graph is None else graph
            given = graph.get_plan_name_at_index(index)
            if given in seen or (name and given != name):
                continue
            try:
                graph.build_plan_at_index(index)
            except self._cudnn.cudnnGraphNotSupportedError:
                continue  # ruled out by a note, or it cannot do this one after all
            except RuntimeError as error:  # an engine that fails leaves the next one
                failed = failed or f"; one failed: {first_line(error)}"
                continue
            workspace = int(graph.get_workspace_size_plan_at_index(index))
            if workspace <= self._cap:
                seen.add(given)
                yield CudnnPlan(spec, given, workspace, graph, self._handles, self._failures)
                graph = None
        if not seen and not name:
            raise self._no_plan(spec, f"none of {count} plans is deterministic and small enough{failed}")

    def _graph(self, spec: ConvolutionSpec) -> Any:
        """A graph whose plans that the rules forbid cannot be built; none is built yet."""
        notes = [*NEVER, *([ONLY_WITH_TF32] if spec.dtype is DType.FP32 and not self._tf32 else [])]
        try:
            graph = self._planned(spec)
            graph.deselect_numeric_notes([getattr(self._cudnn.numerical_note, note) for note in notes])
        except self._failures as error:
            raise self._no_plan(spec, first_line(error)) from error
        return graph

    def _no_plan(self, spec: ConvolutionSpec, reason: str) -> DeviceError:
        rules = f"{'with' if self._tf32 else 'without'} TF32 and at most {self._cap} bytes of workspace"
        return DeviceError(f"cuDNN has no plan on {self._target.name} for {spec} {rules}: {reason}")

    def _kept(self, spec: ConvolutionSpec, plan: CudnnPlan, name: str = "") -> CudnnPlan:
        """The plan, after it was written for later runs."""
        if self._folder is not None:
            stored = StoredPlan(plan.name, plan.workspace, bytes(plan.graph.serialize()))
            self._folder.keep(self.key(spec, name), stored)
        return plan

    def _planned(self, spec: ConvolutionSpec) -> Any:
        """A graph of one convolution with the plans that cuDNN's heuristics offer, best first, none of them built."""
        cudnn = self._cudnn
        kind, single = getattr(cudnn.data_type, DATA_TYPES[spec.dtype]), cudnn.data_type.FLOAT
        types = {"io_data_type": kind, "intermediate_data_type": single, "compute_data_type": single}
        graph = cudnn.pygraph(**types, **self._place())
        first, second, out = (dims for _, dims in operands(spec))
        a = graph.tensor(name="first", dim=first, stride=nhwc_strides(first), data_type=kind, uid=FIRST)
        b = graph.tensor(name="second", dim=second, stride=nhwc_strides(second), data_type=kind, uid=SECOND)
        window = {"padding": [spec.pad] * 2, "stride": [spec.stride] * 2, "dilation": [1, 1]}
        match spec.direction:
            case Direction.FORWARD:
                result = graph.conv_fprop(image=a, weight=b, **window)
            case Direction.DATA:
                result = graph.conv_dgrad(loss=a, filter=b, **window)
            case Direction.WEIGHT:
                result = graph.conv_wgrad(loss=a, image=b, **window)
        result.set_output(True).set_dim(out).set_stride(nhwc_strides(out)).set_data_type(kind).set_uid(OUT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph


def operands(spec: ConvolutionSpec) -> list[tuple[str, list[int]]]:
    """Names and dimensions N, C, H, W of the first and second operand and the result."""
    x = ("x", [spec.n, spec.c, spec.h, spec.w])
    w = ("w", [spec.k, spec.c // spec.groups, spec.r, spec.s])
    y = ("y", [spec.n, spec.k, spec.out_h, spec.out_w])
    match spec.direction:
        case Direction.FORWARD:
            return [x, w, y]
        case Direction.DATA:
            return [y, w, x]
        case Direction.WEIGHT:
            return [y, x, w]


def operand_bytes(spec: ConvolutionSpec) -> list[tuple[str, int]]:
    """Names and sizes in bytes of the first and second operand and the result."""
    return [(name, n * c * h * w * spec.dtype.itemsize) for name, (n, c, h, w) in operands(spec)]


def spec_text(spec: ConvolutionSpec) -> str:
    """A convolution in a line, for people."""
    image, kernel = f"{spec.n}x{spec.h}x{spec.w}x{spec.c}", f"{spec.k}x{spec.r}x{spec.s}"
    window = f"stride {spec.stride} pad {spec.pad} groups {spec.groups}"
    return f"convolution {spec.direction.name.lower()} {image} by {kernel} {window} {spec.dtype.name.lower()}"


def nhwc_strides(dims: Sequence[int]) -> list[int]:
    """Strides of dimensions N, C, H, W that lie in memory as N, H, W, C without gaps."""
    _, c, h, w = dims
    return [c * h * w, 1, w * c, c]


def check(spec: ConvolutionSpec) -> None:
    """Raises DTypeError and ShapeError for what no plan can be made for."""
    if spec.dtype not in DATA_TYPES:
        raise DTypeError(f"{spec}: operands of {spec.dtype.name}; expected FP32, FP16 or BF16")
    sizes = (spec.n, spec.h, spec.w, spec.c, spec.k, spec.r, spec.s, spec.stride, spec.groups, spec.out_h, spec.out_w)
    if min(sizes) < 1 or spec.pad < 0 or spec.c % spec.groups or spec.k % spec.groups:
        raise ShapeError(f"{spec}: sizes must be positive and channels divisible by the groups")


def first_line(error: Exception) -> str:
    """Of an error of cuDNN's, which says which engines refused and why over hundreds of lines."""
    return str(error).partition("\n")[0][:200] or type(error).__name__


def load() -> Any:
    """The module ``cudnn`` of the frontend, with the libraries that cuDNN needs. Raises DeviceError without them."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        paths = {name: load_nvidia_dynamic_lib(name).abs_path for name in NEEDED_FIRST}
        # Where CUDA 12 and 13 are installed, the frontend would choose one by itself (and an older one refuses).
        os.environ.setdefault("CUDNN_FRONTEND_CUDART_LIB_NAME", str(paths["cudart"]))
        import cudnn
    except (ImportError, OSError, RuntimeError) as error:
        raise library_error("cuDNN", error) from error
    return cudnn
