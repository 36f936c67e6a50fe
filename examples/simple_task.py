"""A training step written op by op: softmax regression on three clouds of points, ``python examples/simple_task.py``.

A DeepLearningTask writes such graphs from layers; a SimpleTask takes them as they are, for experiments with ops.
"""

import sys

import numpy as np

import renaissance.cli.quiet_start  # noqa: F401  # Ctrl-C during the imports below shows no traceback
from renaissance import InitKind, Shape, Tensor
from renaissance.cli.errors import run_command
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.region import Region, Span
from renaissance.task import SimpleTask, op
from renaissance.tensor import InitConfig

POINTS, INPUTS, CLASSES, STEPS = 300, 2, 3, 200


def main() -> None:
    task = SimpleTask(optimizer=OptimizerKind.SGD)
    x = task.alloc(Shape(POINTS, 1, 1, INPUTS), DType.FP32, Region.I_A_DATA, name="x")
    label = task.alloc(Shape(POINTS, 1, 1, 1), DType.INT32, Region.I_A_LABEL, name="label")
    start = InitConfig(InitKind.XAVIER_UNIFORM)
    w = task.alloc(Shape(CLASSES, 1, 1, INPUTS), DType.FP32, Region.W_FC_WEIGHT, name="w", init=start)
    dw = task.alloc(Shape(CLASSES, 1, 1, INPUTS), DType.FP32, Region.G_FC_WEIGHT, name="dw")
    logits, probs, dlogits = (
        task.alloc(Shape(POINTS, 1, 1, CLASSES), DType.FP32, region)
        for region in (Region.F_FEATURE_FP32, Region.T_TEMP_FP32, Region.F_GRAD_SLOT_FP32)
    )
    partials = task.alloc(Shape(POINTS, 1, 1, 1), DType.FP32, Region.T_TEMP_FP32)
    loss = task.alloc(Shape(), DType.FP32, Region.R_RESULT, name="loss")
    lr, decay, smoothing, scaling = (task.alloc_scalar(name=n) for n in ("lr", "decay", "smoothing", "scaling"))
    valid, has_nan = (task.alloc_scalar(DType.INT32, name=n) for n in ("valid", "has_nan"))
    task.finalize_memory()

    weights, gradients = (Span(region, region) for region in (Region.W_FC_WEIGHT, Region.G_FC_WEIGHT))
    step = [
        op("FC_FWD", (x, w), (logits,), activation="none"),
        op("SOFTMAX_CE_FWD", (logits, label, smoothing, valid), (probs, partials, loss)),
        op("SOFTMAX_CE_BWD", (probs, label, smoothing, valid, scaling), (dlogits,)),
        op("FC_BWD_WEIGHT", (dlogits, x), (dw,)),
        op(
            "RANGE_UPDATE_SGD",
            (lr, decay, scaling, has_nan),
            spans_in=[gradients],
            spans_out=[weights],
            decay=True,
        ),
    ]
    task.add_graph("step", step).compile(seed=1)

    rng = np.random.default_rng(0)
    classes = rng.integers(0, CLASSES, POINTS)
    angles = classes * 2 * np.pi / CLASSES
    points = np.stack([np.cos(angles), np.sin(angles)], 1) + 0.4 * rng.standard_normal((POINTS, 2))
    task.transfer(Tensor.from_numpy(points.astype(np.float32).reshape(POINTS, 1, 1, INPUTS)), x)
    task.transfer(Tensor.from_numpy(classes.astype(np.int32).reshape(POINTS, 1, 1, 1)), label)
    for scalar, value in ((lr, 0.5), (scaling, 1.0), (valid, POINTS)):
        task.fill(scalar, value)
    for _ in range(4):
        task.run_iter("step", times=STEPS // 4)
        right = np.mean(task.fetch(logits).numpy().reshape(POINTS, CLASSES).argmax(1) == classes)
        print(f"loss {task.fetch(loss).numpy().item():.4f}  right {right:.1%}")


if __name__ == "__main__":
    sys.exit(run_command(main))
