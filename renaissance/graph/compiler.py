"""compile_model: BluePrint and request in, CompiledModel out, in five stages (docs/compiler.md).

    draft     the nodes of both modes for input slots A and B, and the tensors they use, typed in all six variants
    settle    tensors that are used get their ids, nodes their place: two ComputationGraphs
    place     where each tensor lies: storage of values by lifetime, six MemoryPlans with equal offsets
    connect   control edges for every conflict that data edges leave open
    index     the GraphAtlas and the CompiledModel

Each stage is a function from plain data to plain data; ``verify_model`` looks at the result of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from renaissance.core.errors import ShapeError
from renaissance.core.region import ZERO_GRAD_SPAN
from renaissance.core.shape import Shape
from renaissance.graph import fusion, ordering, passes
from renaissance.graph.arch_plan import ArchPlan, build_arch_plan
from renaissance.graph.atlas import build_atlas, verify_atlas
from renaissance.graph.autodiff import differentiate
from renaissance.graph.blueprint import BluePrint
from renaissance.graph.builder import GraphBuilder
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant, train_program
from renaissance.graph.lowering import emit_loss, lower_inference, lower_training
from renaissance.graph.memory_checks import verify_plan, verify_plans
from renaissance.graph.memory_plan import MemoryPlan
from renaissance.graph.model import BatchNorm, CompiledModel, InputSlot, Parameter
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

INFERENCE_PREFIX = "inf."
"""Before the names of values of validation steps: they are tensors of their own, with sizes of their own."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The nodes of a model before their tensors are settled. ``results`` are the values that others read by name."""

    table: TensorTable
    training: Sequence[Node]
    inference: Sequence[Node]
    parameters: tuple[Parameter, ...]
    batch_norms: tuple[BatchNorm, ...]
    scalars: Mapping[str, int]
    inputs: tuple[InputSlot, InputSlot]
    results: Mapping[str, int]


def compile_model(model: BluePrint | ArchPlan, request: CompileRequest) -> CompiledModel:
    """Compile a model, given as the user wrote it or as the plan that was made of it, for a request.

    Raises ShapeError, DTypeError or ValueRejected for a model that does not fit together (the message names the
    layer), and MissingKernelError for an op the backend cannot run. The result is verified: GraphError and
    MemoryPlanError mean a fault of the compiler.
    """
    sample = Shape(1, request.height, request.width, request.channels)
    arch_plan = model if isinstance(model, ArchPlan) else build_arch_plan(model, sample, request.num_classes)
    if (arch_plan.input, arch_plan.num_classes) != (sample, request.num_classes):
        raise ShapeError(
            f"compile: the plan is for input {arch_plan.input} and {arch_plan.num_classes} classes, the request for "
            f"{sample} and {request.num_classes}"
        )
    drafted = draft(arch_plan, request)
    require_supported(frozenset(n.op for n in (*drafted.training, *drafted.inference)), request.supported_ops)
    settled, graphs = settle(drafted, request)
    storage, plans = place(settled, graphs, request)
    graphs = connect(graphs, plans)
    compiled = index(arch_plan, request, settled, graphs, storage, plans)
    verify_model(compiled)
    return compiled


def draft(arch_plan: ArchPlan, request: CompileRequest) -> Draft:
    """Stage 1: nodes and typed tensors."""
    b = GraphBuilder(request)
    training, results = _training_nodes(b, arch_plan)
    inference, more_results = _inference_nodes(b, arch_plan)
    return Draft(
        table=b.table,
        training=training,
        inference=inference,
        parameters=b.parameters,
        batch_norms=tuple(b.batch_norms.values()),
        scalars=b.scalars,
        inputs=b.inputs,
        results=results | more_results,
    )


def settle(d: Draft, request: CompileRequest) -> tuple[Draft, tuple[ComputationGraph, ComputationGraph]]:
    """Stage 2: drop tensors that nobody uses, number the others and the nodes.

    Values that only one of the graphs uses need room for the variants of that graph only.
    """
    named = {i for slot in d.inputs for i in (slot.label, slot.data)} | set(d.scalars.values())
    owned = {i for p in d.parameters for i in p.ids} | {i for bn in d.batch_norms for i in bn.ids}
    used = {i for n in (*d.training, *d.inference) for i in (*n.inputs, *n.outputs)}
    ids = d.table.prune(named | owned | used)
    graphs = (
        ComputationGraph("train", _settled(d.training, "train", ids), request.freeze_first_layer),
        ComputationGraph("infer", _settled(d.inference, "infer", ids)),
    )
    users = [{i for n in g.nodes for i in (*n.inputs, *n.outputs)} for g in graphs]
    for tensor, region in enumerate(regions_of(d.table.decls)):
        if region in PACKED_REGIONS and (tensor in users[0]) != (tensor in users[1]):
            d.table.restrict(tensor, [v for v in Variant if v.is_training == (tensor in users[0])])
    first, second = (InputSlot(ids[slot.label], ids[slot.data]) for slot in d.inputs)
    settled = replace(
        d,
        training=graphs[0].nodes,
        inference=graphs[1].nodes,
        parameters=tuple(p.renamed(ids) for p in d.parameters),
        batch_norms=tuple(bn.renamed(ids) for bn in d.batch_norms),
        scalars={name: ids[i] for name, i in d.scalars.items()},
        inputs=(first, second),
        results={name: ids[i] for name, i in d.results.items()},
    )
    return settled, graphs


def _settled(nodes: Sequence[Node], graph: str, ids: Mapping[int, int]) -> tuple[Node, ...]:
    renamed = [
        replace(n, inputs=tuple(ids[i] for i in n.inputs), outputs=tuple(ids[i] for i in n.outputs)) for n in nodes
    ]
    return passes.order_nodes(renamed, graph)


def place(
    d: Draft, graphs: Sequence[ComputationGraph], request: CompileRequest
) -> tuple[Storage, tuple[MemoryPlan, ...]]:
    """Stage 3: storage of values by lifetime, then one plan per variant, all with the largest slot of any variant."""
    kept = sorted(d.results.values())
    storage = pack_values(graphs, regions_of(d.table.decls), d.table.slots, kept, request.reuse)
    return storage, tuple(d.table.plan(v, request, storage) for v in Variant)


def connect(
    graphs: tuple[ComputationGraph, ComputationGraph], plans: Sequence[MemoryPlan]
) -> tuple[ComputationGraph, ComputationGraph]:
    """Stage 4: the graphs with control edges; they follow from the bytes that nodes touch."""
    train, infer = (ordering.add_control_edges(g, plans[0]) for g in graphs)
    return train, infer


def index(
    arch_plan: ArchPlan,
    request: CompileRequest,
    d: Draft,
    graphs: tuple[ComputationGraph, ComputationGraph],
    storage: Storage,
    plans: tuple[MemoryPlan, ...],
) -> CompiledModel:
    """Stage 5: which variant launches what, and everything under its name."""
    return CompiledModel(
        request=request,
        arch_plan=arch_plan,
        plans=plans,
        training=graphs[0],
        inference=graphs[1],
        atlas=build_atlas(request, plans, *graphs),
        parameters=d.parameters,
        batch_norms=d.batch_norms,
        scalars=d.scalars,
        scalar_init={s.name: s.initial for s in scalar_defs(request)},
        inputs=d.inputs,
        logits=d.results["logits"],
        probs=d.results["probs"],
        predicted=d.results["predicted"],
        val_logits=d.results["val_logits"],
        val_probs=d.results["val_probs"],
        state=state_tensors(d.table, d.scalars),
        values=tuple(sorted(storage.offsets)),
        live_bytes=storage.live,
    )


def verify_model(model: CompiledModel) -> None:
    """Run every checker on a compiled model. Raises GraphError or MemoryPlanError."""
    for graph in (model.training, model.inference):
        verify_graph(graph, model.plans)
    verify_guards(model.training, model.plans[0], model.scalar("has_nan"), model.state)
    verify_plans(model.plans)
    results = {model.logits, model.probs, model.predicted, model.val_logits, model.val_probs}
    graphs = (model.training, model.inference)
    lifetimes = [life for g in graphs for life in lifetimes_of(g, model.plans[0], results)]
    for plan in model.plans:
        verify_plan(plan, lifetimes)
    verify_atlas(model.atlas)


def _training_nodes(b: GraphBuilder, arch_plan: ArchPlan) -> tuple[list[Node], dict[str, int]]:
    """The training nodes for both input slots, and the results of a step."""
    logits = lower_training(b, arch_plan)
    probs, _, loss = emit_loss(b, logits, "SOFTMAX_CE_FWD")
    b.nodes = fusion.fuse_residuals(b.nodes)
    differentiate(b, list(b.nodes), loss)
    emit_update(b)
    nodes = fusion.mask_before_pools(b.nodes, b.declare_gradient)
    nodes = fusion.fuse_relu_backward(fusion.fuse_gradient_sums(nodes))
    regions = regions_of(b.table.decls)
    nodes = passes.eliminate_dead(nodes, regions, keep={logits, probs})
    nodes += _zero_gradients(b, nodes)
    return passes.mirror_inputs(nodes, _swap(b)), {"logits": logits, "probs": probs}


def _zero_gradients(b: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """What a step has to clear first. One without the first layer's backward pass overwrites the fewest gradients."""
    program = train_program(0, frozen=b.request.freeze_first_layer)
    step = [n for g in program for n in nodes if n.graph is g]
    start = len(b.nodes)
    b.graph, b.scope = GraphId.ZERO_GRAD, "zero grad"
    for span in passes.clear_spans(step, regions_of(b.table.decls), ZERO_GRAD_SPAN):
        b.emit("RANGE_CLEAR", spans_out=(span,))
    return b.nodes[start:]


def _inference_nodes(b: GraphBuilder, arch_plan: ArchPlan) -> tuple[list[Node], dict[str, int]]:
    """The validation nodes for both input slots, with the main and the averaged weights, and the results of a step."""
    b.nodes, b.prefix = [], INFERENCE_PREFIX
    for ema in (True, False)[not b.request.ema :]:  # both write the same values, in programs of their own
        start = len(b.nodes)
        logits = lower_inference(b, arch_plan, ema)
        predicted, probs = emit_loss(b, logits, "SOFTMAX_CE_INF")[:2]
        b.nodes[start:] = fusion.fuse_residuals(fusion.fold_batch_norms(b.nodes[start:]))
    emit_metrics(b, training=False)
    emit_weight_cast(b)
    emit_inference_preparation(b)
    results = {"predicted": predicted, "val_logits": logits, "val_probs": probs}
    return passes.mirror_inputs(b.nodes, _swap(b)), results


def _swap(b: GraphBuilder) -> Mapping[int, int]:
    first, second = b.inputs
    return {first.label: second.label, first.data: second.data}
