"""How near the whole pipeline is to its floor: our images/s from JPEG beside a loop that only decodes (simplejpeg)."""

from __future__ import annotations

from bench.harness import Contender, one_core, run_bench
from bench.pictures import packed_photos, photos_folder


def main() -> None:
    cpus = one_core()
    common = ["--batch", "64", "--samples", "640"]
    packed = ["--data", "imagenet", "--folder", str(packed_photos("1")), "--format", "dts", "--level", "1", *common]
    plain = ["--data", "imagenet", "--folder", str(photos_folder()), *common]
    ours = [
        Contender("ours, LV1 windows, whole pipeline", "bench.ours.pictures", packed, False, 1, cpus=cpus),
        Contender("ours, original files, whole pipeline", "bench.ours.pictures", plain, False, 1, cpus=cpus),
    ]
    decode = ["--folder", str(photos_folder()), "--samples", "640"]
    peers = [
        Contender(f"decode only, {what}", "bench.peers.decode", [*decode, *options], True, 1, cpus=cpus)
        for what, options in (
            ("originals", []),
            ("originals at half size", ["--half"]),
            ("quality 90, 4:2:0", ["--encode"]),
            ("quality 90, 4:2:0 at half size", ["--encode", "--half"]),
            ("quality 90, 4:2:0 with Pillow", ["--encode", "--pillow"]),
        )
    ]
    run_bench("data_decode", "images/s", ours, peers, rounds=5, higher_is_better=True)


if __name__ == "__main__":
    main()
