"""Trains a few steps on GPU 0 in a process of its own and prints the digest of the state."""

from __future__ import annotations

from gpu_models import batches, compiled, losses, on_device, state_digest

from renaissance.backend.cuda.device import open_device
from renaissance.core.dtype import DType


def main() -> None:
    model = compiled("resnet18", DType.FP16)
    with open_device(0) as device:
        executor = on_device(device, model)
        losses(executor, batches(model, 3))
        print(state_digest(executor))
        executor.close()


if __name__ == "__main__":
    main()
