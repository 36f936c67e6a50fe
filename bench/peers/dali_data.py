"""DALI on the CPU: CIFAR through an external source, and photographs from files, decoded inside the drawn window."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import nvidia.dali as dali
from nvidia.dali import fn, pipeline_def, types

from bench.peers.pictures import CIFAR_MEAN, CIFAR_STD, IMAGENET_MEAN, IMAGENET_STD, load_cifar, photo_files
from bench.rounds import samples_per_second, serve_rounds


@pipeline_def
def cifar(source):
    images, labels = fn.external_source(source=source, num_outputs=2, batch=True)
    images = fn.crop(images, crop=(40, 40), out_of_bounds_policy="pad", fill_values=0)
    images = fn.crop_mirror_normalize(
        images,
        crop=(32, 32),
        crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
        crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
        mirror=fn.random.coin_flip(),
        mean=[m * 255 for m in CIFAR_MEAN],
        std=[s * 255 for s in CIFAR_STD],
        dtype=types.FLOAT,
        output_layout="HWC",
    )
    return images, labels


@pipeline_def
def photos(files, labels, fast):
    encoded, targets = fn.readers.file(files=files, labels=labels, random_shuffle=True, initial_fill=256)
    images = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
        jpeg_fancy_upsampling=not fast,
        use_fast_idct=fast,
    )
    images = fn.resize(images, size=(224, 224), antialias=True, interp_type=types.INTERP_LINEAR)
    images = fn.crop_mirror_normalize(
        images,
        mirror=fn.random.coin_flip(),
        mean=[m * 255 for m in IMAGENET_MEAN],
        std=[s * 255 for s in IMAGENET_STD],
        dtype=types.FLOAT,
        output_layout="HWC",
    )
    return images, targets


class Batches:
    """Whole shuffled batches of CIFAR, as DALI's external source wants them."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.images, self.labels = load_cifar(folder)
        self.batch, self.random = batch, np.random.default_rng(0)

    def __call__(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        index = self.random.integers(0, len(self.labels), self.batch)
        return list(self.images[index]), list(self.labels[index][:, None])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("cifar", "photos"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--fast", action="store_true", help="fast IDCT and plain upsampling")
    options = parser.parse_args()
    common = {"batch_size": options.batch, "num_threads": options.workers, "device_id": None, "seed": 1}
    if options.kind == "cifar":
        pipeline = cifar(Batches(options.folder, options.batch), **common)
    else:
        files = photo_files(options.folder)
        pipeline = photos([str(path) for path, _ in files], [label for _, label in files], options.fast, **common)
    pipeline.build()

    def run_round() -> float:
        return samples_per_second(lambda: len(pipeline.run()[0]), options.samples)

    run_round()
    serve_rounds(run_round, {"nvidia-dali": dali.__version__})


if __name__ == "__main__":
    main()
