"""Samples/s of the example's recipe delivered to a consumer by one worker, against torchvision in one process."""

from __future__ import annotations

from bench.harness import TORCH_ENV, Contender, run_bench


def main() -> None:
    ours = [Contender("ours, one worker", "bench.ours.data", ["--workers", "1"], False, 1)]
    peers = [
        Contender("torchvision PIL", "bench.peers.torchvision_data", ["--style", "pil"], True, 1, TORCH_ENV),
        Contender("torchvision v2 tensors", "bench.peers.torchvision_data", ["--style", "tensor"], True, 1, TORCH_ENV),
    ]
    run_bench("mnist_data", "samples/s", ours, peers, rounds=7, higher_is_better=True)


if __name__ == "__main__":
    main()
