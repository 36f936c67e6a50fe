"""A loop that decodes JPEG to RGB and does nothing else."""

from __future__ import annotations

import argparse
import io
import itertools
import time
from pathlib import Path

import PIL
import simplejpeg
from PIL import Image

from bench.peers.pictures import photo_files
from bench.rounds import serve_rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--encode", action="store_true", help="first encode again with quality 90, 4:2:0")
    parser.add_argument("--pillow", action="store_true")
    options = parser.parse_args()
    streams = [path.read_bytes() for path, _ in photo_files(options.folder)]
    if options.encode:
        streams = [encoded(stream) for stream in streams]
    source = itertools.cycle(streams)

    def decode(stream: bytes) -> None:
        if options.pillow:
            Image.open(io.BytesIO(stream)).convert("RGB").load()
        elif options.half:
            simplejpeg.decode_jpeg(stream, min_factor=2, min_height=1, min_width=1)
        else:
            simplejpeg.decode_jpeg(stream)

    def run_round() -> float:
        start = time.perf_counter()
        for stream in itertools.islice(source, options.samples):
            decode(stream)
        return options.samples / (time.perf_counter() - start)

    run_round()
    serve_rounds(run_round, {"simplejpeg": simplejpeg.__version__, "pillow": PIL.__version__})


def encoded(stream: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(stream)).convert("RGB").save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
