"""PyTorch's training step on a GPU; the batches lie on the GPU already. A round gives images per second.

What a careful user does: channels last, autocast (fp16 with a GradScaler, or bf16), cudnn.benchmark, fused optimizer,
gradients set to None; and by option either torch.compile with CUDA graphs ("reduce-overhead") or the whole step in one
CUDA graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

from bench.gpu.options import gpu_step_parser
from bench.peers.models import CLASSES
from bench.rounds import serve_rounds

BATCHES, WARM_UP = 4, 11


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "mlp":
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise((784, 1024, 512, 256, 10)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers[:-1]).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True, capturable=True)
    from bench.peers.models import build as network

    model = network(name).cuda().to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)


def main() -> None:
    parser = gpu_step_parser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(123)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("highest" if options.dtype == "fp32" else "high")
    model, optimizer = build(options.model)
    model.train()
    loss_function = nn.CrossEntropyLoss()
    half = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    scaler = torch.amp.GradScaler("cuda", enabled=options.dtype == "fp16")

    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", half, enabled=options.dtype != "fp32"):
            return loss_function(model(images).float(), labels)

    if options.compile:
        forward = torch.compile(forward, mode="reduce-overhead")

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(forward(images, labels)).backward()
        scaler.step(optimizer)
        scaler.update()

    shape = (options.batch, options.channels, options.size, options.size)
    batches = [torch.randn(shape, device="cuda").to(half).to(memory_format=torch.channels_last) for _ in range(BATCHES)]
    classes = 10 if options.model == "mlp" else CLASSES[options.model]
    labels = [torch.randint(0, classes, (options.batch,), device="cuda") for _ in range(BATCHES)]
    run = whole_step_graph(step, batches[0], labels[0]) if options.graph else step

    def run_round() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(options.steps):
            run(batches[i % BATCHES], labels[i % BATCHES])
        torch.cuda.synchronize()
        return options.steps * options.batch / (time.perf_counter() - start)

    run_round()
    serve_rounds(run_round, {"torch": torch.__version__, "torch cudnn": str(torch.backends.cudnn.version())})


def whole_step_graph(
    step: Callable[[torch.Tensor, torch.Tensor], None], images: torch.Tensor, labels: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The step captured once; a call copies the batch into the captured inputs and replays."""
    static_images, static_labels = images.clone(memory_format=torch.preserve_format), labels.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step(static_images, static_labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static_images, static_labels)

    def replay(images: torch.Tensor, labels: torch.Tensor) -> None:
        static_images.copy_(images)
        static_labels.copy_(labels)
        graph.replay()

    return replay


if __name__ == "__main__":
    main()
