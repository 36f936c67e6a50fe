"""GraphExecutor: captures the programs of a compiled model and replays them, on the host (``interface.Executor``).

At construction every program a run needs is captured once: a training program per (training variant, input slot), a
validation program per (validation variant, input slot), and the service programs. A program is the concatenation of its
graphs in launch order (``graph.ids.train_program``); a graph that is absent adds nothing. Variants and slots that
execute the same nodes on the same addresses share a capture. A step is then two stores and one ``launch``.

The executor writes nothing into tensors by itself: weights, moments and scalars start as zero bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from renaissance.backend.arena import MemoryArena
from renaissance.backend.capture import Binding, Preparations, SlotContext, WorkMemory, queue_of
from renaissance.backend.interface import ACCUMULATORS, Memory
from renaissance.backend.programs import (
    EMA_GRAPHS,
    SERVICE,
    VALIDATION_GRAPHS,
    Side,
    preparing_graph,
    refuse_graph,
    refuse_step,
    require_kind,
    require_rows,
    service_nodes,
    side_of,
    step_captures,
    step_keys,
    step_nodes,
)
from renaissance.backend.registry import HOST_BACKENDS, Call, OpRegistry, default_registry
from renaissance.backend.slots import OWN_SLOTS, InputArrays, input_tensors, memory_address
from renaissance.core.errors import ValueRejected
from renaissance.graph import CapturedGraph, CompiledModel, GraphId, Node, Variant


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
        train_end_slots: Sequence[tuple[Memory, Memory]] | None = None,
        val_slots: Sequence[tuple[Memory, Memory]] | None = None,
        registry: OpRegistry | None = None,
        poison: bool = False,
    ) -> None:
        """``train_slots`` and ``val_slots`` hold (images, labels) per slot of the ring, even slots A, odd ones B; None
        makes two slots of its own (``own_train_slots``, ``own_val_slots``), [] captures nothing for that side.
        ``train_end_slots`` are those of the resolution that training ends with, where the model has one
        (``own_train_end_slots``). ``poison`` fills everything a step does not carry over with NaN before each step, so
        that a read of memory nobody wrote shows; for tests, it is slow.

        Raises MissingKernelError for an op the backend has no kernel for, ShapeError for a slot that is too small,
        DTypeError for one of another element type, DeviceError when the native library is missing.
        """
        if backend not in HOST_BACKENDS:
            raise ValueRejected(f"unknown backend {backend!r}; expected one of: {', '.join(HOST_BACKENDS)}")
        self.model, self.backend, self.threads = model, backend, threads
        self._registry = registry or default_registry(backend)
        self._registry.require(model.training.ops | model.inference.ops, backend)
        self.thread_plan = prepare_threads(backend, threads, wait_policy)
        self.arena = MemoryArena(model.arena_bytes)
        self.own_train_slots: list[InputArrays] = []
        self.own_train_end_slots: list[InputArrays] = []
        self.own_val_slots: list[InputArrays] = []
        self._scalars = {name: self.array(i).reshape(()) for name, i in model.scalars.items()}
        self._keep = [train_slots, train_end_slots, val_slots]
        self._slots = {
            Side.TRAIN: self._bind(train_slots, Variant.TRAIN_BASE, self.own_train_slots),
            Side.TRAIN_END: [],
            Side.VAL: self._bind(val_slots, Variant.VAL_BASE, self.own_val_slots),
        }
        if model.request.train_end_size is not None:
            own = self.own_train_end_slots
            self._slots[Side.TRAIN_END] = self._bind(train_end_slots, Variant.TRAIN_LOWRES, own)
        self._work = WorkMemory(self.arena)
        self._preparations = Preparations()
        self._built: dict[Hashable, tuple[Call, ...]] = {}
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._steps = {key: self._capture(*key) for key in step_keys(model, self._slot_counts)}
        self._services = {
            graph: self._queue(self._calls(service_nodes(model, graph), Variant.TRAIN_BASE, {})) for graph in SERVICE
        }
        self._prepare = {ema: self._queue(self._preparations.calls(ema)) for ema in (False, True)}
        self._prepared: bool | None = None
        self._poison = poison
        self._built.clear()
        self._work.commit()
        self.arena.seal()

    # -- running ------------------------------------------------------------------------------------------------

    def run_train_step(
        self,
        slot: int,
        variant: Variant = Variant.TRAIN_BASE,
        *,
        lr: float | None = None,
        valid: int | None = None,
        frozen: bool = False,
    ) -> None:
        """Replay one training step on input slot ``slot``; ``lr`` and ``valid`` are written to their scalars first
        when given. ``frozen`` leaves the backward pass of the first layer out (and needs a model compiled for it)."""
        require_kind(variant, training=True)
        step = self._step(variant, slot, frozen)
        if lr is not None:
            self.write_scalar("lr", lr)
        if valid is not None:
            self._write_valid(variant, valid)
        self._prepared = None
        if self._poison:
            self.poison()
        step.launch()

    def prepare_validation(self, ema: bool = False) -> None:
        """Make what every step of a validation pass reads: folded batch-norm parameters and packed weights, of the main
        weights or (``ema``) of their moving average. Nothing to do when they have not changed since the last time.
        ``run_val_step`` does it by itself; a task calls it so that the time is not the first step's."""
        if self._prepared is not ema:
            self._prepared = None  # until it is done: what fails half way leaves neither
            self._services[preparing_graph(ema)].launch()
            self._prepare[ema].launch()
            self._prepared = ema

    def run_val_step(
        self, slot: int, variant: Variant = Variant.VAL_BASE, *, valid: int | None = None, ema: bool = False
    ) -> None:
        """Replay one validation step on input slot ``slot``, with the main weights or (``ema``) their average."""
        require_kind(variant, training=False)
        step = self._step(variant, slot, ema)
        if valid is not None:
            self._write_valid(variant, valid)
        self.prepare_validation(ema)
        if self._poison:
            self.poison()
        step.launch()

    def run_uncaptured(self, variant: Variant, slot: int, *, option: bool = False) -> None:
        """The same step node by node: every call is built anew and launched alone. ``option`` is ``frozen`` of a
        training step and ``ema`` of a validation step. For tests and debugging."""
        self._step(variant, slot, option)  # raises for a slot that is not bound
        if not variant.is_training:
            self.prepare_validation(option)
        work = WorkMemory(MemoryArena(1), beside=self._work)
        context = self._context(variant, self._slots[side_of(self.model, variant)][slot], work, Preparations())
        for node in step_nodes(self.model, variant, slot, option):
            for call in self._launch(node, context(node.graph)):
                self._queue([call]).launch()
        if variant.is_training:
            self._prepared = None

    def poison(self) -> None:
        """Fill all values of a step and the scratch with NaN; padding between tensors stays what it is."""
        for value in self.model.values:
            size = max(plan.tensor(value).nbytes for plan in self.model.plans)
            self.arena.view(self.model.tensor(value).offset, size)[:] = 0xFF
        self._work.poison()

    def run_graph(self, graph: GraphId) -> None:
        """Launch a service graph (``SERVICE``); absent ones do nothing."""
        try:
            service = self._services[graph]
        except KeyError:
            raise refuse_graph(graph) from None
        if graph is not GraphId.CLEAR_METRICS:
            self._prepared = None  # the others write what validation reads
        service.launch()

    def release_when_copied(self, slot: int, release: Callable[[], None]) -> None:
        """Give a slot back: a step has read all of it when it returns."""
        release()

    def drain(self) -> None:
        """Nothing is held: see ``release_when_copied``."""

    def clear_metrics(self) -> None:
        """Zero the accumulated metrics."""
        self.run_graph(GraphId.CLEAR_METRICS)

    def reduce_metrics(self) -> None:
        """Nothing: there is one rank."""

    def cast_weights(self) -> None:
        """The master weights were written from outside: make their half copies, and what validation derives, again."""
        self.run_graph(GraphId.CAST_MAIN_FP32_TO_FP16)

    def release_slots(self) -> None:
        """Forget the input slots and every program bound to them, so that their memory can be unmapped; the arena's
        tensors stay readable."""
        self._steps.clear()
        self._captured.clear()
        self._keep.clear()
        self._slots = {side: [] for side in Side}

    # -- tensors ------------------------------------------------------------------------------------------------

    def array(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> npt.NDArray[Any]:
        """Writable view [N,H,W,C] of a tensor in the arena; BF16 as uint16 bit patterns."""
        return SlotContext.view(self.arena, self.model.plans[variant], tensor_id)

    def read(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> npt.NDArray[Any]:
        """View [N,H,W,C] of a tensor in the arena; BF16 as uint16 bit patterns."""
        return self.array(tensor_id, variant)

    def write(self, tensor_id: int, values: npt.NDArray[Any]) -> None:
        """Copy ``values``, which broadcast to [N,H,W,C], into a tensor."""
        self.array(tensor_id)[...] = values

    def read_scalar(self, name: str) -> float | int:
        """Value of a step scalar."""
        value: float | int = self._scalar(name).item()
        return value

    def write_scalar(self, name: str, value: float) -> None:
        """Set a step scalar; the next launch reads it."""
        self._scalar(name)[...] = value

    def scalars(self) -> Mapping[str, float]:
        """The metric accumulators."""
        return {name: float(self._scalars[name]) for name in ACCUMULATORS}

    def scalars_soon(self) -> Mapping[str, float]:
        """The metric accumulators: steps are done when they return."""
        return self.scalars()

    def _write_valid(self, variant: Variant, valid: int) -> None:
        require_rows(self.model, variant, valid)
        self.write_scalar("batch_valid", valid)

    def _scalar(self, name: str) -> npt.NDArray[Any]:
        self.model.scalar(name)  # raises for an unknown name
        return self._scalars[name]

    # -- facts --------------------------------------------------------------------------------------------------

    def program(self, variant: Variant, slot: int) -> str:
        """The calls of one step as stable text, one per line."""
        return _dump(self._step(variant, slot))

    def preparation(self, ema: bool = False) -> str:
        """The calls of ``prepare_validation`` beside the folding of batch norms, as stable text."""
        return _dump(self._prepare[ema])

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

    def notes(self) -> dict[str, str]:
        """Nothing was chosen but what ``profile`` says."""
        return {}

    # -- capture ------------------------------------------------------------------------------------------------

    def _bind(
        self, slots: Sequence[tuple[Memory, Memory]] | None, variant: Variant, own: list[InputArrays]
    ) -> list[Binding]:
        """Addresses of the slots of one side."""
        tensors = input_tensors(self.model, variant)
        if slots is None:
            for _ in range(OWN_SLOTS):
                images, labels = (self.arena.block(t.nbytes, t.name).view(t.dtype.numpy) for t in tensors)
                own.append(InputArrays(images.reshape(tensors[0].shape.dims), labels))
            slots = [(s.images, s.labels) for s in own]
        bindings: list[Binding] = []
        for index, memory in enumerate(slots):
            data, label = (
                memory_address(m, t, f"slot {index}, {t.name}") for m, t in zip(memory, tensors, strict=True)
            )
            inputs = self.model.inputs[index % 2]
            bindings.append({inputs.data: data, inputs.label: label})
        return bindings

    @property
    def _slot_counts(self) -> dict[Side, int]:
        return {side: len(slots) for side, slots in self._slots.items()}

    def _step(self, variant: Variant, slot: int, option: bool = False) -> CapturedGraph:
        try:
            return self._steps[variant, slot, option]
        except KeyError:
            raise refuse_step(self.model, (variant, slot, option), self._slot_counts) from None

    def _capture(self, variant: Variant, slot: int, option: bool) -> CapturedGraph:
        side = side_of(self.model, variant)
        key = (side, slot, *step_captures(self.model, variant, slot, option))
        if key not in self._captured:
            calls = self._calls(step_nodes(self.model, variant, slot, option), variant, self._slots[side][slot])
            self._captured[key] = self._queue(calls)
        return self._captured[key]

    def _calls(self, nodes: Sequence[Node], variant: Variant, binding: Binding) -> list[Call]:
        """The calls of ``nodes``, each node built once per input size and bound address."""
        context = self._context(variant, binding, self._work, self._preparations)
        calls: list[Call] = []
        for node in nodes:
            shape_id = self.model.atlas.entry(variant, node.graph).shape_id
            place = (node.graph in VALIDATION_GRAPHS, node.graph in EMA_GRAPHS, shape_id)
            inputs = tuple(binding.get(i, -1 - i) for i in node.inputs)  # addresses of what is bound, else ids
            operands = (inputs, node.outputs, node.spans_in, node.spans_out)
            key = (node.op, tuple(sorted(node.attrs.items())), operands, place)
            if key not in self._built:
                self._built[key] = self._launch(node, context(node.graph))
            calls += self._built[key]
        return calls

    def _context(
        self, variant: Variant, binding: Binding, work: WorkMemory, preparations: Preparations
    ) -> Callable[[GraphId], SlotContext]:
        plan, half = self.model.plans[variant], self.model.request.half

        def of(graph: GraphId) -> SlotContext:
            return SlotContext(self.arena, plan, binding, work, self.threads, half, preparations, graph)

        return of

    def _launch(self, node: Node, context: SlotContext) -> tuple[Call, ...]:
        return tuple(self._registry.launcher(node.op, self.backend)(node, context))

    def _queue(self, calls: Sequence[Call]) -> CapturedGraph:
        return queue_of(calls, self.backend, self.threads)


def _dump(captured: CapturedGraph) -> str:
    text: str = captured.dump() if hasattr(captured, "dump") else ""
    return text


def prepare_threads(backend: str, threads: int, wait_policy: str | None) -> str:
    """Start the team of compute threads of the CPU backend; returns what to say about it.

    Raises ValueRejected for a number below 1, and for a wait policy on a backend without threads of ours.
    """
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
