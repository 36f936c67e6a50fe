"""What the step benches share: one network's training step, ours and PyTorch's variants, images per second."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness import TORCH_STEP_ENV, Contender, run_bench

THREADS = 2


@dataclass(frozen=True)
class Workload:
    """A network with the input it is trained on; ``steps`` make a round of some seconds."""

    model: str
    batch: int
    size: int
    channels: int
    steps: int
    batches: int
    rounds: int

    def arguments(self) -> list[str]:
        named = {
            "model": self.model, "batch": self.batch, "size": self.size, "channels": self.channels,
            "steps": self.steps, "batches": self.batches, "threads": THREADS,
        }  # fmt: skip
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def run(bench: str, work: Workload) -> None:
    """Both element types, each against PyTorch's best variant of it."""
    for dtype in ("bf16", "fp32"):
        flags = ["--bf16"] if dtype == "bf16" else []
        ours = [Contender(f"ours {dtype}", "bench.ours.model_step", [*work.arguments(), *flags], False, THREADS)]
        variants = {f"torch {dtype} eager": flags, f"torch {dtype} compiled": [*flags, "--compile"]}
        if dtype == "bf16":
            variants["torch bf16 eager, bf16 images"] = [*flags, "--half-inputs"]
        peers = [
            Contender(name, "bench.peers.torch_model_step", [*work.arguments(), *extra], True, THREADS, TORCH_STEP_ENV)
            for name, extra in variants.items()
        ]
        run_bench(f"{bench}_{dtype}", "images/s", ours, peers, rounds=work.rounds, higher_is_better=True)
