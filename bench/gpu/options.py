"""The command line of a contender of the GPU step benches; both sides take the same. Standard library only."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuWork:
    """A network and its input; ``steps`` make a round of about a second."""

    model: str
    batch: int
    size: int
    channels: int
    steps: int

    def arguments(self) -> list[str]:
        named = vars(self)
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


WORK = {
    "mlp": GpuWork("mlp", batch=200, size=28, channels=1, steps=2000),
    "resnet18": GpuWork("resnet18", batch=256, size=32, channels=3, steps=60),
    "resnet50": GpuWork("resnet50", batch=256, size=224, channels=3, steps=10),
}


def gpu_step_parser() -> argparse.ArgumentParser:
    """Options that say which network is trained on what."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for name in ("batch", "size", "channels", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), required=True)
    return parser
