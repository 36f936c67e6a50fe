"""The example's training step alone, on data in memory: ours against PyTorch's variants (milliseconds per step)."""

from __future__ import annotations

from bench.harness import TORCH_STEP_ENV, Contender, run_bench


def torch_variant(name: str, *arguments: str) -> Contender:
    return Contender(f"torch {name}", "bench.peers.torch_step", list(arguments), True, TORCH_STEP_ENV)


def main() -> None:
    ours = [
        Contender("ours bf16, 2 threads", "bench.ours.step", ["--threads", "2", "--bf16"], False),
        Contender("ours fp32, 2 threads", "bench.ours.step", ["--threads", "2"], False),
    ]
    peers = [
        torch_variant("bf16 eager, fused, 2 threads", "--threads", "2", "--bf16"),
        torch_variant("bf16 eager, fused, bf16 images, 2 threads", "--threads", "2", "--bf16", "--half-inputs"),
        torch_variant("bf16 compiled, fused, 2 threads", "--threads", "2", "--bf16", "--compile"),
        torch_variant("bf16 eager, fused, 1 thread", "--threads", "1", "--bf16"),
        torch_variant("fp32 eager, fused, 2 threads", "--threads", "2"),
        torch_variant("fp32 compiled, fused, 2 threads", "--threads", "2", "--compile"),
        Contender(
            "defaults: torch fp32 eager, AdamW as it comes",
            "bench.peers.torch_step",
            ["--threads", "2", "--default-adamw"],
            True,
        ),
    ]
    run_bench("mnist_step", "ms/step", ours, peers, rounds=9, higher_is_better=False)


if __name__ == "__main__":
    main()
