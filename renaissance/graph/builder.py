"""GraphBuilder: emits nodes for the forward, backward and update parts, inferring types for all six variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from renaissance.core.dtype import DType
from renaissance.core.errors import GraphError, RenaissanceError, ShapeError
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue, Node
from renaissance.graph.ids import GraphId, Variant
from renaissance.graph.model import InputSlot, Parameter
from renaissance.graph.ops import OpDef, Output, Place, TensorType, op_def
from renaissance.graph.request import CompileRequest
from renaissance.graph.tensors import PARAMETER_KINDS, TensorDecl, TensorTable, place_region, scalar_defs
from renaissance.tensor.dtensor import channel_alignment
from renaissance.tensor.init import Initializer


class GraphBuilder:
    """Collects nodes and tensors. ``graph`` is the bucket of the next node, ``scope`` names new tensors and errors.

    Implements ``gradients.GradientBuilder``.
    """

    def __init__(self, request: CompileRequest) -> None:
        self.request = request
        self.table = TensorTable()
        self.nodes: list[Node] = []
        self.parameters: list[Parameter] = []
        self.graph = GraphId.SIMPLE_TASK_GRAPH
        self.scope = ""
        self.gradients: dict[int, int] = {}
        self._initializer = request.initializer or Initializer()
        self._depends: set[int] = set()
        self._param_grad: dict[int, int] = {}
        self.inputs = (self._input("a", Region.I_A_LABEL), self._input("b", Region.I_B_LABEL))
        self.label = self._per_batch("label_smce", Region.T_TEMP_INT32, DType.INT32)
        self.scalars: dict[str, int] = {
            d.name: self.table.fixed(d.name, d.region, d.region.dtype(request.half)) for d in scalar_defs(request)
        }

    def _per_batch(self, name: str, region: Region, dtype: DType) -> int:
        shapes = tuple(Shape(self.request.batch(v)) for v in Variant)
        return self.table.add(TensorDecl(name, region, dtype, shapes))

    def _input(self, slot: str, label_region: Region) -> InputSlot:
        label = self._per_batch(f"label_{slot}", label_region, DType.INT32)
        shapes = tuple(Shape(self.request.batch(v), *self.request.size(v), self.request.channels) for v in Variant)
        dtype = self.request.half or DType.FP32
        data = self.table.add(TensorDecl(f"data_{slot}", Region(label_region + 1), dtype, shapes))
        return InputSlot(label, data)

    def parameter(self, role: str, kind: str, shape: Shape) -> int:
        """The tensor that compute ops read for parameter ``scope.role``: the half copy with AMP, else the master.

        Declares weight, half copy, gradient and moments together, so that all paired regions have the same order.
        """
        name = f"{self.scope}.{role}"
        known = next((p for p in self.parameters if p.name == name), None)
        if known is None:
            known = self._declare_parameter(name, kind, shape)
        elif known.shape != shape:
            raise ShapeError(f"parameter {name} has shape {known.shape} and {shape}; expected one shape")
        compute = known.half if known.half is not None else known.weight
        self._depends.add(compute)
        self._param_grad[compute] = known.grad
        return compute

    def _declare_parameter(self, name: str, kind: str, shape: Shape) -> Parameter:
        regions, half, request = PARAMETER_KINDS[kind], self.request.half, self.request
        init = self._initializer.config_for(regions.weight)

        def declare(suffix: str, region: Region, wanted: bool = True) -> int | None:
            return self.table.fixed(name + suffix, region, region.dtype(half), shape) if wanted else None

        weight = self.table.fixed(name, regions.weight, DType.FP32, shape, init)
        grad = self.table.fixed(f"{name}.grad", regions.grad, DType.FP32, shape)
        parameter = Parameter(
            ordinal=len(self.parameters),
            name=name,
            shape=shape,
            init=init,
            decay=regions.decay,
            weight=weight,
            grad=grad,
            half=declare(".half", regions.half, half is not None) if regions.half is not None else None,
            m=declare(".m", regions.m, request.has_momentum),
            v=declare(".v", regions.v, request.is_adam),
        )
        self.parameters.append(parameter)
        return parameter

    def emit(
        self,
        op: str,
        inputs: Sequence[int] = (),
        outputs: Sequence[int | None] = (),
        attrs: Mapping[str, AttrValue] | None = None,
        *,
        name: str | None = None,
        like: int | None = None,
        spans_in: Sequence[Span] = (),
        spans_out: Sequence[Span] = (),
    ) -> tuple[int, ...]:
        """Append a node and return its output ids.

        Outputs whose place is STATE are given in ``outputs``; the others are allocated as ``scope.role`` (or ``name``)
        with the inferred type, or the type of ``like``. Raises ShapeError or DTypeError that names the layer and the
        variant when the inputs do not fit.
        """
        definition, attributes = op_def(op), dict(attrs or {})
        inferred = [self._infer(definition, inputs, attributes, v) for v in Variant]
        given = list(outputs) + [None] * (len(definition.outputs) - len(outputs))
        ids: list[int] = []
        for i, (role, tensor) in enumerate(zip(definition.outputs, given, strict=True)):
            if tensor is None and role.place is Place.STATE:
                if not role.role.endswith("?"):
                    raise GraphError(f"{self.scope}: {op} needs an existing tensor for output {role.role}")
                continue
            ids.append(self._allocate(role, [t[i] for t in inferred], name, like) if tensor is None else tensor)
        if any(i in self._depends for i in inputs):
            self._depends.update(ids)
        node = Node(
            index=len(self.nodes),
            op=op,
            attrs=attributes,
            inputs=tuple(inputs),
            outputs=tuple(ids),
            spans_in=tuple(spans_in),
            spans_out=tuple(spans_out),
            graph=self.graph,
            stream=definition.stream,
        )
        self.nodes.append(node)
        return node.outputs

    def _infer(
        self, definition: OpDef, inputs: Sequence[int], attrs: Mapping[str, AttrValue], variant: Variant
    ) -> tuple[TensorType, ...]:
        if definition.types is None:
            return ()
        types = [self.table.type(i, variant) for i in inputs]
        try:
            return definition.types(types, attrs)
        except RenaissanceError as error:
            raise type(error)(f"layer {self.scope} ({variant.name}): {error}") from None

    def _allocate(self, role: Output, types: Sequence[TensorType], name: str | None, like: int | None) -> int:
        full_name = name or f"{self.scope}.{role.role}"
        if like is not None:
            decl = self.table.decls[like]
            dtype, shapes = decl.dtype, decl.shapes
        else:
            if types[0].dtype is None:
                raise GraphError(f"{full_name}: its type has to be given")
            dtype, shapes = types[0].dtype, tuple(t.shape for t in types)
        return self.table.add(TensorDecl(full_name, place_region(role.place, dtype), dtype, shapes))

    def is_row(self, tensor: int) -> bool:
        """True when the values of a sample are one gapless row, so that a flatten is only another view."""
        decl = self.table.decls[tensor]
        alignment = channel_alignment(decl.dtype, decl.region, self.request.backend)
        return all(s.h * s.w == 1 or s.c % alignment == 0 for s in decl.shapes)

    # What gradient rules use (gradients.GradientBuilder).

    def needs_gradient(self, tensor: int) -> bool:
        return tensor in self._depends

    def parameter_gradient(self, tensor: int) -> int:
        try:
            return self._param_grad[tensor]
        except KeyError:
            raise GraphError(f"tensor {self.table.decls[tensor].name!r} is not a parameter") from None

    def scalar(self, name: str) -> int:
        return self.scalars[name]

    def emit_into(
        self, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], attrs: Mapping[str, AttrValue] | None = None
    ) -> None:
        self.emit(op, inputs, outputs, attrs)

    def emit_gradient(
        self,
        op: str,
        inputs: tuple[int, ...],
        wrt: int,
        attrs: Mapping[str, AttrValue] | None = None,
        suffix: str = "grad",
    ) -> int:
        name = f"{self.table.decls[wrt].name}.{suffix}"
        return self.emit(op, inputs, (), attrs, name=name, like=wrt)[0]

    def add_gradient(self, tensor: int, gradient: int) -> None:
        if tensor in self.gradients:
            op_def("ADD_FWD")  # a value with several consumers needs a sum; raises while the op does not exist
        self.gradients[tensor] = gradient
