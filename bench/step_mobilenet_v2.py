"""MobileNetV2, 224x224, batch 32: our training step against PyTorch (images per second)."""

from __future__ import annotations

from bench.model_steps import Workload, run


def main() -> None:
    run("step_mobilenet_v2", Workload("mobilenet_v2", batch=32, size=224, channels=3, steps=1, batches=1, rounds=3))


if __name__ == "__main__":
    main()
