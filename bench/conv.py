"""Convolutions of whole networks, layer by layer and direction by direction: ours beside PyTorch's.

    python -m bench.conv resnet18 [--dtype bf16|fp32] [--threads N] [--rounds N] [--only TEXT] [--directions ...]
                         [--candidates]

A peer process (PyTorch, channels last) and this one take turns on every shape: one burst each per round, the smallest
time of all bursts counts. Directions: forward (weights are packed in the call, as in a training step), data gradient,
weight gradient. ``--candidates`` measures every algorithm that can run a shape, not only the one that the rule of
``renaissance/backend/cpu/conv_choice.py`` takes: whoever meets a new instruction set revises the rule with it.
At the end: time and rate of all layers of the network, per direction. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

DIRECTIONS = ("fwd", "bwd_d", "bwd_w")
BURST_SECONDS = 0.05
"""A burst repeats a call at least twice and at most for so long."""


@dataclass(frozen=True)
class Layer:
    """One convolution of a network and how often it occurs."""

    n: int
    h: int
    c: int
    k: int
    r: int
    stride: int
    groups: int = 1
    times: int = 1
    first: bool = False
    """No data gradient is needed."""

    @property
    def pad(self) -> int:
        return self.r // 2

    @property
    def out(self) -> int:
        return (self.h + 2 * self.pad - self.r) // self.stride + 1

    @property
    def flops(self) -> int:
        return 2 * self.n * self.out**2 * self.k * self.r**2 * (self.c // self.groups)

    def __str__(self) -> str:
        groups = f" g{self.groups}" if self.groups > 1 else ""
        return f"{self.h}x{self.h}x{self.c} -> {self.k} {self.r}x{self.r}/{self.stride}{groups}"


def resnet18(n: int = 128) -> list[Layer]:
    layers = [Layer(n, 32, 3, 64, 3, 1, first=True), Layer(n, 32, 64, 64, 3, 1, times=4)]
    for h, c in ((32, 64), (16, 128), (8, 256)):
        layers += [Layer(n, h, c, 2 * c, 3, 2), Layer(n, h, c, 2 * c, 1, 2)]
        layers += [Layer(n, h // 2, 2 * c, 2 * c, 3, 1, times=3)]
    return layers


def resnet50(n: int = 32) -> list[Layer]:
    layers = [Layer(n, 224, 3, 64, 7, 2, first=True), Layer(n, 56, 64, 64, 1, 1)]
    h, previous = 56, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        out, stride = 4 * width, 1 if width == 64 else 2
        small = h // stride
        if stride == 2:
            layers.append(Layer(n, h, previous, width, 1, 1))
        layers += [
            Layer(n, h, width, width, 3, stride),
            Layer(n, h, previous, out, 1, stride),
            Layer(n, small, width, out, 1, 1, times=blocks),
            Layer(n, small, out, width, 1, 1, times=blocks - 1),
            Layer(n, small, width, width, 3, 1, times=blocks - 1),
        ]
        h, previous = small, out
    return layers


def mobilenetv2(n: int = 32) -> list[Layer]:
    layers = [Layer(n, 224, 3, 32, 3, 2, first=True), Layer(n, 112, 32, 32, 3, 1, 32), Layer(n, 112, 32, 16, 1, 1)]
    h, c = 112, 16
    for t, out, blocks, stride in (
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(blocks):
            s = stride if i == 0 else 1
            wide = t * c
            layers += [
                Layer(n, h, c, wide, 1, 1),
                Layer(n, h, wide, wide, 3, s, wide),
                Layer(n, h // s, wide, out, 1, 1),
            ]
            h, c = h // s, out
    layers.append(Layer(n, h, c, 1280, 1, 1))
    return merged(layers)


def cnn(n: int = 128) -> list[Layer]:
    return [Layer(n, 28, 1, 32, 3, 1, first=True), Layer(n, 14, 32, 64, 3, 1)]


NETWORKS: dict[str, Callable[[], list[Layer]]] = {
    "resnet18": resnet18, "resnet50": resnet50, "mobilenetv2": mobilenetv2, "cnn": cnn
}  # fmt: skip


def merged(layers: list[Layer]) -> list[Layer]:
    """Equal layers as one with a count."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + layer.times
    return [Layer(**{**asdict(layer), "times": times}) for layer, times in counts.items()]


def burst(run: Callable[[], object], threads: int) -> float:
    """Seconds of the fastest of some calls; with one thread its CPU time, which other processes disturb less."""
    clock = time.process_time if threads == 1 else time.perf_counter
    best, end, count = 1e9, time.perf_counter() + BURST_SECONDS, 0
    while count < 3 or time.perf_counter() < end:
        start = clock()
        run()
        best, count = min(best, clock() - start), count + 1
    return best


# -- the peer ---------------------------------------------------------------------------------------------------------


def serve_peer(threads: int, dtype: str) -> None:
    """Answer each line (a layer and a direction as JSON) with the seconds of a burst."""
    import torch  # only in the peers' environment

    torch.set_num_threads(threads)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    made: dict[str, Callable[[], object]] = {}
    print(json.dumps({"torch": torch.__version__}), flush=True)

    def prepare(layer: Layer, direction: str) -> Callable[[], object]:
        def tensor(*dims: int) -> Any:
            return torch.randn(dims).to(kind).to(memory_format=torch.channels_last)

        x = tensor(layer.n, layer.c, layer.h, layer.h)
        w = tensor(layer.k, layer.c // layer.groups, layer.r, layer.r)
        geometry = ([layer.stride] * 2, [layer.pad] * 2, [1, 1])
        if direction == "fwd":
            return lambda: torch.ops.aten.convolution(x, w, None, *geometry, False, [0, 0], layer.groups)
        dy = tensor(layer.n, layer.k, layer.out, layer.out)
        mask = [direction == "bwd_d", direction == "bwd_w", False]
        return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *geometry, False, [0, 0], layer.groups, mask)

    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            if line not in made:
                made.clear()
                made[line] = prepare(Layer(**request["layer"]), request["direction"])
            print(json.dumps(burst(made[line], threads)), flush=True)


class Peer:
    """The process that runs PyTorch's convolutions."""

    def __init__(self, threads: int, dtype: str) -> None:
        from bench.harness import ROOT, TORCH_STEP_ENV, peers_python

        command = [str(peers_python()), "-m", "bench.conv", "--peer", "--threads", str(threads), "--dtype", dtype]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **TORCH_STEP_ENV},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["torch"]

    def seconds(self, layer: Layer, direction: str) -> float:
        assert self.process.stdin is not None
        print(json.dumps({"layer": asdict(layer), "direction": direction}), file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# -- ours -------------------------------------------------------------------------------------------------------------


class Ours:
    """Algorithms of one layer and direction, bound to memory."""

    def __init__(self, threads: int, dtype: str) -> None:
        from renaissance.backend.cpu.threads import configure
        from renaissance.core.dtype import DType

        configure(threads, "active")
        self.threads, self.dtype = threads, DType.parse(dtype)

    def runs(self, layer: Layer, direction: str, *, every: bool) -> dict[str, Callable[[], object]]:
        """The rule's algorithm (and with ``every`` all others) by name, each as a function to call."""
        from renaissance.backend.convolution import Direction
        from renaissance.backend.cpu import conv_choice
        from renaissance.backend.cpu.conv_algorithms import Job
        from renaissance.backend.cpu.onednn_primitives import ConvShape

        shape = ConvShape(
            layer.n, layer.h, layer.h, layer.c, layer.k, layer.r, layer.r, layer.stride, layer.pad, layer.groups,
            layer.out, layer.out,
        )  # fmt: skip
        job = Job(Direction(DIRECTIONS.index(direction)), shape, self.dtype, self.threads, str(layer))
        made = [a(job) for a in conv_choice.supported(job)] if every else [conv_choice.choose(job)]
        self.memory = Memory(shape, self.dtype)  # lives until the next shape
        return {description(a): self.memory.bind(a, job) for a in made}


def description(algorithm: Any) -> str:
    """Name of an algorithm and, where the library computes, of the library's implementation."""
    primitive = getattr(algorithm, "primitive", None)
    return str(algorithm.name) + (f" {primitive.implementation}" if primitive else "")


class Memory:
    """Random operands of one shape."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.kept: list[Any] = []
        self.x, self.y, self.w = (self.take(n, dtype) for n in (shape.inputs, shape.outputs, shape.weights))
        self.b = self.take(shape.k)

    def take(self, elements: int, dtype: Any = None) -> int:
        """Address of random elements (FP32 by default), placed as the executor's arena places them."""
        import numpy as np

        from renaissance.backend.arena import MemoryArena
        from renaissance.core.dtype import DType, bf16_from_fp32

        values = np.random.default_rng(1).standard_normal(elements, np.float32)
        stored = bf16_from_fp32(values) if dtype is DType.BF16 else values
        self.kept.append(MemoryArena(stored.nbytes + (4 << 20)))
        block = self.kept[-1].block(stored.nbytes + (2 << 20), "operand")[: stored.nbytes]
        block[:] = stored.view(np.uint8)
        return int(block.ctypes.data)

    def bind(self, algorithm: Any, job: Any) -> Callable[[], object]:
        from renaissance.backend.convolution import Direction
        from renaissance.backend.cpu.onednn import explain
        from renaissance.backend.cpu.queue import NativeQueue, team_call

        scratch, w, calls = self.take(algorithm.scratch_bytes // 4 + 64), self.w, []
        if job.direction is not Direction.WEIGHT and algorithm.packed_bytes:
            w = self.take(algorithm.packed_bytes // 4 + 64)
            calls += algorithm.pack(self.w, w, scratch)
        if job.direction is Direction.FORWARD:
            calls += algorithm.run(self.x, w, 0, 0, self.y, scratch)
        elif job.direction is Direction.DATA:
            calls += algorithm.run(self.y, w, self.x, scratch)
        else:
            calls += algorithm.run(self.x, self.y, self.take(self.shape.weights), self.b, scratch)
        return NativeQueue([team_call(job.threads), *calls], explain).launch


def main() -> None:
    parser = argparse.ArgumentParser(description="Our convolutions beside PyTorch's.")
    parser.add_argument("network", nargs="?", choices=sorted(NETWORKS), default="resnet18")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="layers whose name contains this, e.g. '3x3'")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--candidates", action="store_true", help="every algorithm, not only the rule's")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve_peer(options.threads, options.dtype)
        return
    from bench.harness import cpu_name
    from renaissance.backend.cpu.onednn import onednn

    peer, ours = Peer(options.threads, options.dtype), Ours(options.threads, options.dtype)
    print(
        f"{options.network}, {options.dtype}, {options.threads} threads, {cpu_name()}, oneDNN {onednn().version} "
        f"{onednn().isa}, PyTorch {peer.version}; ms and GFLOP/s of one call"
    )
    todo = [
        (layer, direction)
        for layer in NETWORKS[options.network]()
        for direction in options.directions
        if options.only in str(layer) and not (direction == "bwd_d" and layer.first)
    ]
    rows = [measure(*one, peer, ours, options.rounds, every=options.candidates) for one in todo]
    peer.close()
    sums = report_sums(rows)
    print(json.dumps({"name": "conv", "network": options.network, "dtype": options.dtype, "sums": sums, "rows": rows}))


def measure(layer: Layer, direction: str, peer: Peer, ours: Ours, rounds: int, *, every: bool) -> dict[str, Any]:
    """Turns of the peer and of ours; prints a line and returns its numbers (seconds)."""
    runs = ours.runs(layer, direction, every=every)
    best: dict[str, float] = {}
    for _ in range(rounds):
        best["torch"] = min(best.get("torch", 1e9), peer.seconds(layer, direction))
        for name, run in runs.items():
            best[name] = min(best.get(name, 1e9), burst(run, ours.threads))
    for i, (name, seconds) in enumerate((k, v) for k, v in best.items() if k != "torch"):
        title = f"{layer!s:30} x{layer.times:<2} {direction:5} torch {timing(layer, best['torch'])}" if i == 0 else ""
        print(f"{title:68} ours {timing(layer, seconds)} {best['torch'] / seconds:5.2f}x  {name}", flush=True)
    first = next(v for k, v in best.items() if k != "torch")
    return {"layer": str(layer), "times": layer.times, "direction": direction, "flops": layer.flops,
            "torch": best["torch"], "rule": first, "seconds": best}  # fmt: skip


def timing(layer: Layer, seconds: float) -> str:
    """Milliseconds and GFLOP/s."""
    return f"{seconds * 1e3:8.2f} {layer.flops / seconds / 1e9:5.0f}"


def report_sums(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds of all layers, per direction."""
    sums: dict[str, dict[str, float]] = {}
    for direction in (*DIRECTIONS, "all"):
        chosen = [r for r in rows if direction in ("all", r["direction"])]
        torch, ours = (sum(r[k] * r["times"] for r in chosen) * 1e3 for k in ("torch", "rule"))
        flops = sum(r["flops"] * r["times"] for r in chosen)
        if chosen:
            sums[direction] = {"torch_ms": round(torch, 2), "ours_ms": round(ours, 2)}
            print(
                f"{direction:6} torch {torch:9.1f} ms {flops / torch / 1e6:6.0f} GFLOP/s   ours {ours:9.1f} ms "
                f"{flops / ours / 1e6:6.0f} GFLOP/s   {torch / ours:5.2f}x"
            )
    return sums


if __name__ == "__main__":
    main()
