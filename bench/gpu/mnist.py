"""The whole MNIST job on a GPU, seconds per epoch: daemon and trainer against PyTorch with a DataLoader."""

from __future__ import annotations

import os

from bench.harness import Contender, run_bench


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    workers = max(1, cores - 2)
    ours = [
        Contender(f"ours fp16, {workers} workers", "bench.ours.e2e", ["--gpu", "--workers", str(workers)], False, 4)
    ]
    peers = [
        Contender(
            f"torch {'compiled' if compiled else 'eager'}, {loaders} workers",
            "bench.gpu.torch_mnist",
            ["--workers", str(loaders), *(["--compile"] if compiled else [])],
            True,
            loaders,
        )
        for loaders in dict.fromkeys((workers, max(1, cores // 2)))
        for compiled in (False, True)
    ]
    run_bench("gpu_mnist_e2e", "s/epoch", ours, peers, rounds=2, higher_is_better=False, keep=True)


if __name__ == "__main__":
    main()
