"""Random models and requests for the graph tests (no tests here)."""

from dataclasses import dataclass

from hypothesis import strategies as st

from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.graph import BluePrint, CompileRequest, fc, flatten, relu, seq
from renaissance.graph.request import UPDATE_OPS

EXAMPLE = BluePrint(seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10)))


def example_request(**changes: object) -> CompileRequest:
    """The request of the MNIST example (bf16, AdamW, batch 200)."""
    facts: dict[str, object] = {
        "height": 28,
        "width": 28,
        "channels": 1,
        "num_classes": 10,
        "train_batch": 200,
        "val_batch": 200,
        "half": DType.BF16,
        "optimizer": OptimizerKind.ADAMW,
        "weight_decay": 1e-4,
        "label_smoothing": 0.1,
    }
    return CompileRequest(**(facts | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    blueprint: BluePrint
    request: CompileRequest


@st.composite
def cases(draw: st.DrawFn, max_width: int = 300, max_batch: int = 70) -> Case:
    """Any MLP with any profile: activations and flattens anywhere, odd batches with tails."""
    fillers = st.lists(st.sampled_from([relu(), flatten()]), max_size=2)
    widths = draw(st.lists(st.integers(1, max_width), min_size=1, max_size=6))
    layers = draw(fillers)
    for width in widths:
        layers += [fc(width, bias=draw(st.booleans())), *draw(fillers)]
    train, val = draw(st.integers(1, max_batch)), draw(st.integers(1, max_batch))
    half = draw(st.sampled_from([None, DType.BF16, DType.FP16]))
    request = CompileRequest(
        height=draw(st.integers(1, 5)),
        width=draw(st.integers(1, 5)),
        channels=draw(st.sampled_from([1, 3, 8])),
        num_classes=widths[-1],
        train_batch=train,
        train_last=draw(st.one_of(st.none(), st.integers(1, train))),
        val_batch=val,
        val_last=draw(st.one_of(st.none(), st.integers(1, val))),
        half=half,
        optimizer=draw(st.sampled_from(list(UPDATE_OPS))),
        grad_clip=draw(st.sampled_from([0.0, 0.5])),
        world_size=draw(st.sampled_from([1, 2])),
        external_inputs=draw(st.booleans()),
    )
    return Case(BluePrint(seq(*layers)), request)
