"""compile_model: BluePrint and request in, CompiledModel out. The stages are described in docs/compiler.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from renaissance.core.region import ZERO_GRAD_SPAN
from renaissance.core.shape import Shape
from renaissance.graph import ordering, passes
from renaissance.graph.arch_plan import ArchPlan, build_arch_plan
from renaissance.graph.atlas import build_atlas, verify_atlas
from renaissance.graph.autodiff import differentiate
from renaissance.graph.blueprint import BluePrint
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant, train_program
from renaissance.graph.lowering import emit_loss, lower_inference, lower_training
from renaissance.graph.memory_checks import verify_plan, verify_plans
from renaissance.graph.model import CompiledModel, InputSlot
from renaissance.graph.ops import require_supported
from renaissance.graph.request import CompileRequest
from renaissance.graph.storage import PACKED_REGIONS, Storage, pack_values
from renaissance.graph.tensors import TensorTable, regions_of, scalar_defs, state_tensors
from renaissance.graph.update_lowering import (
    emit_inference_preparation,
    emit_metrics,
    emit_update,
    emit_weight_cast,
)
from renaissance.graph.verify import lifetimes_of, verify_graph, verify_guards


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
    inference, predicted, val_logits, val_probs = _inference_nodes(b, arch_plan)

    named = {i for slot in b.inputs for i in (slot.label, slot.data)} | set(b.scalars.values())
    owned = {i for owner in (*b.parameters, *b.batch_norms.values()) for i in owner.ids}
    used = {i for n in (*training, *inference) for i in (*n.inputs, *n.outputs)}
    ids = b.table.prune(named | owned | used)
    graphs = (
        ComputationGraph("train", passes.order_nodes(_renamed(training, ids), "train"), request.freeze_first_layer),
        ComputationGraph("infer", passes.order_nodes(_renamed(inference, ids), "infer")),
    )
    kept = [ids[i] for i in (logits, probs, predicted, val_logits, val_probs)]
    storage = _store(b.table, graphs, request, kept)
    plans = tuple(b.table.plan(v, request, storage) for v in Variant)
    train, infer = (ordering.add_control_edges(g, plans[0]) for g in graphs)
    model = CompiledModel(
        request=request,
        arch_plan=arch_plan,
        plans=plans,
        training=train,
        inference=infer,
        atlas=build_atlas(request, plans, train, infer),
        parameters=tuple(p.renamed(ids) for p in b.parameters),
        batch_norms=tuple(bn.renamed(ids) for bn in b.batch_norms.values()),
        scalars={name: ids[i] for name, i in b.scalars.items()},
        scalar_init={d.name: d.initial for d in scalar_defs(request)},
        inputs=(_renamed_slot(b.inputs[0], ids), _renamed_slot(b.inputs[1], ids)),
        logits=ids[logits],
        probs=ids[probs],
        predicted=ids[predicted],
        val_logits=ids[val_logits],
        val_probs=ids[val_probs],
        state=state_tensors(b.table, {name: ids[i] for name, i in b.scalars.items()}),
        values=tuple(sorted(storage.offsets)),
        live_bytes=storage.live,
    )
    require_supported(model.training.ops | model.inference.ops, request.supported_ops)
    verify_model(model)
    return model


def _store(
    table: TensorTable, graphs: Sequence[ComputationGraph], request: CompileRequest, kept: Collection[int]
) -> Storage:
    """Where the values lie. A value that only one of the graphs uses needs room for the variants of that graph only."""
    regions = regions_of(table.decls)
    users = [{i for n in g.nodes for i in (*n.inputs, *n.outputs)} for g in graphs]
    for tensor, region in enumerate(regions):
        if region in PACKED_REGIONS and (tensor in users[0]) != (tensor in users[1]):
            table.restrict(tensor, [v for v in Variant if v.is_training == (tensor in users[0])])
    return pack_values(graphs, regions, table.slots(request.backend), kept, request.reuse)


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
    logits = lower_training(b, arch_plan)
    probs, _, loss = emit_loss(b, logits, "SOFTMAX_CE_FWD")
    differentiate(b, list(b.nodes), loss)
    emit_update(b)
    nodes = passes.fuse_relu_backward(b.nodes)
    regions = regions_of(b.table.decls)
    nodes = passes.eliminate_dead(nodes, regions, keep={logits, probs})
    # A step that leaves the first layer's backward pass out overwrites the fewest gradients.
    program = train_program(0, frozen=b.request.freeze_first_layer)
    step = [n for g in program for n in nodes if n.graph is g]
    start = len(b.nodes)
    b.graph, b.scope = GraphId.ZERO_GRAD, "zero grad"
    for span in passes.clear_spans(step, regions, ZERO_GRAD_SPAN):
        b.emit("RANGE_CLEAR", spans_out=(span,))
    nodes += b.nodes[start:]
    return passes.mirror_inputs(nodes, _swap(b)), logits, probs


def _inference_nodes(b: GraphBuilder, arch_plan: ArchPlan) -> tuple[list[Node], int, int, int]:
    """The validation nodes for both input slots; also the ids of predicted labels, logits and probabilities."""
    b.nodes, b.prefix = [], "inf."
    for ema in (True, False)[not b.request.ema :]:  # both write the same values, in programs of their own
        logits = lower_inference(b, arch_plan, ema)
        predicted, probs = emit_loss(b, logits, "SOFTMAX_CE_INF")[:2]
    emit_metrics(b, training=False)
    emit_weight_cast(b)
    emit_inference_preparation(b)
    return passes.mirror_inputs(b.nodes, _swap(b)), predicted, logits, probs


def _swap(b: GraphBuilder) -> Mapping[int, int]:
    first, second = b.inputs
    return {first.label: second.label, first.data: second.data}


def _renamed(nodes: Sequence[Node], ids: Mapping[int, int]) -> list[Node]:
    return [replace(n, inputs=tuple(ids[i] for i in n.inputs), outputs=tuple(ids[i] for i in n.outputs)) for n in nodes]


def _renamed_slot(slot: InputSlot, ids: Mapping[int, int]) -> InputSlot:
    return InputSlot(ids[slot.label], ids[slot.data])
