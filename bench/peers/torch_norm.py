"""PyTorch's batch norm with ReLU, channels last; round k measures job k of ``bench.norm_jobs`` (microseconds of its
fastest call)."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.nn import functional

from bench.norm_jobs import Job, fastest, jobs
from bench.rounds import serve_rounds


def bn_relu(x, mean, var, gamma, beta):  # type: ignore[no-untyped-def]
    return functional.relu(functional.batch_norm(x, mean, var, gamma, beta, True, 0.1, 1e-5), inplace=True)


def bn_add_relu(x, mean, var, gamma, beta, other):  # type: ignore[no-untyped-def]
    return functional.relu(functional.batch_norm(x, mean, var, gamma, beta, True, 0.1, 1e-5).add_(other), inplace=True)


class Copy:
    """One copy of a job's tensors."""

    def __init__(self, job: Job, dtype: torch.dtype, functions: tuple) -> None:  # type: ignore[type-arg]
        n, h, w, c = job.shape
        make = lambda: torch.randn(n, c, h, w).to(dtype).to(memory_format=torch.channels_last)  # noqa: E731
        self.x, self.dy = make().requires_grad_(), make()
        self.gamma, self.beta = torch.ones(c, requires_grad=True), torch.zeros(c, requires_grad=True)
        self.extra = [make().requires_grad_()] if job.residual else []
        self.statistics = torch.zeros(c), torch.ones(c)
        self.function = functions[int(job.residual)]
        if not job.is_forward:
            self.y = self.forward()

    def forward(self) -> torch.Tensor:
        return self.function(self.x, *self.statistics, self.gamma, self.beta, *self.extra)  # type: ignore[no-any-return]

    def backward(self) -> None:
        torch.autograd.grad(self.y, [self.x, self.gamma, self.beta, *self.extra], self.dy, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--models", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    order = itertools.cycle(jobs(options.models))
    functions = (bn_relu, bn_add_relu)
    if options.compile:
        functions = tuple(torch.compile(f, dynamic=False) for f in functions)
        torch._dynamo.config.cache_size_limit = 64

    def run_round() -> float:
        job = next(order)
        copies = [Copy(job, dtype, functions) for _ in range(job.copies(dtype.itemsize))]
        calls = [copy.forward if job.is_forward else copy.backward for copy in copies]
        for call in calls:
            call()
        return fastest(calls)

    serve_rounds(run_round, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
