"""What a launcher of this backend sees: ``calls.CudaContext`` for one node's stream and plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from renaissance.backend.capture import Preparations
from renaissance.backend.cuda.arena import DeviceArena
from renaissance.backend.cuda.calls import Buffer, CudaCall
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.libraries import Collectives, Convolutions, Products
from renaissance.backend.programs import EMA_GRAPHS, VALIDATION_GRAPHS
from renaissance.core.dtype import DType
from renaissance.core.enums import StreamKind
from renaissance.core.errors import GraphError
from renaissance.core.region import Span
from renaissance.graph.ids import GraphId
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.tensor.dtensor import DTensor


class NodeContext:
    """Addresses and libraries for the nodes of one graph on one stream."""

    def __init__(
        self,
        device: DeviceContext,
        arena: DeviceArena,
        plan: MemoryPlan,
        half: DType | None,
        preparations: Preparations,
        graph: GraphId,
        stream: StreamKind,
    ) -> None:
        self._device, self._arena, self._plan, self.half = device, arena, plan, half
        self._preparations, self._graph, self._stream = preparations, graph, stream

    @property
    def validating(self) -> bool:
        return self._graph in VALIDATION_GRAPHS

    @property
    def convolutions(self) -> Convolutions:
        return self._device.convolutions

    @property
    def products(self) -> Products:
        return self._device.products

    @property
    def collectives(self) -> Collectives:
        return self._device.collectives

    def tensor(self, tensor_id: int) -> DTensor:
        return self._plan.tensor(tensor_id)

    def buffer(self, tensor_id: int) -> Buffer:
        tensor = self._plan.tensor(tensor_id)
        return self._arena.tensor(tensor.offset, tensor.nbytes)

    def span(self, span: Span) -> Buffer:
        return self._arena.tensor(*self._plan.resolve_span(span))

    def scratch(self, nbytes: int) -> Buffer:
        return self._arena.scratch(self._stream, nbytes)

    def shared(self, key: Hashable, nbytes: int) -> Buffer:
        return self._arena.named(key, nbytes)

    def prepare(self, key: Hashable, calls: Sequence[CudaCall]) -> None:
        if not self.validating:
            raise GraphError(f"{self._graph.name}: a preparation outside the validation graphs would run too rarely")
        self._preparations.add(self._graph in EMA_GRAPHS, key, calls)
