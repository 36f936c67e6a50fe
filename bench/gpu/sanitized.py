"""What runs under compute-sanitizer: two steps of a small network with every kind of op, issued call by call."""

from __future__ import annotations

import numpy as np

from renaissance.backend.cuda.device import open_device
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.initial import initialize
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.graph import (
    BluePrint,
    CompileRequest,
    Variant,
    bn,
    compile_model,
    conv,
    dropout,
    fc,
    gap,
    maxpool,
    relu,
    seq,
)

BATCH = 8


def main() -> None:
    layers = seq(conv(16, 3, 1, 1), bn(), relu(), maxpool(2, 2, 0), conv(24, 3, 1, 1), bn(), relu(), gap())
    for optimizer in (OptimizerKind.ADAMW, OptimizerKind.LARS):
        request = CompileRequest(
            height=16, width=16, channels=3, num_classes=10, train_batch=BATCH, val_batch=BATCH, half=DType.FP16,
            optimizer=optimizer, ema=True, external_inputs=False,
        )  # fmt: skip
        model = compile_model(BluePrint(seq(layers, dropout(0.2), fc(32), relu(), fc(10))), request)
        with open_device(0) as device:
            executor = CudaExecutor(model, device=device)
            initialize(executor, model, seed=1)
            for slot in (*executor.own_train_slots, *executor.own_val_slots):
                slot.images[...] = np.random.default_rng(1).standard_normal(slot.images.shape)
            executor.write_scalar("batch_valid", BATCH)
            for slot_index in (0, 1):
                executor.run_uncaptured(Variant.TRAIN_BASE, slot_index)
                executor.run_uncaptured(Variant.VAL_BASE, slot_index)
            print(optimizer.name, executor.read_scalar("loss"))
            executor.close()


if __name__ == "__main__":
    main()
