"""The compiled training graph of any network has the gradient that central differences of its loss give; fused and
plain graphs give the same numbers."""

import numpy as np
import pytest
from blueprint_strategies import Drawn, blueprints
from float64_model import start, step, validate
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.enums import TTA
from renaissance.core.shape import Shape
from renaissance.graph import CompiledModel, CompileRequest, Variant, compile_model, fusion
from renaissance.graph import blueprint as bp

STEP = 1e-6
TOLERANCE = 2e-5
"""Of the gradient's size: truncation is STEP^2 times a third derivative that batch norm makes large, and cancellation
1e-16 / STEP; a unit that crosses a kink within STEP may add its share."""
FEW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking a network takes minutes
    suppress_health_check=list(HealthCheck),
)
FUSIONS = (
    "fuse_residuals",
    "fold_batch_norms",
    "mask_before_pools",
    "fuse_gradient_sums",
    "fuse_relu_backward",
)


RICH = Drawn(
    bp.BluePrint(
        bp.seq(
            *(bp.conv(6, 3, 1, 1, bias=True), bp.relu(), bp.maxpool(3, 2, 1), bp.bn(), bp.relu6()),
            *(bp.block(6, bp.BlockStyle.RESNET_3_3), bp.block(8, bp.BlockStyle.RESNET_3_3_DS), bp.mbconv(2, 8, 1)),
            *(
                bp.cbr(8, 2),
                bp.maxpool(2),
                bp.dropout(0.3),
                bp.flatten(),
                bp.bn(),
                bp.fc(9),
                bp.relu(),
                bp.fc(8),
                bp.relu(),
                bp.fc(5),
            ),
        )
    ),
    Shape.of(12, 12, 3),
    5,
)
"""Every fusion, in one network."""


def request_for(drawn: Drawn, **changes: object) -> CompileRequest:
    sample = drawn.sample
    sizes = {"height": sample.h, "width": sample.w, "channels": sample.c, "num_classes": drawn.num_classes}
    facts: dict[str, object] = {**sizes, "train_batch": 4, "val_batch": 3, **changes}
    return CompileRequest(**facts)  # type: ignore[arg-type]


def plain(drawn: Drawn, request: CompileRequest) -> CompiledModel:
    """The model without any fusion."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FUSIONS:
            patch.setattr(fusion, name, lambda nodes, *declare: list(nodes))
        return compile_model(drawn.blueprint, request)


@FEW
@example(drawn=RICH, half=None, slot=1, valid=3, seed=1)
@given(
    drawn=blueprints(longest=4, widest=6, largest_image=6),
    half=st.sampled_from([None, DType.FP16]),
    slot=st.sampled_from([0, 1]),
    valid=st.sampled_from([4, 3]),
    seed=st.integers(0, 2**16),
)
def test_gradients_of_any_network_are_those_of_its_loss(
    drawn: Drawn, half: DType | None, slot: int, valid: int, seed: int
) -> None:
    model = compile_model(drawn.blueprint, request_for(drawn, half=half))
    m = start(model, seed, valid)
    start_of = dict(m)
    step(model, m, slot)
    scale = m[model.scalar("scaling")].item()
    rng = np.random.default_rng(seed)
    for p in model.parameters:
        tensor = p.weight if p.half is None else p.half
        direction = rng.normal(size=p.shape.dims)
        losses = [step(model, start_of | {tensor: m[tensor] + h * direction}, slot) for h in (STEP, -STEP)]
        expected = (losses[0] - losses[1]) / (2 * STEP)
        size = np.linalg.norm(m[p.grad]) / scale
        assert (m[p.grad] * direction).sum() / scale == pytest.approx(expected, abs=TOLERANCE * max(size, 1.0)), p.name


@FEW
@example(drawn=RICH, tta=TTA.LR, slot=1, seed=1)
@given(
    drawn=blueprints(longest=4, widest=6, largest_image=6),
    tta=st.sampled_from(list(TTA)),
    slot=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**16),
)
def test_a_fused_graph_computes_what_the_plain_graph_computes(drawn: Drawn, tta: TTA, slot: int, seed: int) -> None:
    request = request_for(drawn, tta=tta, ema=True)
    models = compile_model(drawn.blueprint, request), plain(drawn, request)
    fused, same = ({}, {})
    for model, found in zip(models, (fused, same), strict=True):
        m = start(model, seed, 4)
        found["loss"] = step(model, m, slot)
        found |= {p.name: m[p.grad] for p in model.parameters}
        found |= {n.name: np.stack([m[n.next_mean], m[n.next_var]]) for n in model.batch_norms}
        for ema in (False, True):
            m = start(model, seed, 3, Variant.VAL_BASE)
            found[f"logits, ema={ema}"] = validate(model, m, slot, ema)
    assert fused.keys() == same.keys()
    for name, values in fused.items():
        np.testing.assert_allclose(values, same[name], rtol=1e-9, atol=1e-9, err_msg=name)
    np.testing.assert_array_equal(fused["logits, ema=True"], fused["logits, ema=False"])  # equal weights here
