"""Training steps on a GPU against PyTorch in one run, images per second: ``python -m bench.gpu.steps resnet18``.

Ours with the first plans of the libraries' heuristics, and with measured ones ("tuned"), as ``cudnn.benchmark`` has
them for PyTorch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.gpu.options import WORK
from bench.harness import Contender, run_bench

VARIANTS = {
    "torch fp16 eager": ("fp16",),
    "torch bf16 eager": ("bf16",),
    "torch bf16 compiled": ("bf16", "--compile"),
    "torch bf16 graph": ("bf16", "--graph"),
}
QUICK = ("torch fp16 eager", "torch bf16 graph")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(WORK))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out, which takes a minute")
    parser.add_argument("--quick", action="store_true", help="fp16 of ours, PyTorch's two usual best")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="keep measured plans, and take those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options, options.plans or Path(folder) / "plans.json")


def run(options: argparse.Namespace, plans: Path) -> None:
    """``plans``: where measured ones are kept."""
    arguments = WORK[options.model].arguments()
    variants = [(dtype, tuned) for dtype in ("fp16", "bf16")[: 1 if options.quick else 2] for tuned in (False, True)]
    ours = [
        Contender(
            f"ours {dtype}{' tuned' * tuned}",
            "bench.gpu.our_step",
            [*arguments, "--dtype", dtype, *(("--tune", str(plans)) if tuned else ())],
            peer=False,
            threads=1,
        )
        for dtype, tuned in variants
    ]
    peers = [
        Contender(name, "bench.gpu.torch_step", [*arguments, "--dtype", *words], True, 1)
        for name, words in VARIANTS.items()
        if not (options.quick and name not in QUICK) and not (options.without_compile and "--compile" in words)
    ]
    name = f"gpu_step_{options.model}"
    # A start takes ten times as long as a round, and nobody works between rounds.
    run_bench(name, "images/s", ours, peers, options.rounds, higher_is_better=True, keep=True, settle=0.1)


if __name__ == "__main__":
    main()
