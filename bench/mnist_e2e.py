"""The whole MNIST job, seconds per epoch: daemon and trainer against PyTorch with a DataLoader.

The screening pass trains one epoch with each of PyTorch's variants; the best three, and PyTorch as it comes, alternate
with ours.
"""

from __future__ import annotations

from itertools import product

from bench.harness import TORCH_ENV, Contender, run_bench


def main() -> None:
    ours = [Contender("ours bf16, 2 workers", "bench.ours.e2e", ["--workers", "2"], False, 4)]
    peers = [
        Contender(
            f"torch {'bf16' if bf16 else 'fp32'} {'compiled' if compiled else 'eager'}, fused, "
            f"{workers} workers, {threads} threads",
            "bench.peers.torch_e2e",
            ["--workers", str(workers), "--threads", str(threads)] + ["--bf16"] * bf16 + ["--compile"] * compiled,
            True,
            workers + threads,
            TORCH_ENV,
        )
        for workers, threads, bf16, compiled in product((2, 1, 0), (1, 2), (True, False), (False, True))
        # One compiled variant per loader setting is enough: compilation changes the step, not the pipeline.
        if not (compiled and threads == 2)
    ]
    peers.append(
        Contender(
            "defaults: torch fp32 eager, 2 workers", "bench.peers.torch_e2e", ["--workers", "2", "--defaults"], True, 4
        )
    )
    run_bench("mnist_e2e", "s/epoch", ours, peers, rounds=3, higher_is_better=False)


if __name__ == "__main__":
    main()
