"""Our batch norm with ReLU; round k measures job k of ``bench.norm_jobs`` (microseconds of its fastest call)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import renaissance
from bench.norm_jobs import Job, fastest, jobs
from bench.rounds import serve_rounds
from renaissance.backend.cpu import kernels
from renaissance.backend.cpu.queue import NativeQueue, team_call
from renaissance.backend.cpu.threads import configure
from renaissance.backend.registry import NativeCall, OpRegistry
from renaissance.core.dtype import DType
from renaissance.core.enums import StreamKind
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.graph.computation_graph import Node
from renaissance.graph.ids import GraphId
from renaissance.tensor.dtensor import DTensor

REGISTRY = OpRegistry()
kernels.register(REGISTRY)
SCRATCH = 64 << 20
FEATURES = ("x", "y", "dy", "dx", "residual", "dresidual")
VECTORS = ("gamma", "beta", "prev_mean", "prev_var", "mean", "inv_std", "next_mean", "next_var", "dgamma", "dbeta")


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.ones(nbytes + 256, np.uint8)  # touched
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


class Context:
    """As much of a ``CaptureContext`` as these launchers ask for: one copy of a job's tensors."""

    def __init__(self, job: Job, dtype: DType, threads: int, scratch: int) -> None:
        self.threads, self.half = threads, dtype if dtype.is_half else None
        self._scratch = scratch
        self._tensors: list[DTensor] = []
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self.ids: dict[str, int] = {}
        for name in FEATURES:
            if job.residual or "residual" not in name:
                self._add(name, Shape(*job.shape), dtype)
        for name in VECTORS:
            self._add(name, Shape.of(job.shape[3]), DType.FP32)
        self._add("valid", Shape(), DType.INT32)
        self._bytes[-1][:4].view(np.int32)[0] = job.shape[0]

    def _add(self, name: str, shape: Shape, dtype: DType) -> None:
        tensor = DTensor.make(len(self._tensors), name, shape, dtype, Region.T_TEMP_FP32)
        self.ids[name] = tensor.id
        self._tensors.append(tensor)
        self._bytes.append(aligned(tensor.slot_bytes))
        if dtype is not DType.INT32:
            values = np.random.default_rng(tensor.id).normal(size=1 << 16).astype(np.float32)
            patterns = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype is DType.BF16 else values
            self._bytes[-1][: tensor.nbytes].view(dtype.numpy)[:] = np.resize(patterns, shape.numel)

    def tensor(self, tensor_id: int) -> DTensor:
        return self._tensors[tensor_id]

    def ptr(self, tensor_id: int) -> int:
        return int(self._bytes[tensor_id].ctypes.data)

    def named(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.ids[name] for name in names)

    def scratch(self, nbytes: int) -> int:
        assert nbytes <= SCRATCH
        return self._scratch


def queue(job: Job, context: Context) -> NativeQueue:
    forward = ("x", "gamma", "beta", "prev_mean", "prev_var", "valid", *(["residual"] if job.residual else []))
    backward = ("dy", "x", "gamma", "mean", "inv_std", "valid", "y")
    inputs = forward if job.is_forward else backward
    outputs = ("y", "mean", "inv_std", "next_mean", "next_var") if job.is_forward else ("dx", "dgamma", "dbeta")
    if job.residual and not job.is_forward:
        outputs = (*outputs, "dresidual")
    attrs: dict[str, int | float | str | bool] = {"activation": "relu"}
    attrs |= {"momentum": 0.1, "eps": 1e-5} if job.is_forward else {"dys": 1, "residual": job.residual}
    op = "BN_FWD" if job.is_forward else "BN_BWD"
    read, written = context.named(inputs), context.named(outputs)
    node = Node(0, op, attrs, read, written, (), (), GraphId(0), StreamKind.COMP_2)
    calls = REGISTRY.launcher(op, "cpu")(node, context)  # type: ignore[arg-type]
    return NativeQueue([team_call(context.threads), *(c for c in calls if isinstance(c, NativeCall))])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--models", nargs="+", required=True)
    options = parser.parse_args()
    configure(options.threads, "active")
    dtype = DType.BF16 if options.bf16 else DType.FP32
    memory = aligned(SCRATCH)
    order = itertools.cycle(jobs(options.models))

    def run_round() -> float:
        job = next(order)
        made = [Context(job, dtype, options.threads, memory.ctypes.data) for _ in range(job.copies(dtype.itemsize))]
        queues = [queue(job, context) for context in made]
        for q in queues:
            q.launch()
        return fastest([q.launch for q in queues])

    serve_rounds(run_round, {"renaissance": renaissance.__version__})


if __name__ == "__main__":
    main()
