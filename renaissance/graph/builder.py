"""GraphBuilder: emits nodes for the forward, backward and update parts, inferring types for all six variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from renaissance.core.dtype import DType
from renaissance.core.errors import GraphError, RenaissanceError, ShapeError
from renaissance.core.region import Region, Span
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import AttrValue, Node
from renaissance.graph.ids import GraphId, Variant
from renaissance.graph.model import BatchNorm, InputSlot, Parameter
from renaissance.graph.ops import OpDef, Output, Place, TensorType, op_def, roles_for
from renaissance.graph.request import CompileRequest
from renaissance.graph.tensors import (
    PARAMETER_KINDS,
    TensorDecl,
    TensorTable,
    declare_batch_norm,
    declare_parameter,
    place_region,
    scalar_defs,
)
from renaissance.tensor.init import InitConfig, Initializer


class GraphBuilder:
    """Collects nodes and tensors. ``graph`` is the bucket of the next node, ``scope`` names new tensors and errors.

    ``prefix`` and ``view`` go before the names of new values, so that the values of another graph, or of another view
    of the input, are tensors of their own; ``ema`` makes parameters those of the moving average. Implements
    ``gradients.GradientBuilder``.
    """

    def __init__(self, request: CompileRequest) -> None:
        self.request = request
        self.table = TensorTable()
        self.nodes: list[Node] = []
        self.batch_norms: dict[str, BatchNorm] = {}
        self.graph = GraphId.SIMPLE_TASK_GRAPH
        self.scope = ""
        self.prefix = ""
        self.view = ""
        self.ema = False
        self.gradients: dict[int, int] = {}
        self._parameters: dict[str, Parameter] = {}
        self._initializer = request.initializer or Initializer()
        self._depends: set[int] = set()
        self._param_grad: dict[int, int] = {}
        self._gradient_names: set[str] = set()
        sizes = [(request.batch(v), request.size(v)) for v in Variant]
        self._same_size = tuple(Variant(sizes.index(size)) for size in sizes)
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

    def parameter(self, role: str, kind: str, shape: Shape, init: InitConfig | None = None) -> int:
        """The tensor that compute ops read for parameter ``scope.role``: the half copy with AMP, else the master.

        ``init``: how it starts, where the policy of its kind does not say it. Asking again gives the same tensor.
        """
        known = self._parameter(role, kind, shape, init)
        if self.ema and known.ema is not None:
            return known.ema_half if known.ema_half is not None else known.ema
        compute = known.half if known.half is not None else known.weight
        self._depends.add(compute)
        self._param_grad[compute] = known.grad
        return compute

    def _parameter(self, role: str, kind: str, shape: Shape, init: InitConfig | None) -> Parameter:
        name = f"{self.scope}.{role}"
        known = self._parameters.get(name)
        if known is None:
            init = init or self._initializer.config_for(PARAMETER_KINDS[kind].region("W"))
            known = declare_parameter(self.table, self.request, len(self._parameters), name, kind, shape, init)
            self._parameters[name] = known
        elif known.shape != shape:
            raise ShapeError(f"parameter {name} has shape {known.shape} and {shape}; expected one shape")
        return known

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters in the order of their declaration."""
        return tuple(self._parameters.values())

    def batch_norm(self, channels: int, eps: float, ends_block: bool = False) -> BatchNorm:
        """Parameters ``weight`` (gamma) and ``bias`` (beta), statistics and folded form of the layer ``scope``.

        ``ends_block``: it is the last of a residual block, which can start as the identity (see ``Initializer.bn``).
        """
        shape = Shape.of(channels)
        self.parameter("weight", "bn_weight", shape, self._initializer.gamma(ends_block))
        self.parameter("bias", "bn_bias", shape)
        if self.scope not in self.batch_norms:
            gamma, beta = self._parameters[f"{self.scope}.weight"], self._parameters[f"{self.scope}.bias"]
            self.batch_norms[self.scope] = declare_batch_norm(self.table, self.scope, gamma, beta, eps)
        return self.batch_norms[self.scope]

    def emit(
        self,
        op: str,
        inputs: Sequence[int] = (),
        outputs: Sequence[int | None] = (),
        attrs: Mapping[str, AttrValue] | None = None,
        *,
        names: Sequence[str] = (),
        likes: Sequence[int] = (),
        spans_in: Sequence[Span] = (),
        spans_out: Sequence[Span] = (),
    ) -> tuple[int, ...]:
        """Append a node and return its output ids.

        Outputs whose place is STATE are given in ``outputs``; the others are allocated, the i-th of them with name
        ``names[i]`` (default: ``scope.role``) and the type of ``likes[i]`` (default: the inferred one). Raises
        ShapeError or DTypeError that names the layer and the variant when the inputs do not fit.
        """
        definition, attributes = op_def(op), dict(attrs or {})
        inferred = self._infer_all(definition, inputs, attributes)
        present = roles_for(definition, [o.role for o in definition.outputs], attributes)
        given = list(outputs) + [None] * (len(present) - len(outputs))
        declared = {o.role.removesuffix("?"): o for o in definition.outputs}
        ids: list[int] = []
        fresh = 0
        for i, (role, tensor) in enumerate(zip(present, given, strict=True)):
            output = declared[role.removesuffix("?")]
            if tensor is None and output.place is Place.STATE:
                if not role.endswith("?"):
                    raise GraphError(f"{self.scope}: {op} needs an existing tensor for output {role}")
                continue
            if tensor is None:
                name = names[fresh] if fresh < len(names) else f"{self.view}{self.scope}.{role}"
                like = likes[fresh] if fresh < len(likes) else None
                tensor = self._allocate(output, [t[i] for t in inferred], name, like)
                fresh += 1
            ids.append(tensor)
        if not self._depends.isdisjoint(inputs):
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
            stream=definition.stream if definition.stream is not None else self.graph.stream,
        )
        self.nodes.append(node)
        return node.outputs

    def _infer_all(
        self, definition: OpDef, inputs: Sequence[int], attrs: Mapping[str, AttrValue]
    ) -> list[tuple[TensorType | None, ...]]:
        """The types of the outputs in every variant; variants of one size are inferred once."""
        inferred: list[tuple[TensorType | None, ...]] = []
        for variant, same in zip(Variant, self._same_size, strict=True):
            inferred.append(inferred[same] if same < variant else self._infer(definition, inputs, attrs, variant))
        return inferred

    def _infer(
        self, definition: OpDef, inputs: Sequence[int], attrs: Mapping[str, AttrValue], variant: Variant
    ) -> tuple[TensorType | None, ...]:
        if definition.types is None:
            return ()
        types = [self.table.type(i, variant) for i in inputs]
        try:
            return definition.types(types, attrs)
        except RenaissanceError as error:
            raise type(error)(f"layer {self.scope} ({variant.name}): {error}") from None

    def _allocate(self, role: Output, types: Sequence[TensorType | None], name: str, like: int | None) -> int:
        if like is not None:
            decl = self.table.decls[like]
            dtype, shapes = decl.dtype, decl.shapes
        else:
            known = [t for t in types if t is not None]
            if len(known) < len(types) or known[0].dtype is None:
                raise GraphError(f"{name}: its type has to be given")
            dtype, shapes = known[0].dtype, tuple(t.shape for t in known)
        return self.table.add(TensorDecl(self.prefix + name, place_region(role.place, dtype), dtype, shapes))

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

    def kernel_size(self, weight: int) -> int:
        return self.table.decls[weight].shapes[0].h

    def emit_gradient(
        self,
        op: str,
        inputs: tuple[int, ...],
        wrt: int,
        attrs: Mapping[str, AttrValue] | None = None,
        suffix: str = "grad",
    ) -> int:
        return self.emit(op, inputs, (), attrs, names=(self._gradient_name(wrt, suffix),), likes=(wrt,))[0]

    def emit_gradients(
        self,
        op: str,
        inputs: tuple[int, ...],
        wrt: tuple[int, ...],
        existing: tuple[int, ...],
        attrs: Mapping[str, AttrValue],
    ) -> tuple[int, ...]:
        names = [self._gradient_name(tensor, "grad") for tensor in wrt]
        outputs = (None, *existing, *(None,) * (len(wrt) - 1))
        ids = self.emit(op, inputs, outputs, attrs, names=names, likes=wrt)
        return tuple(i for i, given in zip(ids, outputs, strict=True) if given is None)

    def _gradient_name(self, wrt: int, suffix: str) -> str:
        """A name that no tensor has: a value with several consumers has several gradients."""
        base = name = f"{self.table.decls[wrt].name}.{suffix}"
        count = 1
        while name in self._gradient_names:
            count += 1
            name = f"{base}{count}"
        self._gradient_names.add(name)
        return name

    def declare_gradient(self, wrt: int) -> int:
        """A new tensor for a gradient of ``wrt``, for passes that split one."""
        name = self._gradient_name(wrt, "pre_grad")
        decl = self.table.decls[wrt]
        return self.table.add(TensorDecl(name, place_region(Place.GRADIENT, decl.dtype), decl.dtype, decl.shapes))

    def add_gradient(self, tensor: int, gradient: int) -> None:
        known = self.gradients.get(tensor)
        if known is not None:
            gradient = self.emit_gradient("GRAD_SUM", (known, gradient), wrt=tensor, suffix="grad_sum")
        self.gradients[tensor] = gradient
