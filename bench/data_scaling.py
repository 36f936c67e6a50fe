"""Images/s of RandomResizedCrop(224) from LV1 with one worker and more, up to the cores at hand; ours and FFCV."""

from __future__ import annotations

import os

from bench.harness import TORCH_ENV, Contender, run_bench
from bench.pictures import packed_photos, photos_folder


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, 2, *(n for n in (4, 8, 16, 32) if n < cores), cores})
    common = ["--batch", "64", "--samples", "640"]
    packed = ["--data", "imagenet", "--folder", str(packed_photos("1")), "--format", "dts", "--level", "1", *common]
    jpg = ["--kind", "jpg", "--folder", str(photos_folder()), *common]
    ours = [
        Contender(f"ours, {n} workers", "bench.ours.pictures", [*packed, "--workers", str(n)], False, n) for n in counts
    ]
    peers = [
        Contender(f"FFCV jpg, {n} workers", "bench.peers.ffcv_data", [*jpg, "--workers", str(n)], True, n, TORCH_ENV)
        for n in counts
    ]
    run_bench("data_scaling", "images/s", ours, peers, rounds=5, higher_is_better=True)


if __name__ == "__main__":
    main()
