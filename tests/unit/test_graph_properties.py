"""Random models of every kind of layer with random requests: they compile, and every planted fault is noticed.

``compile_model`` runs all checkers; what a checker would not notice is planted here on purpose.
"""

from dataclasses import replace

import pytest
from blueprint_strategies import Drawn, blueprints
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from request_strategies import fitting_requests

from renaissance.core.errors import GraphError, RenaissanceError
from renaissance.graph import CompiledModel, compile_model, verify_model

BUDGET = settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
SMALL = settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])


@st.composite
def compiled(draw: st.DrawFn, **fixed: object) -> CompiledModel:
    model: Drawn = draw(blueprints())
    request = draw(fitting_requests(model, **fixed))
    return compile_model(model.blueprint, request)


@BUDGET
@given(compiled())
def test_every_model_compiles_and_passes_every_check(model: CompiledModel) -> None:
    assert set(model.values).isdisjoint(model.state)


@SMALL
@given(compiled(), st.data())
def test_a_dropped_edge_is_a_race(model: CompiledModel, data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from([model.training, model.inference]))
    edges = [(n.index, a) for n in graph.nodes for a in n.after]
    assume(edges)
    reader, before = data.draw(st.sampled_from(edges))
    nodes = list(graph.nodes)
    nodes[reader] = replace(nodes[reader], after=tuple(a for a in nodes[reader].after if a != before))
    changed = replace(graph, nodes=tuple(nodes))
    broken = replace(model, **{"training" if graph is model.training else "inference": changed})
    with pytest.raises(GraphError, match="race"):
        verify_model(broken)


@SMALL
@given(compiled(), st.data())
def test_two_live_values_in_one_place_are_noticed(model: CompiledModel, data: st.DataObject) -> None:
    """Moved in all plans alike, so that only lifetimes can tell."""
    values = set(model.values)
    pairs = sorted(
        {
            (min(a, b), max(a, b))
            for graph in (model.training, model.inference)
            for n in graph.nodes
            for a in (*n.inputs, *n.outputs)
            for b in (*n.inputs, *n.outputs)
            if a != b and {a, b} <= values
        }
    )
    moved, onto = data.draw(st.sampled_from(pairs).flatmap(st.permutations))
    for plan in model.plans:
        plan._tensors[moved] = plan.tensor(moved).at(plan.tensor(onto).offset)
    with pytest.raises(RenaissanceError, match=r"outside its region|both are alive|race|before it is defined"):
        verify_model(model)
