"""PyTorch's training step of a convolutional network on data in memory; a round gives images per second."""

from __future__ import annotations

import time

import torch

from bench.model_options import step_parser
from bench.peers.mlp import training_step
from bench.peers.models import CLASSES, build, sgd
from bench.rounds import serve_rounds


def main() -> None:
    parser = step_parser()
    parser.add_argument("--half-inputs", action="store_true", help="keep the images in memory as bf16")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(123)
    model = build(options.model).to(memory_format=torch.channels_last).train()
    step = training_step(model, torch.nn.CrossEntropyLoss(), sgd(model), options.bf16, options.compile)
    images = torch.randn(options.batches, options.batch, options.channels, options.size, options.size)
    if options.half_inputs:
        images = images.bfloat16()
    batches = [i.to(memory_format=torch.channels_last) for i in images]
    del images
    labels = torch.randint(0, CLASSES[options.model], (options.batches, options.batch))

    def run_round() -> float:
        start = time.perf_counter()
        for i in range(options.steps):
            step(batches[i % options.batches], labels[i % options.batches])
        return options.steps * options.batch / (time.perf_counter() - start)

    run_round()
    serve_rounds(run_round, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
