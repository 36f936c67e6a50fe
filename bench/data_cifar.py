"""CIFAR: pad 4, crop 32, flip, normalise to fp32; samples/s delivered on one core, against FFCV, DALI and PyTorch."""

from __future__ import annotations

from bench.harness import TORCH_ENV, Contender, one_core, run_bench
from bench.pictures import cifar_folder

BATCH = 128


def main() -> None:
    folder, cpus = str(cifar_folder()), one_core()
    work = ["--folder", folder, "--batch", str(BATCH)]
    common = [*work, "--samples", "100000"]
    ours = [
        Contender("ours, one worker", "bench.ours.pictures", ["--data", "cifar10", *common], False, 1, cpus=cpus),
    ]
    style = "bench.peers.torch_data"
    peers = [
        Contender("FFCV raw", "bench.peers.ffcv_data", ["--kind", "cifar", *common], True, 1, TORCH_ENV, cpus),
        Contender("PyTorch whole batches", style, ["--style", "batched", *common], True, 1, TORCH_ENV, cpus),
        Contender("DALI", "bench.peers.dali_data", ["--kind", "cifar", *common], True, 1, TORCH_ENV, cpus),
        Contender(
            "defaults: torchvision in a DataLoader",
            style,
            ["--style", "cifar", *work, "--samples", "10000"],
            True,
            1,
            TORCH_ENV,
            cpus,
        ),
    ]
    run_bench("data_cifar", "samples/s", ours, peers, rounds=7, higher_is_better=True)


if __name__ == "__main__":
    main()
