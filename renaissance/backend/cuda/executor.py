"""CudaExecutor: the programs of a compiled model as CUDA Graphs, and their replay (``backend.interface.Executor``).

At construction every program that a run needs is built, issued once (so that kernels are loaded and libraries warm),
and captured: a training step per (variant, parity of the slot), a validation step likewise, the service programs, and a
small transfer program per slot. A step is then two graph launches, one on the stream of transfers and one on the
origin, with an event between them; the host never waits inside it (docs/cuda.md).

All device memory is one allocation. The executor writes nothing into tensors by itself: everything starts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from renaissance.backend.capture import Preparations
from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import Buffer, CudaCall
from renaissance.backend.cuda.context import NodeContext
from renaissance.backend.cuda.device import ORIGIN, DeviceContext, after_failure, give_back
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.cuda.mailbox import Mailbox
from renaissance.backend.cuda.pinned import PinnedBlock
from renaissance.backend.cuda.program import Item, Program, capture_all, items_of
from renaissance.backend.cuda.transfer import HostSlot, Transfers
from renaissance.backend.interface import Memory
from renaissance.backend.programs import (
    SERVICE,
    Side,
    StepKey,
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
from renaissance.backend.registry import Call, OpRegistry, default_registry
from renaissance.backend.slots import OWN_SLOTS, InputArrays, input_tensors, memory_address
from renaissance.core.errors import ValueRejected
from renaissance.graph import CompiledModel, GraphId, Node, Variant

Items = list[Item]


@dataclass(frozen=True, slots=True)
class Build:
    """The items of every program: of steps by what they capture, which several of them share."""

    steps: Mapping[StepKey, Hashable]
    by_captures: Mapping[Hashable, Items]
    services: Mapping[GraphId, Items]
    prepare: Mapping[bool, Items]


class CudaExecutor:
    """Runs one compiled model on one GPU. Use it from one thread at a time; ``close`` it before its device."""

    def __init__(
        self,
        model: CompiledModel,
        *,
        device: DeviceContext,
        memory: HostMemory | None = None,
        train_slots: Sequence[tuple[Memory, Memory]] | None = None,
        train_end_slots: Sequence[tuple[Memory, Memory]] | None = None,
        val_slots: Sequence[tuple[Memory, Memory]] | None = None,
        registry: OpRegistry | None = None,
        poison: bool = False,
    ) -> None:
        """As ``backend.executor.GraphExecutor``; ``memory`` covers the host memory that the slots lie in. The
        executor's own slots are page-locked.

        Raises MissingKernelError for an op without a kernel, ShapeError or DTypeError for a slot that does not fit,
        MemoryPlanError when the GPU's memory is too small, DeviceError for what a library refuses, and ValueRejected
        for a model whose inputs are meant to lie on the host, or that is for another number of ranks.
        """
        _require_fit(model, device)
        self.model, self.device = model, device
        self._registry = registry or default_registry("cuda")
        self._registry.require(model.training.ops | model.inference.ops, "cuda")
        self._runtime = device.runtime
        self._memory = memory or HostMemory(device.runtime)
        self.own_train_slots: list[InputArrays] = []
        self.own_train_end_slots: list[InputArrays] = []
        self.own_val_slots: list[InputArrays] = []
        self._pinned: list[PinnedBlock] = []
        self._keep = [train_slots, train_end_slots, val_slots]
        slots: dict[Side, Sequence[HostSlot]] = {
            Side.TRAIN: self._bind(train_slots, Variant.TRAIN_BASE, self.own_train_slots)
        }
        if model.request.train_end_size is not None:
            slots[Side.TRAIN_END] = self._bind(train_end_slots, Variant.TRAIN_LOWRES, self.own_train_end_slots)
        slots[Side.VAL] = self._bind(val_slots, Variant.VAL_BASE, self.own_val_slots)
        self.arena = DeviceArena(model.arena_bytes)
        self.transfers = Transfers(device, model, self.arena, self._memory, slots)
        self._mailbox = Mailbox(device, model, self.arena)
        self._host_scalars = {name: float(model.scalar_init[name]) for name in ("lr", "batch_valid")}
        self._poison = poison
        self._prepared: bool | None = None
        self._steps: dict[StepKey, Program] = {}
        self._captured: list[Program] = []
        try:
            with device.planning():
                self._build()  # what it asks for is measured: its addresses are never used
            self.arena.allocate(self._runtime, model.plans[Variant.TRAIN_BASE].tensors)
            self._make_programs(self._build())
        except BaseException:
            with after_failure():
                self.close()
            raise

    # -- construction -------------------------------------------------------------------------------------------

    def _bind(
        self, slots: Sequence[tuple[Memory, Memory]] | None, variant: Variant, own: list[InputArrays]
    ) -> list[HostSlot]:
        """Addresses of the slots of one side; own ones are made when none are given."""
        tensors = input_tensors(self.model, variant)
        if slots is None:
            for _ in range(OWN_SLOTS):
                images, labels = (self._page_locked(t.nbytes).view(t.dtype.numpy) for t in tensors)
                own.append(InputArrays(images.reshape(tensors[0].shape.dims), labels))
            slots = [(s.images, s.labels) for s in own]
        bound = []
        for index, memory in enumerate(slots):
            named = zip(memory, tensors, strict=True)
            data, label = (Buffer(memory_address(m, t, f"slot {index}, {t.name}"), t.nbytes) for m, t in named)
            bound.append(HostSlot(data, label, own=bool(own)))
        return bound

    def _page_locked(self, nbytes: int) -> npt.NDArray[np.uint8]:
        block = self.device.page_locked(nbytes)
        self._pinned.append(block)
        self._memory.adopt(block.buffer.ptr, nbytes)
        return block.bytes

    def _build(self) -> Build:
        """What every program consists of, with the addresses that the arena has now."""
        preparations = Preparations()
        calls = _Calls(self, preparations)
        by_captures: dict[Hashable, Items] = {}
        steps: dict[StepKey, Hashable] = {}
        for key in step_keys(self.model, self.transfers.counts):
            variant, slot, _ = key
            parity = slot % 2
            steps[key] = same = (parity, *step_captures(self.model, *key))
            if same not in by_captures:
                nodes, first = step_nodes(self.model, *key), self.transfers.first_item(parity)
                by_captures[same] = self._items(first, nodes, calls, variant)
        start = Item("start", ORIGIN, ())
        services = {
            graph: self._items(start, service_nodes(self.model, graph), calls, Variant.TRAIN_BASE) for graph in SERVICE
        }
        prepare = {ema: [Item("preparations", ORIGIN, _cuda(preparations.calls(ema)))] for ema in (False, True)}
        return Build(steps, by_captures, services, prepare)

    def _items(self, first: Item, nodes: Sequence[Node], calls: _Calls, variant: Variant) -> Items:
        """The nodes in order behind ``first``, with the dependences of the graph."""
        return items_of(first, nodes, self.model.plans[variant], lambda node: calls.of(node, variant))

    def _make_programs(self, build: Build) -> None:
        """Make the programs, issue everything once, forget what it computed, and capture it."""
        made = {same: Program(self.device, items) for same, items in build.by_captures.items()}
        self._steps = {key: made[same] for key, same in build.steps.items()}
        self._services = {graph: Program(self.device, items) for graph, items in build.services.items()}
        self._prepare = {ema: Program(self.device, items) for ema, items in build.prepare.items()}
        copies = self.transfers.build()
        programs = [p for p in (*made.values(), *self._services.values(), *self._prepare.values()) if not p.empty]
        self._captured = [*programs, *([] if self._memory.eager else copies)]
        capture_all(self.device, self.arena, [*copies, *programs], self._captured)

    # -- steps --------------------------------------------------------------------------------------------------

    def run_train_step(
        self,
        slot: int,
        variant: Variant = Variant.TRAIN_BASE,
        *,
        lr: float | None = None,
        valid: int | None = None,
        frozen: bool = False,
    ) -> None:
        """Launch one training step on input slot ``slot``; returns at once. ``frozen`` leaves the backward pass of the
        first layer out (and needs a model compiled for it)."""
        require_kind(variant, training=True)
        self._prepared = None
        self._launch((variant, slot, frozen), lr, valid)

    def prepare_validation(self, ema: bool = False) -> None:
        """Make what every step of a validation pass reads, unless it is still there."""
        if self._prepared is not ema:
            self._prepared = None
            for program in (self._services[preparing_graph(ema)], self._prepare[ema]):
                self._replay(program)
            self._prepared = ema

    def run_val_step(
        self, slot: int, variant: Variant = Variant.VAL_BASE, *, valid: int | None = None, ema: bool = False
    ) -> None:
        """Launch one validation step on input slot ``slot``, with the main weights or (``ema``) their average."""
        require_kind(variant, training=False)
        self._step((variant, slot, ema))
        self.prepare_validation(ema)
        self._launch((variant, slot, ema), None, valid)

    def run_uncaptured(self, variant: Variant, slot: int, *, option: bool = False) -> None:
        """The same step call by call, with the same streams and events. For tests and debugging."""
        self._step((variant, slot, option))
        if not variant.is_training:
            self.prepare_validation(option)
        else:
            self._prepared = None
        self._launch((variant, slot, option), None, None, captured=False)

    def _launch(self, key: StepKey, lr: float | None, valid: int | None, captured: bool = True) -> None:
        variant, slot, _ = key
        program = self._step(key)
        if lr is not None:
            self._host_scalars["lr"] = lr
        if valid is not None:
            require_rows(self.model, variant, valid)
            self._host_scalars["batch_valid"] = valid
        if self._poison:
            self.poison()
        lr, rows = self._host_scalars["lr"], int(self._host_scalars["batch_valid"])
        self.transfers.send(side_of(self.model, variant), slot, lr, rows)
        if captured:
            program.launch()
        else:
            program.issue()
        self.transfers.step_launched(slot)

    def _step(self, key: StepKey) -> Program:
        try:
            return self._steps[key]
        except KeyError:
            raise refuse_step(self.model, key, self.transfers.counts) from None

    def _replay(self, program: Program) -> None:
        if not program.empty:
            program.launch()

    def run_graph(self, graph: GraphId) -> None:
        """Launch a service graph (``programs.SERVICE``); absent ones do nothing."""
        if graph not in self._services:
            raise refuse_graph(graph)
        if graph is GraphId.CLEAR_METRICS:
            self._mailbox.clear()
        else:
            self._prepared = None  # the others write what validation reads
        self._replay(self._services[graph])

    def release_when_copied(self, slot: int, release: Callable[[], None]) -> None:
        """Give a slot back as soon as the copy engine has read it."""
        self.transfers.release_when_copied(slot, release)

    def drain(self) -> None:
        """Wait until every slot that was handed over has been given back."""
        self.transfers.drain()

    def clear_metrics(self) -> None:
        """Zero the accumulated metrics, after the steps that are under way."""
        self.run_graph(GraphId.CLEAR_METRICS)

    def reduce_metrics(self) -> None:
        """The metrics of a validation pass become their mean over the ranks; nothing with one rank."""
        self.run_graph(GraphId.VAL_RESULT_COMM)

    def cast_weights(self) -> None:
        """The master weights were written from outside: make their half copies, and what validation derives, again."""
        self.run_graph(GraphId.CAST_MAIN_FP32_TO_FP16)

    def poison(self) -> None:
        """Fill all values of a step with NaN; padding between tensors stays what it is."""
        for value in self.model.values:
            size = max(plan.tensor(value).nbytes for plan in self.model.plans)
            place = self.arena.tensor(self.model.tensor(value).offset, size)
            self._runtime.memsetAsync(place.ptr, 0xFF, place.nbytes, self.device.origin)

    # -- tensors ------------------------------------------------------------------------------------------------

    def read(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> npt.NDArray[Any]:
        """A copy [N,H,W,C] of a tensor after every step so far; BF16 as uint16 bit patterns."""
        return self._mailbox.read_tensor(self.arena, self.model.tensor(tensor_id, variant))

    def write(self, tensor_id: int, values: npt.ArrayLike) -> None:
        """Copy ``values``, which broadcast to [N,H,W,C], into a tensor, after every step so far."""
        stored = self._mailbox.write_tensor(self.arena, self.model.tensor(tensor_id), values)
        for name in self._host_scalars:
            if tensor_id == self.model.scalars[name]:
                self._host_scalars[name] = float(stored.reshape(-1)[0])

    def read_scalar(self, name: str) -> float | int:
        """Value of a step scalar after every step so far."""
        value: float | int = self.read(self.model.scalar(name)).item()
        return value

    def write_scalar(self, name: str, value: float) -> None:
        """Set a step scalar; the next step reads it."""
        self.write(self.model.scalar(name), value)

    def scalars(self) -> Mapping[str, float]:
        """The metric accumulators after every step so far; waits for them."""
        return self._mailbox.metrics()

    def scalars_soon(self) -> Mapping[str, float]:
        """The newest metric accumulators that have arrived; asks for newer ones."""
        return self._mailbox.metrics_soon()

    # -- life and facts -----------------------------------------------------------------------------------------

    def release_slots(self) -> None:
        """Wait for the steps under way, give every slot back and forget the slots, so that their memory can be
        unmapped; tensors stay readable. May be called again."""
        try:
            self.transfers.close()
        finally:
            self._steps.clear()
            self._keep.clear()
            self._memory.close()

    def close(self) -> None:
        """Give back the slots and all memory. May be called again."""
        try:
            self.release_slots()
        finally:
            give_back(program.close for program in self._captured)
            give_back([self._mailbox.close, *(block.free for block in self._pinned), self.arena.free])
            self._captured = []

    def program(self, variant: Variant, slot: int, option: bool = False) -> Program:
        """The program of a step: its text, its nodes, its events."""
        return self._step((variant, slot, option))

    def profile(self) -> dict[str, Any]:
        """What besides data, model and options the bits of a run may depend on."""
        half = self.model.request.half
        return {"backend": "cuda", "dtype": half.name.lower() if half else "fp32", **self.device.facts()}

    def versions(self) -> dict[str, str]:
        """Versions of the libraries in use."""
        facts, other = self.device.facts(), ("gpu", "arch", "world_size")
        return {k: str(v) for k, v in facts.items() if k not in other and not k.endswith(("_tf32", "_plans"))}

    def notes(self) -> dict[str, str]:
        """How host memory reaches the GPU, and what the GPU is."""
        return {"gpu": f"{self.device.name} (sm_{self.device.arch})", "memory": self._memory.text()}


class _Calls:
    """The calls of every node, each built once per input size."""

    def __init__(self, executor: CudaExecutor, preparations: Preparations) -> None:
        self._executor, self._preparations = executor, preparations
        self._built: dict[Hashable, tuple[CudaCall, ...]] = {}

    def of(self, node: Node, variant: Variant) -> tuple[CudaCall, ...]:
        model, registry = self._executor.model, self._executor._registry
        entry = model.atlas.entry(variant, node.graph)
        if not entry.nodes:  # a service graph that only validation has
            entry = model.atlas.entry(Variant.VAL_BASE, node.graph)
        key = (entry.graph.name, node.index, entry.shape_id)
        if key not in self._built:
            context = NodeContext(
                self._executor.device,
                self._executor.arena,
                entry.plan,
                model.request.half,
                self._preparations,
                node.graph,
                node.stream,
            )
            self._built[key] = _cuda(registry.launcher(node.op, "cuda")(node, context))
        return self._built[key]


def _cuda(calls: Sequence[Call]) -> tuple[CudaCall, ...]:
    return tuple(cast(CudaCall, call) for call in calls)


def _require_fit(model: CompiledModel, device: DeviceContext) -> None:
    """Raise ValueRejected for a model whose inputs lie on the host, or that is for another number of ranks."""
    if model.request.external_inputs:
        raise ValueRejected(
            "the model was compiled with inputs in host memory; compile it with external_inputs=False for a GPU"
        )
    if model.request.world_size != device.world_size:
        raise ValueRejected(
            f"the model was compiled for {model.request.world_size} ranks and the device has joined "
            f"{device.world_size}; compile it with world_size={device.world_size}"
        )
