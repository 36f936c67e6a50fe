"""TaskBase: the order in which a task comes to life, and access to its tensors.

PLANNING        options are set; nothing exists
MEMORY_LOCKED   the model is compiled: plans and graphs are fixed
COMPILED        the arena is allocated, every program captured, weights drawn

``compile`` walks through them once; a task that failed to compile has given back everything and is of no more use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

from renaissance.core.enums import CompileInfo, Phase
from renaissance.core.errors import PhaseError, ValueRejected
from renaissance.core.phase import PhaseMachine
from renaissance.graph import (
    BluePrint,
    CompiledModel,
    CompileRequest,
    ComputationGraph,
    MemoryPlan,
    Variant,
    compile_model,
    model_text,
)
from renaissance.task.engine import Engine
from renaissance.tensor import Initializer, Tensor


class TaskBase(ABC):
    """What every task has: a phase, a compiled model, an engine that runs it."""

    def __init__(self) -> None:
        self._phase = PhaseMachine()
        self._initializer = Initializer()
        self._compiled: CompiledModel | None = None
        self._engine: Engine | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase.phase

    def initializer(self, policy: Initializer) -> Self:
        """How weights start (default: Kaiming uniform for FC layers, biases 0)."""
        self._phase.require("initializer", Phase.PLANNING)
        if not isinstance(policy, Initializer):
            raise ValueRejected(f"initializer is {policy!r}; expected an Initializer")
        self._initializer = policy
        return self

    def compile(self, info: CompileInfo = CompileInfo.ARCH_PLAN) -> Self:
        """Fix everything the steps need, and hand the plans chosen by ``info`` to the reporter.

        Raises PhaseError on a second call; ValueRejected that lists what is missing; ShapeError and
        MissingKernelError from the compiler; DataServerError when the data cannot be had.
        """
        self._phase.require("compile", Phase.PLANNING)
        try:
            blueprint, request = self._prepare()
            with self._together():
                self._compiled = compile_model(blueprint, request)
                self._phase.advance("compile", Phase.MEMORY_LOCKED)
                self._engine = self._capture(self._compiled)
                self._phase.advance("compile", Phase.COMPILED)
                with self._engine.failures():
                    self._engine.initialize(self._seed())
                    self._show(self.plan_text(info))
                    self._ready()
        except BaseException:
            with suppress(RuntimeError):  # what follows from the error shall not hide it
                self.close()
            raise
        return self

    @abstractmethod
    def close(self) -> None:
        """Give back everything the task holds outside this process's heap. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- what a task must supply ----------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> tuple[BluePrint, CompileRequest]:
        """Check the options and say what to compile."""

    def _together(self) -> AbstractContextManager[None]:
        """An error inside ends all ranks, where there are several, with the words of the one that was first."""
        return nullcontext()

    @abstractmethod
    def _capture(self, compiled: CompiledModel) -> Engine:
        """Allocate and capture for ``compiled``."""

    @abstractmethod
    def _ready(self) -> None:
        """The engine exists and the weights are drawn: what remains before the first step."""

    @abstractmethod
    def _seed(self) -> int:
        """Seed of the initial weights."""

    @abstractmethod
    def _show(self, text: str) -> None:
        """Hand plan text to the reporter."""

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model. Raises PhaseError before compile()."""
        if self._compiled is None:
            raise PhaseError(f"compiled: the task is in {self.phase.name}; call compile() first")
        return self._compiled

    @property
    def engine(self) -> Engine:
        """What runs the steps. Raises PhaseError before compile()."""
        if self._engine is None:
            raise PhaseError(f"engine: the task is in {self.phase.name}; call compile() first")
        return self._engine

    def memory_plan(self, variant: Variant = Variant.TRAIN_BASE) -> MemoryPlan:
        return self.compiled.plans[variant]

    def graphs(self) -> tuple[ComputationGraph, ComputationGraph]:
        """The training and the inference graph."""
        return self.compiled.training, self.compiled.inference

    def plan_text(self, info: CompileInfo = CompileInfo.ARCH_PLAN) -> str:
        """The chosen plans as stable text, in the order layers, memory, training graph, inference graph."""
        return model_text(self.compiled, info)

    def tensor_id(self, name: str) -> int:
        """Id of the tensor called ``name``. Raises ValueRejected with the names there are."""
        known = {tensor.name: tensor.id for tensor in self.memory_plan().tensors}
        if name not in known:
            raise ValueRejected(f"no tensor {name!r}; this model has: {', '.join(known)}")
        return known[name]

    def fetch(self, name: str) -> Tensor:
        """A compact host copy of the tensor called ``name``."""
        descriptor = self.compiled.tensor(self.tensor_id(name))
        return Tensor.from_numpy(self.engine.read(descriptor.id), descriptor.dtype)

    def transfer(self, tensor: Tensor, name: str) -> None:
        """Write a host tensor into the tensor called ``name``; shape and dtype must be equal (ValueRejected).

        Half copies follow the master weight they belong to.
        """
        descriptor = self.compiled.tensor(self.tensor_id(name))
        if (tensor.shape, tensor.dtype) != (descriptor.shape, descriptor.dtype):
            raise ValueRejected(
                f"transfer to {name!r}: expected {descriptor.shape} {descriptor.dtype.name}, given {tensor.shape}"
                f" {tensor.dtype.name}"
            )
        self.engine.write(descriptor.id, tensor.numpy())
        if descriptor.region.series == "W":
            self.engine.weights_written()
