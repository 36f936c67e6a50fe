"""compile_model: BluePrint and request in, CompiledModel out. The stages are described in docs/compiler.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from renaissance.core.region import ZERO_GRAD_SPAN, Region
from renaissance.core.shape import Shape
from renaissance.graph import ordering, passes, storage
from renaissance.graph.arch_plan import ArchPlan, build_arch_plan
from renaissance.graph.atlas import build_atlas, verify_atlas
from renaissance.graph.autodiff import differentiate
from renaissance.graph.blueprint import BluePrint
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant, train_program
from renaissance.graph.lowering import emit_loss, lower_layers
from renaissance.graph.memory_checks import verify_plan, verify_plans
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.graph.model import CompiledModel, InputSlot, Parameter
from renaissance.graph.ops import require_supported
from renaissance.graph.request import CompileRequest
from renaissance.graph.tensors import PERSISTENT_SCALARS, regions_of, scalar_defs
from renaissance.graph.update_lowering import emit_communication, emit_metrics, emit_optimizer, emit_weight_cast
from renaissance.graph.verify import lifetimes_of, verify_graph, verify_guards

STATE_SERIES = frozenset("WMVBEN")


def compile_model(blueprint: BluePrint, request: CompileRequest) -> CompiledModel:
    """Compile a model for a request.

    Raises ShapeError, DTypeError or ValueRejected for a model that does not fit together (the message names the
    layer), and MissingKernelError for an op the backend cannot run. The result is verified: GraphError and
    MemoryPlanError mean a fault of the compiler.
    """
    sample = Shape(1, request.height, request.width, request.channels)
    arch_plan = build_arch_plan(blueprint, sample, request.num_classes)
    b = GraphBuilder(request)
    training, logits, probs = _training_nodes(b, arch_plan)
    inference, predicted = _inference_nodes(b, arch_plan)

    named = {i for slot in b.inputs for i in (slot.label, slot.data)} | set(b.scalars.values())
    owned = {i for p in b.parameters for i in _parameter_ids(p)}
    used = {i for n in (*training, *inference) for i in (*n.inputs, *n.outputs)}
    ids = b.table.prune(named | owned | used)
    graphs = (
        ComputationGraph("train", passes.order_nodes(_renamed(training, ids), "train")),
        ComputationGraph("infer", passes.order_nodes(_renamed(inference, ids), "infer")),
    )
    regions = regions_of(b.table.decls)
    share = storage.share_storage(graphs, regions)
    for tensor, owner in share.items():
        b.table.set_share(tensor, owner)
    train, infer = (ordering.add_control_edges(g, regions, lambda i: share.get(i, i)) for g in graphs)
    plans = tuple(b.table.plan(v, request) for v in Variant)
    model = CompiledModel(
        request=request,
        arch_plan=arch_plan,
        plans=plans,
        training=train,
        inference=infer,
        atlas=build_atlas(request, plans, train, infer),
        parameters=tuple(_renamed_parameter(p, ids) for p in b.parameters),
        scalars={name: ids[i] for name, i in b.scalars.items()},
        scalar_init={d.name: d.initial for d in scalar_defs(request)},
        inputs=(_renamed_slot(b.inputs[0], ids), _renamed_slot(b.inputs[1], ids)),
        logits=ids[logits],
        probs=ids[probs],
        predicted=ids[predicted],
        state=_state(plans[0], {name: ids[i] for name, i in b.scalars.items()}),
    )
    require_supported(model.training.ops | model.inference.ops, request.supported_ops)
    verify_model(model)
    return model


def verify_model(model: CompiledModel) -> None:
    """Run every checker on a compiled model. Raises GraphError or MemoryPlanError."""
    for graph in (model.training, model.inference):
        verify_graph(graph, model.plans)
    verify_guards(model.training, model.plans[0], model.scalar("has_nan"), model.state)
    verify_plans(model.plans)
    for plan in model.plans:
        lifetimes = [life for g in (model.training, model.inference) for life in lifetimes_of(g, plan)]
        verify_plan(plan, lifetimes)
    verify_atlas(model.atlas)


def _training_nodes(b: GraphBuilder, arch_plan: ArchPlan) -> tuple[list[Node], int, int]:
    """The training nodes for both input slots; also the ids of logits and probabilities."""
    logits = lower_layers(b, arch_plan, GraphId.FIRST_LAYER_FWD_A, GraphId.DEEP_FWD_BWD)
    probs, _, loss = emit_loss(b, logits, "SOFTMAX_CE_FWD")
    differentiate(b, list(b.nodes), loss)
    emit_communication(b)
    emit_optimizer(b)
    emit_metrics(b, training=True)
    emit_weight_cast(b)
    nodes = passes.fuse_relu_backward(b.nodes)
    regions = regions_of(b.table.decls)
    nodes = passes.eliminate_dead(nodes, regions, keep={logits, probs})
    step = [n for g in train_program(0) for n in nodes if n.graph is g]
    start = len(b.nodes)
    b.graph, b.scope = GraphId.ZERO_GRAD, "zero grad"
    for span in passes.clear_spans(step, regions, ZERO_GRAD_SPAN):
        b.emit("RANGE_CLEAR", spans_out=(span,))
    nodes += b.nodes[start:]
    return passes.mirror_inputs(nodes, _swap(b)), logits, probs


def _inference_nodes(b: GraphBuilder, arch_plan: ArchPlan) -> tuple[list[Node], int]:
    """The validation nodes for both input slots; also the id of the predicted labels."""
    b.nodes = []
    logits = lower_layers(b, arch_plan, GraphId.INF_MAIN_A, GraphId.INF_MAIN_A)
    predicted = emit_loss(b, logits, "SOFTMAX_CE_INF")[0]
    emit_metrics(b, training=False)
    emit_weight_cast(b)
    return passes.mirror_inputs(b.nodes, _swap(b)), predicted


def _swap(b: GraphBuilder) -> Mapping[int, int]:
    first, second = b.inputs
    return {first.label: second.label, first.data: second.data}


def _parameter_ids(p: Parameter) -> tuple[int, ...]:
    return tuple(i for i in (p.weight, p.grad, p.half, p.m, p.v) if i is not None)


def _renamed(nodes: Sequence[Node], ids: Mapping[int, int]) -> list[Node]:
    return [replace(n, inputs=tuple(ids[i] for i in n.inputs), outputs=tuple(ids[i] for i in n.outputs)) for n in nodes]


def _renamed_parameter(p: Parameter, ids: Mapping[int, int]) -> Parameter:
    def new(i: int | None) -> int | None:
        return None if i is None else ids[i]

    return replace(p, weight=ids[p.weight], grad=ids[p.grad], half=new(p.half), m=new(p.m), v=new(p.v))


def _renamed_slot(slot: InputSlot, ids: Mapping[int, int]) -> InputSlot:
    return InputSlot(ids[slot.label], ids[slot.data])


def _state(plan: MemoryPlan, scalars: Mapping[str, int]) -> tuple[int, ...]:
    halves = {r for r in Region if r.name.endswith("_FP16")}
    tensors = {t.id for t in plan.tensors if t.region.series in STATE_SERIES and t.region not in halves}
    return tuple(sorted(tensors | {i for name, i in scalars.items() if name in PERSISTENT_SCALARS}))
