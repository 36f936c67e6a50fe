"""ResNet-18, CIFAR stem, 32x32, batch 128: our training step against PyTorch (images per second)."""

from __future__ import annotations

from bench.model_steps import Workload, run


def main() -> None:
    run("step_resnet18", Workload("resnet18", batch=128, size=32, channels=3, steps=2, batches=4, rounds=5))


if __name__ == "__main__":
    main()
