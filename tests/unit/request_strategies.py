"""Random compile requests for a model (no tests here)."""

from dataclasses import replace

from blueprint_strategies import Drawn
from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.enums import TTA, OptimizerKind
from renaissance.core.errors import ShapeError, ValueRejected
from renaissance.graph import CompileRequest, compile_model


@st.composite
def requests(draw: st.DrawFn, model: Drawn, largest_batch: int = 5, **fixed: object) -> CompileRequest:
    """A request of any profile for ``model``; ``fixed`` gives fields a value that is not drawn."""
    train, val = draw(st.integers(1, largest_batch)), draw(st.integers(1, largest_batch))
    facts: dict[str, object] = {
        "height": model.sample.h,
        "width": model.sample.w,
        "channels": model.sample.c,
        "num_classes": model.num_classes,
        "train_batch": train,
        "train_last": draw(st.one_of(st.none(), st.integers(1, train))),
        "val_batch": val,
        "val_last": draw(st.one_of(st.none(), st.integers(1, val))),
        "half": draw(st.sampled_from([None, DType.BF16, DType.FP16])),
        "optimizer": draw(st.sampled_from(list(OptimizerKind))),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "weight_decay": draw(st.sampled_from([0.0, 1e-2])),
        "grad_clip": draw(st.sampled_from([0.0, 0.5])),
        "loss_scale": draw(st.sampled_from([None, 64.0])),
        "ema": draw(st.booleans()),
        "tta": draw(st.sampled_from(TTA)),
        "world_size": draw(st.sampled_from([1, 2])),
        "external_inputs": draw(st.booleans()),
        "reuse": draw(st.booleans()),
    }
    return CompileRequest(**(facts | fixed))  # type: ignore[arg-type]


@st.composite
def fitting_requests(draw: st.DrawFn, model: Drawn, **fixed: object) -> CompileRequest:
    """As ``requests``, and where the model allows it with other sizes at the end of training and for validation, and
    with a first layer that can be frozen."""
    request = draw(requests(model, **fixed))
    sizes = st.one_of(st.none(), st.tuples(st.integers(1, 9), st.integers(1, 9)))
    for changes in (
        {"train_end_size": draw(sizes), "val_size": draw(sizes)},
        {"freeze_first_layer": draw(st.booleans())},
    ):
        changed = replace(request, **changes)  # type: ignore[arg-type]
        try:
            compile_model(model.blueprint, changed)
        except (ShapeError, ValueRejected):
            continue
        request = changed
    return request
