"""Training steps on a GPU against PyTorch in one run, images per second: ``python -m bench.gpu.steps resnet18``."""

from __future__ import annotations

import argparse

from bench.gpu.options import WORK
from bench.harness import Contender, run_bench

VARIANTS = {
    "torch fp16 eager": ("fp16",),
    "torch bf16 eager": ("bf16",),
    "torch bf16 compiled": ("bf16", "--compile"),
    "torch bf16 graph": ("bf16", "--graph"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(WORK))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out, which takes a minute")
    options = parser.parse_args()
    arguments = WORK[options.model].arguments()
    ours = [
        Contender(f"ours {dtype}", "bench.gpu.our_step", [*arguments, "--dtype", dtype], False, 1)
        for dtype in ("fp16", "bf16")
    ]
    peers = [
        Contender(name, "bench.gpu.torch_step", [*arguments, "--dtype", *words], True, 1)
        for name, words in VARIANTS.items()
        if not (options.without_compile and "--compile" in words)
    ]
    name = f"gpu_step_{options.model}"
    # A start takes ten times as long as a round, and nobody works between rounds.
    run_bench(name, "images/s", ours, peers, options.rounds, higher_is_better=True, keep=True, settle=0.1)


if __name__ == "__main__":
    main()
