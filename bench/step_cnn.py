"""The small CNN (conv 32, conv 64, fc 128), 28x28, batch 128: our training step against PyTorch (images per second)."""

from __future__ import annotations

from bench.model_steps import Workload, run


def main() -> None:
    run("step_cnn", Workload("cnn", batch=128, size=28, channels=1, steps=100, batches=32, rounds=7))


if __name__ == "__main__":
    main()
