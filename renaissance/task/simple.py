"""SimpleTask: graphs of ops written by hand, for experiments and tests.

    task = SimpleTask()
    x = task.alloc(Shape.of(4, 8), DType.FP32, Region.I_A_DATA, name="x")
    ...
    task.finalize_memory()
    task.add_graph("forward", [op("FC_FWD", (x, w, b), (y,), activation="relu")])
    task.compile()
    task.transfer(Tensor.from_numpy(values), x)
    task.run("forward")
    task.fetch(y)

Phases: tensors are declared in PLANNING, graphs in MEMORY_LOCKED (their shapes are checked against the tensors), and
COMPILED runs them. Ops, kernels, memory layout, capture and checks are those of compiled models; what the compiler
would do, choose ops, regions and an order, is the user's. Nothing is allocated when a graph runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.enums import OptimizerKind, Phase, StreamKind
from renaissance.core.errors import GraphError, MemoryPlanError, ValueRejected
from renaissance.core.phase import PhaseMachine
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph import ComputationGraph, GraphId, MemoryPlan, Node
from renaissance.graph.computation_graph import AttrValue
from renaissance.graph.memory_checks import verify_plan
from renaissance.graph.memory_plan import PlanGates
from renaissance.graph.ops import op_def
from renaissance.graph.ordering import first_conflict, ordered
from renaissance.graph.text import graph_text
from renaissance.graph.verify import verify_alone
from renaissance.task.gpu import GpuChoice, backend_or_gpu, chosen_gpu
from renaissance.task.options import instance, whole
from renaissance.task.simple_run import GpuRun, HostRun, SimpleRun
from renaissance.tensor import DTensor, InitConfig, Initializer, Tensor, fill_parameter

SCALAR_REGIONS = {
    DType.FP32: Region.S_SCALAR_FP32,
    DType.INT32: Region.S_SCALAR_INT32,
    DType.INT8: Region.S_SCALAR_INT8,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a hand-built graph, as the op table (``graph.ops``) declares it; tensors by the ids of ``alloc``."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spans_in: tuple[Span, ...] = ()
    spans_out: tuple[Span, ...] = ()
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)


def op(
    name: str,
    inputs: Sequence[int] = (),
    outputs: Sequence[int] = (),
    *,
    spans_in: Sequence[Span] = (),
    spans_out: Sequence[Span] = (),
    **attrs: AttrValue,
) -> Op:
    """``op("FC_FWD", (x, w), (y,), activation="relu")``. Raises MissingKernelError for an unknown op."""
    op_def(name)
    return Op(name, tuple(inputs), tuple(outputs), tuple(spans_in), tuple(spans_out), attrs)


class SimpleTask:
    """Tensors and graphs of one's own. Use it from one thread at a time."""

    def __init__(
        self,
        *,
        backend: str | None = None,
        threads: int | None = None,
        gpu: int | GpuChoice | None = None,
        half: DType | None = None,
        optimizer: OptimizerKind = OptimizerKind.ADAMW,
    ) -> None:
        """``backend`` and ``threads`` as those of a DeepLearningTask (default: cpu where it runs, one thread). ``gpu``:
        the index of one to run on, instead of the CPU.

        ``half`` is the element type of the 16-bit regions (BF16 or FP16; None: they are closed), ``optimizer`` opens
        the regions of its moments. Raises ValueRejected and DeviceError.
        """
        if threads is not None:
            whole("compute threads", threads, 1)
        instance("optimizer", optimizer, OptimizerKind, "an OptimizerKind")
        if half not in (None, DType.BF16, DType.FP16):
            raise ValueRejected(f"half is {half!r}; expected DType.BF16, DType.FP16 or None")
        self._gpu = chosen_gpu("SimpleTask", gpu)
        self.backend = backend_or_gpu("SimpleTask", backend, threads, self._gpu)
        self._threads, self._half = threads or 1, half
        self._phase = PhaseMachine()
        self._plan = MemoryPlan(PlanGates(half=half, optimizer=optimizer, has_ema=True), name="simple task")
        self._names: set[str] = set()
        self._graphs: dict[str, tuple[Node, ...]] = {}
        self._initializer = Initializer()
        # Set by compile().
        self._run: SimpleRun
        self._apart: set[tuple[str, str]] = set()

    @property
    def phase(self) -> Phase:
        return self._phase.phase

    # -- PLANNING -----------------------------------------------------------------------------------------------

    def alloc(
        self, shape: Shape, dtype: DType, region: Region, *, name: str | None = None, init: InitConfig | None = None
    ) -> int:
        """Declare a tensor; returns its id. ``init``: how it starts (default: by region, as ``Initializer`` says).

        Raises PhaseError after finalize_memory(), MemoryPlanError for a closed region or one of another element type,
        ValueRejected for a name that is taken.
        """
        self._phase.require("alloc", Phase.PLANNING)
        name = f"t{len(self._plan.tensors)}" if name is None else name
        if name in self._names:
            raise ValueRejected(f"alloc: there is a tensor {name!r} already; give another name")
        tensor = self._plan.alloc(name, shape, dtype, region, init=init)
        self._names.add(name)
        return tensor

    def alloc_scalar(self, dtype: DType = DType.FP32, *, name: str | None = None) -> int:
        """Declare a step scalar (learning rate, flag, number of valid rows); it starts as 0."""
        if dtype not in SCALAR_REGIONS:
            raise ValueRejected(
                f"alloc_scalar: {dtype!r}; expected one of: {', '.join(d.name for d in SCALAR_REGIONS)}"
            )
        return self.alloc(Shape(), dtype, SCALAR_REGIONS[dtype], name=name)

    def finalize_memory(self) -> Self:
        """Give every tensor its place. Raises MemoryPlanError, also where regions that an op walks through together
        (weights, gradients, moments) do not hold the same tensors in the same order."""
        self._phase.require("finalize_memory", Phase.PLANNING)
        if not self._plan.tensors:
            raise MemoryPlanError("finalize_memory: there are no tensors; call alloc() first")
        self._plan.finalize()
        verify_plan(self._plan)
        self._phase.advance("finalize_memory", Phase.MEMORY_LOCKED)
        return self

    # -- MEMORY_LOCKED ------------------------------------------------------------------------------------------

    def initializer(self, policy: Initializer) -> Self:
        """How tensors without an ``init`` of their own start."""
        instance("initializer", policy, Initializer, "an Initializer()")
        if self.phase is Phase.COMPILED:
            self._phase.require("initializer", Phase.MEMORY_LOCKED)
        self._initializer = policy
        return self

    def add_graph(self, name: str, ops: Sequence[Op], stream: StreamKind = StreamKind.COMP_1) -> Self:
        """A graph of ``ops`` in launch order. Values may come from outside: written by transfer() or another graph.

        ``stream``: of ops that have none of their own. Raises PhaseError outside MEMORY_LOCKED, and GraphError,
        ShapeError or DTypeError that name the node when tensors, attributes or types do not fit the op table.
        """
        self._phase.require("add_graph", Phase.MEMORY_LOCKED)
        if name in self._graphs:
            raise ValueRejected(f"add_graph: there is a graph {name!r} already; give another name")
        start = sum(map(len, self._graphs.values()))
        nodes = []
        for index, one in enumerate(ops, start):
            instance(f"add_graph {name!r}: item {index - start}", one, Op, "an op(...)")
            for tensor in (*one.inputs, *one.outputs):
                self.tensor(tensor)
            own = op_def(one.name).stream
            nodes.append(
                Node(
                    index=index,
                    op=one.name,
                    attrs=dict(one.attrs),
                    inputs=one.inputs,
                    outputs=one.outputs,
                    spans_in=one.spans_in,
                    spans_out=one.spans_out,
                    graph=GraphId.SIMPLE_TASK_GRAPH,
                    stream=stream if own is None else own,
                )
            )
        program = ordered(nodes, self._plan)
        verify_alone(program, self._plan)
        self._graphs[name] = program
        return self

    def compile(self, *, seed: int = 0) -> Self:
        """Allocate, capture every graph, and let every tensor start as its ``init`` says.

        Raises GraphError without a graph, MissingKernelError for an op that the backend cannot run.
        """
        self._phase.require("compile", Phase.MEMORY_LOCKED)
        if not self._graphs:
            raise GraphError("compile: there are no graphs; call add_graph() first")
        if self._gpu is not None:
            self._run = GpuRun(self._plan, self._graphs, self._gpu, self._half)
        else:
            self._run = HostRun(self._plan, self._graphs, self.backend, self._threads, self._half)
        self._phase.advance("compile", Phase.COMPILED)
        self.init_all(seed)
        return self

    # -- COMPILED -----------------------------------------------------------------------------------------------

    def run(self, first: str, second: str | None = None) -> None:
        """Run a graph once, or two that have nothing to do with each other.

        Raises ValueRejected for an unknown graph, and GraphError when one writes what the other touches: their order
        would decide the result, and it is not theirs to choose.
        """
        self.run_iter(first, second, times=1)

    def run_iter(self, first: str, second: str | None = None, *, times: int) -> None:
        """``run`` as many ``times`` as wanted."""
        self._phase.require("run", Phase.COMPILED)
        whole("run_iter: times", times, 0)
        names = [first] if second is None else [first, second]
        for name in names:
            self._known(name)
        if second is not None:
            self._check_apart(first, second)
        for _ in range(times):
            for name in names:
                self._run.launch(name)

    def run_uncaptured(self, name: str) -> None:
        """The same graph node by node, without its captured program. For tests and debugging."""
        self._phase.require("run_uncaptured", Phase.COMPILED)
        self._known(name)
        self._run.launch_uncaptured(name)

    def transfer(self, tensor: Tensor, target: int) -> None:
        """Write a host tensor of the same shape and element type (ValueRejected)."""
        self._phase.require("transfer", Phase.COMPILED)
        descriptor = self.tensor(target)
        if (tensor.shape, tensor.dtype) != (descriptor.shape, descriptor.dtype):
            raise ValueRejected(
                f"transfer to {descriptor.name!r}: expected {descriptor.shape} {descriptor.dtype.name}, given "
                f"{tensor.shape} {tensor.dtype.name}"
            )
        self._run.write(target, tensor.numpy())

    def fetch(self, source: int) -> Tensor:
        """A host copy of a tensor."""
        self._phase.require("fetch", Phase.COMPILED)
        descriptor = self.tensor(source)
        return Tensor.from_numpy(self._run.read(source), descriptor.dtype)

    def fill(self, target: int, value: float) -> None:
        """Write one value into all elements."""
        self._phase.require("fill", Phase.COMPILED)
        if self.tensor(target).dtype in (DType.INT32, DType.INT8) and value != int(value):
            raise ValueRejected(f"fill {self.tensor(target).name!r}: {value}; expected a whole number")
        self._write(target, np.full(self.tensor(target).shape.dims, value, np.float64))

    def init(self, target: int, config: InitConfig | None = None, *, seed: int = 0) -> None:
        """Let a tensor start again as ``config``, or its own ``init``, says. Its id chooses the random numbers."""
        self._phase.require("init", Phase.COMPILED)
        tensor = self.tensor(target)
        config = config or tensor.init or self._initializer.config_for(tensor.region)
        self._write(target, fill_parameter(config, tensor.shape, seed, tensor.id))

    def init_all(self, seed: int = 0) -> None:
        """Let every tensor start again."""
        for tensor in self._plan.tensors:
            self.init(tensor.id, seed=seed)

    # -- queries ------------------------------------------------------------------------------------------------

    def tensor(self, tensor_id: int) -> DTensor:
        """The descriptor of a tensor. Raises ValueRejected for an id that alloc() did not give."""
        if isinstance(tensor_id, bool) or not isinstance(tensor_id, int):
            raise ValueRejected(f"tensor {tensor_id!r}; expected an id that alloc() gave")
        try:
            return self._plan.tensor(tensor_id)
        except MemoryPlanError as error:
            raise ValueRejected(f"unknown tensor: {error}") from None

    def memory_text(self) -> str:
        """The memory plan as stable text. Raises PhaseError before finalize_memory()."""
        return self._plan.dump_layout()

    def graph_text(self, name: str) -> str:
        """A graph as stable text: ops, tensors, and the edges that keep its order."""
        self._known(name)
        return graph_text(ComputationGraph(name, self._graphs[name]), self._plan)

    # -- pieces -------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> None:
        if name not in self._graphs:
            known = ", ".join(self._graphs) or "none"
            raise ValueRejected(f"unknown graph {name!r}; this task has: {known}")

    def _check_apart(self, first: str, second: str) -> None:
        if (first, second) in self._apart:
            return
        conflict = first_conflict(self._graphs[first], self._graphs[second], self._plan)
        if first == second or conflict is not None:
            what = (
                "are one graph"
                if conflict is None
                else f"touch the same bytes in {conflict[0].label} and {conflict[1].label}"
            )
            raise GraphError(f"run({first!r}, {second!r}): they {what}, and one writes; run them one after the other")
        self._apart.add((first, second))

    def _write(self, target: int, values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> None:
        is_bf16 = self.tensor(target).dtype is DType.BF16
        self._run.write(target, bf16_from_fp32(values.astype(np.float32)) if is_bf16 else values)
