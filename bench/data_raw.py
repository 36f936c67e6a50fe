"""RandomResizedCrop(224), flip, normalise to fp32 from packed raw pixels; images/s delivered on one core."""

from __future__ import annotations

from bench.harness import TORCH_ENV, Contender, one_core, run_bench
from bench.pictures import packed_photos, photos_folder


def main() -> None:
    cpus = one_core()
    common = ["--batch", "64", "--samples", "1280"]
    packed = str(packed_photos("RAW"))
    ours = [
        Contender(
            "ours, RAW",
            "bench.ours.pictures",
            ["--data", "imagenet", "--folder", packed, "--format", "dts", "--level", "RAW", *common],
            False,
            1,
            cpus=cpus,
        )
    ]
    work = ["--kind", "raw", "--folder", str(photos_folder()), *common]
    peers = [Contender("FFCV raw", "bench.peers.ffcv_data", work, True, 1, TORCH_ENV, cpus)]
    run_bench("data_raw", "images/s", ours, peers, rounds=7, higher_is_better=True)


if __name__ == "__main__":
    main()
