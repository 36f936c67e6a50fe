"""RandomResizedCrop(224), flip, normalise to fp32 from JPEG; images/s delivered on one core.

Ours reads the original files, the same pictures with restart markers (LV0, no loss), and LV1 (quality 90, 4:2:0), which
is what FFCV makes of them when it writes its file.
"""

from __future__ import annotations

from bench.harness import TORCH_ENV, Contender, one_core, run_bench
from bench.pictures import packed_photos, photos_folder

BATCH, SAMPLES = 64, 640


def main() -> None:
    cpus = one_core()
    common = ["--batch", str(BATCH), "--samples", str(SAMPLES)]
    plain = ["--folder", str(photos_folder()), *common]

    def ours(name: str, *options: str) -> Contender:
        return Contender(name, "bench.ours.pictures", ["--data", "imagenet", *options, *common], False, 1, cpus=cpus)

    def peer(name: str, module: str, *options: str) -> Contender:
        return Contender(name, f"bench.peers.{module}", [*options, *plain], True, 1, TORCH_ENV, cpus)

    windows = packed_photos("0", "--restart-windows", "on")
    contenders = [
        ours("ours, LV1", "--folder", str(packed_photos("1")), "--format", "dts", "--level", "1"),
        ours("ours, LV0 with restart markers", "--folder", str(windows), "--format", "dts", "--level", "0"),
        ours("ours, original files", "--folder", str(photos_folder())),
    ]
    peers = [
        peer("FFCV jpg, quality 90", "ffcv_data", "--kind", "jpg"),
        peer("DALI, originals", "dali_data", "--kind", "photos"),
        peer("DALI, originals, fast", "dali_data", "--kind", "photos", "--fast"),
        peer("simplejpeg + OpenCV, originals", "torch_data", "--style", "opencv"),
        peer("torchvision v2, originals", "torch_data", "--style", "tensors"),
        peer("defaults: torchvision PIL, originals", "torch_data", "--style", "pillow"),
    ]
    run_bench("data_jpeg", "images/s", contenders, peers, rounds=7, higher_is_better=True)


if __name__ == "__main__":
    main()
