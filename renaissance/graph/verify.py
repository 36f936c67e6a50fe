"""The graph verifier: independent of the passes, it looks at a finished graph with its plans and programs.

Checked for every program (launch order): known ops with the right number of tensors, spans and attributes; types of
all outputs in every variant; one definition per value, before its first use; edges that point forward; and no race:
two nodes that touch the same bytes, one of them writing, are ordered by a path of edges. Addresses come from the
plan, so a shared gradient slot without its edge is found as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from renaissance.core.errors import GraphError
from renaissance.core.region import Region
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.dependence import VALUE_REGIONS, data_predecessors, effects
from renaissance.graph.ids import GraphId, Variant
from renaissance.graph.memory_plan import INPUT_REGIONS, MemoryPlan
from renaissance.graph.ops import TensorType, check_arity, check_types, op_def, roles_for

Range = tuple[int, int, int]
"""(address space, first byte, byte after the last): space -1 is the arena, else an external region."""

ARENA = -1
INPUT_GRAPHS = frozenset(
    {
        GraphId.TRANSFER_A,
        GraphId.TRANSFER_B,
        GraphId.FIRST_LAYER_FWD_A,
        GraphId.FIRST_LAYER_FWD_B,
        GraphId.FIRST_LAYER_BWD_A,
        GraphId.FIRST_LAYER_BWD_B,
        GraphId.INF_MAIN_A,
        GraphId.INF_MAIN_B,
        GraphId.INF_EMA_A,
        GraphId.INF_EMA_B,
        GraphId.SIMPLE_TASK_GRAPH,
    }
)
"""Graphs that exist per input slot and may read it."""


def verify_graph(graph: ComputationGraph, plans: Sequence[MemoryPlan]) -> None:
    """Raise GraphError that names the node when a rule is broken. ``plans``: one per Variant."""
    for at, node in enumerate(graph.nodes):
        if node.index != at:
            raise GraphError(f"{node.label} is at position {at}; expected index and position to agree")
        _check_node(node, plans[Variant.TRAIN_BASE])
        _check_types(node, [p for v, p in zip(Variant, plans, strict=True) if v.is_training == (graph.name == "train")])
    launched = {g for p in graph.programs for g in p}
    for graph_id in graph.graph_ids:
        if graph_id not in launched:
            raise GraphError(f"graph {graph_id.name} has nodes, but no program of {graph.name!r} launches it")
    for ids in graph.programs:
        verify_program(graph.program(ids), plans[Variant.TRAIN_BASE])


def verify_alone(program: Sequence[Node], plan: MemoryPlan) -> None:
    """As ``verify_graph`` for one launch sequence by itself, whose values may have been written before it."""
    for node in program:
        _check_node(node, plan)
        _check_types(node, [plan])
    written = {tensor for node in program for tensor in node.outputs}
    verify_program(program, plan, given={t.id for t in plan.tensors} - written)


def verify_program(program: Sequence[Node], plan: MemoryPlan, given: Collection[int] = ()) -> None:
    """Check definitions, order and races of one launch sequence. ``given``: values that exist before it."""
    regions = tuple(t.region for t in plan.tensors)
    _check_definitions(program, regions, plan, given)
    position = {n.index: at for at, n in enumerate(program)}
    data = data_predecessors(program, regions)
    edges: list[list[int]] = []
    for at, node in enumerate(program):
        # what is not in the program is a node of the other input slot
        before = [position[p] for p in data[node.index] | set(node.after) if p in position]
        if before and max(before) >= at:
            raise GraphError(f"{node.label} must follow {program[max(before)].label}, but runs before it")
        edges.append(before)
    _check_races(program, _comparable(edges), plan)


LOSS_SCALE = frozenset({"scaling", "good_steps"})


def verify_guards(graph: ComputationGraph, plan: MemoryPlan, has_nan: int, state: Collection[int]) -> None:
    """Raise GraphError unless a skipped step leaves no trace except the loss scale (law 5).

    Every node of a step that writes one of the ``state`` tensors has to read the NaN flag, or one made from it, and to
    run after the check that sets it; the check has to look at all that a step hands on.
    """
    persistent, persisting = frozenset(state), {plan.tensor(i).region for i in state}
    for ids in graph.programs:
        program = graph.program(ids)
        checks = [at for at, node in enumerate(program) if has_nan in node.outputs]
        flags = {has_nan} | {i for n in program if n.op == "FLAG_OR" and has_nan in n.inputs for i in n.outputs}
        if checks:
            _check_watched(program[checks[0]], plan)
        elif any(n.graph is GraphId.OPTIMIZER for n in program):
            raise GraphError(f"graph {graph.name}: a step with an optimizer has no node that sets has_nan")
        for at, node in enumerate(program if checks else ()):
            effect = effects(node)
            written = {plan.tensor(i).name for i in effect.written_tensors if i in persistent} - LOSS_SCALE
            written |= {r.name for r in effect.written_regions if r in persisting}
            if written and flags.isdisjoint(node.inputs):
                raise GraphError(f"{node.label} changes {', '.join(sorted(written))} without reading has_nan")
            if written and at < checks[0]:
                raise GraphError(f"{node.label} changes {', '.join(sorted(written))} before has_nan is set")


def _check_watched(check: Node, plan: MemoryPlan) -> None:
    """The NaN check reads the gradients, the loss and the statistics of the batch, as far as there are any."""
    handed_on = {r for r in Region if r.series == "G" and not r.name.endswith("_FP16")}
    handed_on |= {Region.R_RESULT, Region.B_NEXT_MEAN, Region.B_NEXT_VAR}
    unseen = {r.name for r in handed_on if plan.is_populated(r)} - {r.name for r in effects(check).read_regions}
    if unseen:
        raise GraphError(f"{check.label} does not look at {', '.join(sorted(unseen))}; a NaN there would persist")


def _check_node(node: Node, plan: MemoryPlan) -> None:
    definition = op_def(node.op)
    inputs = roles_for(definition, definition.inputs, node.attrs)
    outputs = roles_for(definition, [o.role for o in definition.outputs], node.attrs)
    check_arity(node.label, "inputs", len(node.inputs), inputs)
    check_arity(node.label, "outputs", len(node.outputs), outputs)
    check_arity(node.label, "input spans", len(node.spans_in), [s.role for s in definition.spans_in])
    check_arity(node.label, "output spans", len(node.spans_out), [s.role for s in definition.spans_out])
    if set(node.attrs) != set(definition.attrs):
        raise GraphError(f"{node.label}: attributes {sorted(node.attrs)}; expected {sorted(definition.attrs)}")
    for key, allowed in definition.attrs.items():
        value = node.attrs[key]
        fits = isinstance(value, allowed) if isinstance(allowed, type) else value in allowed
        if not fits:
            raise GraphError(f"{node.label}: attribute {key} is {value!r}; expected {allowed}")
    for tensor in (*node.inputs, *node.outputs):
        region = plan.tensor(tensor).region
        if region in INPUT_REGIONS and node.graph not in INPUT_GRAPHS:
            raise GraphError(f"{node.label} uses {plan.tensor(tensor).name}, but its graph serves both input slots")


def _check_types(node: Node, plans: Iterable[MemoryPlan]) -> None:
    definition = op_def(node.op)
    for plan in plans:

        def typed(tensor: int, plan: MemoryPlan = plan) -> TensorType:
            t = plan.tensor(tensor)
            return TensorType(t.shape, t.dtype)

        inputs, outputs = [typed(i) for i in node.inputs], [typed(i) for i in node.outputs]
        check_types(f"{node.label} in {plan.name}", definition, inputs, outputs, node.attrs)


def _check_definitions(
    program: Sequence[Node], regions: Sequence[Region], plan: MemoryPlan, given: Collection[int]
) -> None:
    """A value is defined once and before it is read, through its region as well: what an earlier step left there is
    not a gradient of this one."""
    defined: dict[int, Node] = {}
    filled: set[Region] = set()
    for node in program:
        effect = effects(node)
        for tensor in sorted(effect.read_tensors):
            known = tensor in defined or tensor in given or regions[tensor] in filled
            if regions[tensor] in VALUE_REGIONS and not known:
                raise GraphError(f"{node.label} reads {plan.tensor(tensor).name} before it is defined")
        for region in sorted(effect.read_regions & VALUE_REGIONS - filled):
            if missing := [i for i in plan.ids(region) if i not in defined and i not in given]:
                name = plan.tensor(missing[0]).name
                raise GraphError(f"{node.label} reads {region.name}, but nothing defines {name} before it")
        for tensor in node.outputs:
            if regions[tensor] in VALUE_REGIONS:
                if tensor in defined:
                    raise GraphError(
                        f"{node.label} defines {plan.tensor(tensor).name} again; first by {defined[tensor].label}"
                    )
                defined[tensor] = node
        filled |= effect.written_regions - effect.read_regions


def _check_races(program: Sequence[Node], comparable: Sequence[int], plan: MemoryPlan) -> None:
    """Sweep over the ranges by address: where two overlap, every writer must be ordered with every other user."""
    users: dict[Range, tuple[int, int]] = {}  # range -> positions that read it, positions that write it, as bits
    for at, node in enumerate(program):
        reads, writes = _byte_access(node, plan)
        for touched in reads:
            users[touched] = (users.get(touched, (0, 0))[0] | 1 << at, users.get(touched, (0, 0))[1])
        for touched in writes:
            users[touched] = (users.get(touched, (0, 0))[0], users.get(touched, (0, 0))[1] | 1 << at)
    active: list[Range] = []
    for touched in sorted(users):
        space, first, _ = touched
        active = [r for r in active if r[0] == space and r[2] > first]
        active.append(touched)
        for other in active:
            _check_pair(program, comparable, users[touched], users[other])


def _comparable(edges: Sequence[Sequence[int]]) -> list[int]:
    """For every position the positions before or after it by a path of edges, and itself, as bits."""
    earlier, later = [1 << at for at in range(len(edges))], [1 << at for at in range(len(edges))]
    for at, before in enumerate(edges):
        for other in before:
            earlier[at] |= earlier[other]
    for at in reversed(range(len(edges))):
        for other in edges[at]:
            later[other] |= later[at]
    return [e | n for e, n in zip(earlier, later, strict=True)]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _check_pair(program: Sequence[Node], comparable: Sequence[int], a: tuple[int, int], b: tuple[int, int]) -> None:
    for (_, writers), (readers, others) in ((a, b), (b, a)):
        for writer in _bits(writers):
            if racing := (readers | others) & ~comparable[writer]:
                first, second = sorted((writer, next(_bits(racing))))
                raise GraphError(
                    f"race: {program[first].label} and {program[second].label} touch the same bytes and no edge "
                    "orders them"
                )


def _byte_access(node: Node, plan: MemoryPlan) -> tuple[set[Range], set[Range]]:
    effect = effects(node)

    def ranges(tensors: Iterable[int], touched: Iterable[Region]) -> set[Range]:
        found = set()
        for i in tensors:
            t = plan.tensor(i)
            found.add((t.region.value if plan.is_external(i) else ARENA, t.offset, t.offset + t.slot_bytes))
        for region in touched:
            base, size = plan.region_bounds(region)
            if size:
                found.add((ARENA, base, base + size))
        return found

    return ranges(effect.read_tensors, effect.read_regions), ranges(effect.written_tensors, effect.written_regions)


def lifetimes_of(
    graph: ComputationGraph, plan: MemoryPlan, kept: Collection[int] = ()
) -> list[Mapping[int, tuple[int, int]]]:
    """First and last position of every value in each program; what the overlap checker compares.

    ``kept``: values that are read after their program, so they live until after its last node.
    """
    result: list[Mapping[int, tuple[int, int]]] = []
    for ids in graph.programs:
        program = graph.program(ids)
        life: dict[int, tuple[int, int]] = {}
        for at, node in enumerate(program):
            for tensor in (*node.inputs, *node.outputs):
                if plan.tensor(tensor).region in VALUE_REGIONS:
                    life[tensor] = (life.get(tensor, (at, at))[0], len(program) if tensor in kept else at)
        result.append(life)
    return result
