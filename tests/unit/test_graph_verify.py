"""The verifiers on random models: what the compiler makes passes, and every planted fault is noticed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from graph_models import EXAMPLE, Case, cases, example_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from renaissance.core.errors import GraphError, RenaissanceError
from renaissance.graph import CompiledModel, Node, Variant, compile_model, verify_model
from renaissance.graph.ids import programs
from renaissance.graph.verify import verify_graph, verify_program

MODEL = compile_model(EXAMPLE, example_request())


def with_nodes(model: CompiledModel, change: Callable[[list[Node]], list[Node]]) -> CompiledModel:
    nodes = tuple(replace(n, index=i) for i, n in enumerate(change(list(model.training.nodes))))
    return replace(model, training=replace(model.training, nodes=nodes))


def find(model: CompiledModel, op: str, which: int = 0) -> Node:
    return [n for n in model.training.nodes if n.op == op][which]


@settings(max_examples=25, deadline=None)
@given(cases())
def test_every_model_compiles_to_a_verified_plan_and_graph(case: Case) -> None:
    model = compile_model(case.blueprint, case.request)  # verifies
    assert model.plans[0].total_bytes % 256 == 0
    logits = {v: model.logits if v.is_training else model.val_logits for v in Variant}
    assert {v: model.tensor(i, v).shape.n for v, i in logits.items()} == {v: case.request.batch(v) for v in Variant}
    assert set(model.values).isdisjoint(model.state)


@settings(max_examples=12, deadline=None)
@given(cases(), st.data())
def test_a_dropped_control_edge_is_a_race(case: Case, data: st.DataObject) -> None:
    model = compile_model(case.blueprint, case.request)
    edges = [(n.index, a) for n in model.training.nodes for a in n.after]
    reader, before = data.draw(st.sampled_from(edges))
    nodes = list(model.training.nodes)
    nodes[reader] = replace(nodes[reader], after=tuple(a for a in nodes[reader].after if a != before))
    broken = replace(model.training, nodes=tuple(nodes))
    with pytest.raises(GraphError, match="race"):
        verify_graph(broken, model.plans)


@settings(max_examples=12, deadline=None)
@given(cases(), st.data())
def test_two_dependent_nodes_that_swap_places_are_noticed(case: Case, data: st.DataObject) -> None:
    model = compile_model(case.blueprint, case.request)
    plan = model.plans[0]
    program = list(model.training.program(programs("train")[data.draw(st.integers(0, 1))]))
    verify_program(program, plan)
    at = data.draw(st.integers(0, len(program) - 2))
    first, second = program[at], program[at + 1]
    depends = set(first.outputs) & set(second.inputs) or first.index in second.after
    assume(depends)
    program[at : at + 2] = [second, first]
    with pytest.raises(GraphError):
        verify_program(program, plan)


@settings(max_examples=10, deadline=None)
@given(cases(), st.data())
def test_a_shifted_tensor_of_any_variant_is_noticed(case: Case, data: st.DataObject) -> None:
    model = compile_model(case.blueprint, case.request)
    plan = model.plans[data.draw(st.sampled_from(list(Variant)))]
    tensor = data.draw(st.integers(0, len(plan.tensors) - 1))
    plan._tensors[tensor] = plan._tensors[tensor].at(plan._tensors[tensor].offset + 256)
    with pytest.raises(RenaissanceError):
        verify_model(model)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("FC_FWD", {"inputs": ()}, "0 inputs; expected x, w, b?"),
        ("FC_FWD", {"attrs": {"activation": "tanh"}}, "attribute activation is 'tanh'"),
        ("FC_FWD", {"attrs": {}}, r"attributes \[\]"),
        ("RANGE_CLEAR", {"spans_out": ()}, "0 output spans"),
        ("RANGE_UPDATE_ADAMW", {"spans_in": ()}, "0 input spans"),
    ],
)
def test_a_node_that_does_not_fit_its_op_is_named(op: str, change: dict[str, object], message: str) -> None:
    node = find(MODEL, op)
    nodes = list(MODEL.training.nodes)
    nodes[node.index] = replace(node, **change)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=message):
        verify_graph(replace(MODEL.training, nodes=tuple(nodes)), MODEL.plans)


def test_an_output_of_the_wrong_shape_is_named() -> None:
    node = find(MODEL, "FC_FWD", 2)
    nodes = list(MODEL.training.nodes)
    nodes[node.index] = replace(node, outputs=(find(MODEL, "FC_FWD", 3).outputs[0],))
    with pytest.raises(GraphError, match="its inputs give"):
        verify_graph(replace(MODEL.training, nodes=tuple(nodes)), MODEL.plans)


def test_a_value_that_is_never_defined_is_named() -> None:
    broken = with_nodes(MODEL, lambda nodes: [replace(n, after=()) for n in nodes if n.op != "SOFTMAX_CE_BWD"])
    with pytest.raises(GraphError, match=r"reads fc4\.y\.grad before it is defined"):
        verify_graph(broken.training, MODEL.plans)


def test_a_value_that_is_defined_twice_is_named() -> None:
    broken = with_nodes(MODEL, lambda nodes: [*nodes[:9], nodes[8], *nodes[9:]])
    with pytest.raises(GraphError, match="again"):
        verify_graph(broken.training, MODEL.plans)


def test_a_deep_node_may_not_read_an_input_slot() -> None:
    deep = find(MODEL, "FC_BWD_WEIGHT", 2)
    nodes = list(MODEL.training.nodes)
    nodes[deep.index] = replace(deep, inputs=(deep.inputs[0], MODEL.inputs[0].data))
    with pytest.raises(GraphError, match="serves both input slots"):
        verify_graph(replace(MODEL.training, nodes=tuple(nodes)), MODEL.plans)


@pytest.mark.parametrize("op", ["ACCUM_METRICS", "ADAM_STEP", "RANGE_UPDATE_ADAMW"])
def test_law5_whatever_persists_reads_the_nan_flag(op: str) -> None:
    flag, other = MODEL.scalar("has_nan"), MODEL.scalar("batch_valid")
    node = find(MODEL, op)
    nodes = list(MODEL.training.nodes)
    nodes[node.index] = replace(node, inputs=tuple(other if i == flag else i for i in node.inputs))
    with pytest.raises(GraphError, match="without reading has_nan"):
        verify_model(replace(MODEL, training=replace(MODEL.training, nodes=tuple(nodes))))


def test_the_atlas_checker_notices_a_wrong_slot() -> None:
    rows = [list(row) for row in MODEL.atlas.entries]
    rows[1][2] = replace(rows[1][2], captured=rows[0][3].captured)
    with pytest.raises(GraphError, match="TRAIN_LAST, FIRST_LAYER_FWD_A"):
        verify_model(replace(MODEL, atlas=replace(MODEL.atlas, entries=tuple(map(tuple, rows)))))
