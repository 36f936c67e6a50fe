"""GraphExecutor: captures the programs of a compiled model and replays them.

At construction every program a run needs is captured once: a training program per (training variant, input slot), a
validation program per (validation variant, input slot), and the service programs. A program is the concatenation of its
graphs in launch order (``graph.ids.train_program``); a graph that is absent adds nothing. Variants and slots that
execute the same nodes on the same addresses share a capture. A step is then two stores and one ``launch``.

The executor writes nothing into tensors by itself: weights, moments and scalars start as zero bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.arena import MemoryArena
from renaissance.backend.capture import Binding, PythonQueue, SlotContext, WorkMemory
from renaissance.backend.registry import BACKENDS, Call, NativeCall, OpRegistry, PythonCall, default_registry
from renaissance.core.errors import DTypeError, ShapeError, ValueRejected
from renaissance.graph import CapturedGraph, CompiledModel, GraphId, Node, Variant, train_program, val_program
from renaissance.tensor.dtensor import DTensor

Memory = int | npt.NDArray[Any]
"""An address, or an array whose memory is used (and kept alive)."""
SERVICE = (GraphId.CLEAR_METRICS, GraphId.CAST_MAIN_FP32_TO_FP16, GraphId.VAL_RESULT_COMM)
"""Graphs launched alone, between steps."""


@dataclass(frozen=True, slots=True)
class InputArrays:
    """An input slot: images [N,H,W,C] of the model's input dtype (BF16 as uint16), labels int32 [N]."""

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int32]


class GraphExecutor:
    """Runs one compiled model. Use it from one thread at a time."""

    def __init__(
        self,
        model: CompiledModel,
        *,
        backend: str = "cpu",
        threads: int = 1,
        wait_policy: str | None = None,
        train_slots: Sequence[tuple[Memory, Memory]] | None = None,
        val_slots: Sequence[tuple[Memory, Memory]] | None = None,
        registry: OpRegistry | None = None,
    ) -> None:
        """``train_slots`` and ``val_slots`` hold (images, labels) per slot of the ring, even slots A, odd ones B; None
        makes two slots of its own (``own_train_slots``, ``own_val_slots``), [] captures nothing for that side.

        Raises MissingKernelError for an op the backend has no kernel for, ShapeError for a slot that is too small,
        DTypeError for one of another element type, DeviceError when the native library is missing.
        """
        if backend not in BACKENDS:
            raise ValueRejected(f"unknown backend {backend!r}; expected one of: {', '.join(BACKENDS)}")
        self.model, self.backend, self.threads = model, backend, threads
        self._registry = registry or default_registry(backend)
        self._registry.require(model.training.ops | model.inference.ops, backend)
        self.thread_plan = _prepare_threads(backend, threads, wait_policy)
        self.arena = MemoryArena(model.arena_bytes)
        self.own_train_slots: list[InputArrays] = []
        self.own_val_slots: list[InputArrays] = []
        self._scalars = {name: self.array(i).reshape(()) for name, i in model.scalars.items()}
        self._keep = [train_slots, val_slots]
        train = self._bind(train_slots, Variant.TRAIN_BASE, self.own_train_slots)
        val = self._bind(val_slots, Variant.VAL_BASE, self.own_val_slots)
        self._work = WorkMemory(self.arena, self._scratch_bytes(train, val))
        self._slots = {True: train, False: val}
        self._captured: dict[tuple[int, ...], CapturedGraph] = {}
        self._steps = {
            (variant, slot): self._capture(variant, slot)
            for variant in Variant
            for slot in range(len(self._slots[variant.is_training]))
        }
        self._services = {
            graph: self._queue(self._calls(self._service_nodes(graph), Variant.TRAIN_BASE, {}, self._work))
            for graph in SERVICE
        }
        self.arena.seal()

    # -- running ------------------------------------------------------------------------------------------------

    def run_train_step(
        self, slot: int, variant: Variant = Variant.TRAIN_BASE, *, lr: float | None = None, valid: int | None = None
    ) -> None:
        """Replay one training step on input slot ``slot``; ``lr`` and ``valid`` are written to their scalars first
        when given."""
        if not variant.is_training:
            raise ValueRejected(f"run_train_step: {variant.name} is not a training variant")
        if lr is not None:
            self.write_scalar("lr", lr)
        if valid is not None:
            self.write_scalar("batch_valid", valid)
        self._step(variant, slot).launch()

    def run_val_step(self, slot: int, variant: Variant = Variant.VAL_BASE, *, valid: int | None = None) -> None:
        """Replay one validation step on input slot ``slot``."""
        if variant.is_training:
            raise ValueRejected(f"run_val_step: {variant.name} is not a validation variant")
        if valid is not None:
            self.write_scalar("batch_valid", valid)
        self._step(variant, slot).launch()

    def run_uncaptured(self, variant: Variant, slot: int) -> None:
        """The same step node by node: every call is built anew and launched alone. For tests and debugging."""
        self._step(variant, slot)  # raises for a slot that is not bound
        work = WorkMemory(MemoryArena(1), self._work.scratch_bytes)
        for node in self._step_nodes(variant, slot):
            for call in self._calls([node], variant, self._slots[variant.is_training][slot], work):
                self._queue([call]).launch()

    def run_graph(self, graph: GraphId) -> None:
        """Launch a service graph (CLEAR_METRICS, CAST_MAIN_FP32_TO_FP16, VAL_RESULT_COMM); absent ones do nothing."""
        try:
            self._services[graph].launch()
        except KeyError:
            known = ", ".join(g.name for g in SERVICE)
            raise ValueRejected(f"run_graph: {graph.name} is part of a step; expected one of: {known}") from None

    def clear_metrics(self) -> None:
        """Zero the accumulated metrics."""
        self.run_graph(GraphId.CLEAR_METRICS)

    def cast_weights(self) -> None:
        """Make the half copies from the master weights; nothing without AMP."""
        self.run_graph(GraphId.CAST_MAIN_FP32_TO_FP16)

    def release_slots(self) -> None:
        """Forget the input slots and every program bound to them, so that their memory can be unmapped; the arena's
        tensors stay readable."""
        self._steps.clear()
        self._captured.clear()
        self._keep.clear()
        self._slots = {True: [], False: []}

    # -- tensors ------------------------------------------------------------------------------------------------

    def array(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> npt.NDArray[Any]:
        """Writable view [N,H,W,C] of a tensor in the arena; BF16 as uint16 bit patterns."""
        return SlotContext.view(self.arena, self.model.plans[variant], tensor_id)

    def read_scalar(self, name: str) -> float | int:
        """Value of a step scalar."""
        value: float | int = self._scalar(name).item()
        return value

    def write_scalar(self, name: str, value: float) -> None:
        """Set a step scalar; the next launch reads it."""
        self._scalar(name)[...] = value

    def _scalar(self, name: str) -> npt.NDArray[Any]:
        self.model.scalar(name)  # raises for an unknown name
        return self._scalars[name]

    # -- facts --------------------------------------------------------------------------------------------------

    def program(self, variant: Variant, slot: int) -> str:
        """The calls of one step as stable text, one per line."""
        captured = self._step(variant, slot)
        text: str = captured.dump() if hasattr(captured, "dump") else ""
        return text

    def profile(self) -> dict[str, Any]:
        """What besides data, model and options the bits of a run may depend on."""
        half = self.model.request.half
        facts: dict[str, Any] = {"backend": self.backend, "dtype": half.name.lower() if half else "fp32"}
        if self.backend == "cpu":
            from renaissance.backend.cpu.onednn import onednn

            facts |= {"isa": onednn().isa, "onednn": onednn().version, "threads": self.threads}
        else:
            facts |= {"machine": platform.machine(), "numpy": np.__version__}
        return facts

    def versions(self) -> dict[str, str]:
        """Versions of the native libraries in use."""
        if self.backend != "cpu":
            return {}
        from renaissance.backend.cpu.onednn import onednn

        return {"onednn": onednn().version, "isa": onednn().isa}

    # -- capture ------------------------------------------------------------------------------------------------

    def _bind(
        self, slots: Sequence[tuple[Memory, Memory]] | None, variant: Variant, own: list[InputArrays]
    ) -> list[Binding]:
        """Addresses of the slots of one side."""
        tensors = [self.model.tensor(i, variant) for i in (self.model.inputs[0].data, self.model.inputs[0].label)]
        if slots is None:
            for _ in range(2):
                images, labels = (self.arena.block(t.nbytes, t.name).view(t.dtype.numpy) for t in tensors)
                own.append(InputArrays(images.reshape(tensors[0].shape.dims), labels))
            slots = [(s.images, s.labels) for s in own]
        bindings: list[Binding] = []
        for index, memory in enumerate(slots):
            data, label = (_address(m, t, f"slot {index}, {t.name}") for m, t in zip(memory, tensors, strict=True))
            inputs = self.model.inputs[index % 2]
            bindings.append({inputs.data: data, inputs.label: label})
        return bindings

    def _step(self, variant: Variant, slot: int) -> CapturedGraph:
        try:
            return self._steps[variant, slot]
        except KeyError:
            count = len(self._slots[variant.is_training])
            known = f"0 to {count - 1}" if count else "none: no slots are bound for this side"
            raise ValueRejected(f"{variant.name}: input slot {slot}; expected {known}") from None

    def _step_nodes(self, variant: Variant, slot: int) -> list[Node]:
        """Nodes of a step in launch order. Shape-invariant graphs are the base plan's; their tensors lie at the same
        place in every plan."""
        return [n for graph in _program(variant, slot) for n in self.model.atlas.entry(variant, graph).nodes]

    def _service_nodes(self, graph: GraphId) -> tuple[Node, ...]:
        train = self.model.atlas.entry(Variant.TRAIN_BASE, graph).nodes
        return train or self.model.atlas.entry(Variant.VAL_BASE, graph).nodes

    def _capture(self, variant: Variant, slot: int) -> CapturedGraph:
        parts = (self.model.atlas.entry(variant, graph).captured for graph in _program(variant, slot))
        key = (variant.is_training, slot, *parts)
        if key not in self._captured:
            binding = self._slots[variant.is_training][slot]
            calls = self._calls(self._step_nodes(variant, slot), variant, binding, self._work)
            self._captured[key] = self._queue(calls)
        return self._captured[key]

    def _calls(self, nodes: Sequence[Node], variant: Variant, binding: Binding, work: WorkMemory) -> list[Call]:
        half, plan = self.model.request.half, self.model.plans[variant]
        context = SlotContext(self.arena, plan, binding, work, self.threads, half)
        return [c for n in nodes for c in self._registry.launcher(n.op, self.backend)(n, context)]

    def _queue(self, calls: Sequence[Call]) -> CapturedGraph:
        kind = PythonCall if self.backend == "reference" else NativeCall
        for call in calls:  # one that is left out would be an op that does nothing
            if not isinstance(call, kind):
                raise ValueRejected(
                    f"{call.label}: {type(call).__name__} on backend {self.backend!r}; a launcher of "
                    f"this backend returns {kind.__name__}"
                )
        if self.backend == "reference":
            return PythonQueue([c for c in calls if isinstance(c, PythonCall)])
        from renaissance.backend.cpu.onednn import explain
        from renaissance.backend.cpu.queue import NativeQueue, team_call

        native = [c for c in calls if isinstance(c, NativeCall)]
        return NativeQueue([team_call(self.threads), *native] if native else [], explain)

    def _scratch_bytes(self, train: Sequence[Binding], val: Sequence[Binding]) -> int:
        """The most scratch any call of any program asks for, found by building every call once."""
        probe = WorkMemory(MemoryArena(1), 0)
        for variant in Variant:
            for slot, binding in enumerate((train if variant.is_training else val)[:2]):
                self._calls(self._step_nodes(variant, slot), variant, binding, probe)
        for graph in SERVICE:
            self._calls(self._service_nodes(graph), Variant.TRAIN_BASE, {}, probe)
        return probe.asked


def _program(variant: Variant, slot: int) -> tuple[GraphId, ...]:
    return train_program(slot % 2) if variant.is_training else val_program(slot % 2)


def _prepare_threads(backend: str, threads: int, wait_policy: str | None) -> str:
    if backend != "cpu":
        if threads < 1:
            raise ValueRejected(f"compute threads: {threads}; expected at least 1")
        if wait_policy is not None:
            raise ValueRejected(
                f"wait policy {wait_policy!r}: the {backend} backend has no threads of ours; leave it out"
            )
        return "NumPy's own threads"
    from renaissance.backend.cpu.threads import configure

    return str(configure(threads, wait_policy or "passive"))


def _address(memory: Memory, tensor: DTensor, what: str) -> int:
    if isinstance(memory, int):
        return memory
    nbytes, stored = tensor.nbytes, tensor.dtype.numpy
    if memory.dtype != stored:
        raise DTypeError(f"{what}: an array of {memory.dtype}; expected {stored}, which stores {tensor.dtype.name}")
    if not memory.flags.c_contiguous or memory.nbytes < nbytes:
        raise ShapeError(
            f"{what}: an array of {memory.nbytes} bytes, contiguous: {memory.flags.c_contiguous}; "
            f"expected at least {nbytes} contiguous bytes"
        )
    return int(memory.ctypes.data)
