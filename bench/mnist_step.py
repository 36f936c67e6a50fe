"""The example's training step alone, on data in memory: ours against PyTorch's variants (milliseconds per step)."""

from __future__ import annotations

from bench.harness import TORCH_STEP_ENV, Contender, run_bench


def torch_variant(name: str, threads: int, *arguments: str) -> Contender:
    options = ["--threads", str(threads), *arguments]
    name = f"torch {name}, {threads} threads"
    return Contender(name, "bench.peers.torch_step", options, True, threads, TORCH_STEP_ENV)


def main() -> None:
    ours = [
        Contender("ours bf16, 2 threads", "bench.ours.step", ["--threads", "2", "--bf16"], False, 2),
        Contender("ours fp32, 2 threads", "bench.ours.step", ["--threads", "2"], False, 2),
    ]
    peers = [
        torch_variant("bf16 eager, fused", 2, "--bf16"),
        torch_variant("bf16 eager, fused, bf16 images", 2, "--bf16", "--half-inputs"),
        torch_variant("bf16 compiled, fused", 2, "--bf16", "--compile"),
        torch_variant("bf16 eager, fused", 1, "--bf16"),
        torch_variant("fp32 eager, fused", 2),
        torch_variant("fp32 compiled, fused", 2, "--compile"),
        Contender(
            "defaults: torch fp32 eager, AdamW as it comes",
            "bench.peers.torch_step",
            ["--threads", "2", "--default-adamw"],
            True,
            2,
        ),
    ]
    run_bench("mnist_step", "ms/step", ours, peers, rounds=9, higher_is_better=False)


if __name__ == "__main__":
    main()
