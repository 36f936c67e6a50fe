"""What an algorithm for convolutions looks like, and the one that always works: oneDNN's own convolution.

An algorithm is made for one shape, element type and direction; it says how much memory it needs and returns calls for
given addresses. Weights go through ``pack`` first, from KRSC into whatever layout the algorithm likes: a training step
packs them in every step (they have changed), a validation step never does (``backend.cpu.conv``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from renaissance.backend.convolution import Direction
from renaissance.backend.cpu.conv_kernels import (
    BIAS_ROWS,
    FINISH_ADD,
    FINISH_RELU,
    bias_partials,
    bias_total,
    finish,
)
from renaissance.backend.cpu.kernels_common import PARALLEL_ELEMENTS
from renaissance.backend.cpu.kernels_memory import cast_bf16_to_fp32, cast_fp32_to_bf16
from renaissance.backend.cpu.onednn import Arg, MemoryDesc, OneDnn, PostOps, Primitive, onednn
from renaissance.backend.cpu.onednn_primitives import ConvPrimitives, ConvShape
from renaissance.backend.cpu.queue import kernel_call
from renaissance.backend.registry import Call
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError
from renaissance.core.region import align


@dataclass(frozen=True, slots=True)
class Job:
    """One convolution to be run: everything an algorithm may choose by."""

    direction: Direction
    shape: ConvShape
    dtype: DType
    """Of activations and weights: FP32 or BF16. Bias and all gradients of weights are FP32."""
    threads: int
    label: str
    bias: bool = False
    residual: bool = False
    """Forward: a tensor of y's shape and type is added before the activation."""
    relu: bool = False
    training: bool = True

    @property
    def half(self) -> bool:
        return self.dtype is DType.BF16

    def team(self, elements: int) -> int:
        """Threads for a kernel over ``elements``: all, or 1 when the work is small."""
        return self.threads if elements >= PARALLEL_ELEMENTS else 1


class Algorithm(Protocol):
    """What all directions have in common. The constructor takes the job."""

    name: str

    @staticmethod
    def supports(job: Job) -> bool:
        """Whether the algorithm computes this job, on this CPU."""


class Forward(Algorithm, Protocol):
    """y = relu(conv(x, w) + b + residual)."""

    packed_bytes: int
    """Memory for the packed weights; 0: ``run`` takes KRSC weights as they are, and ``pack`` is not called."""
    scratch_bytes: int
    """Working memory of ``pack`` and ``run``, which do not run at the same time."""
    layout: Hashable
    """Names the packed layout: two algorithms with equal names pack equal weights into equal bytes."""

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]: ...

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]: ...


class BackwardData(Algorithm, Protocol):
    """dx from dy and w; ``packed_bytes`` and ``scratch_bytes`` as in ``Forward``."""

    packed_bytes: int
    scratch_bytes: int

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]: ...

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]: ...


class BackwardWeight(Algorithm, Protocol):
    """dw (KRSC, FP32) and db (FP32, when the job has a bias) from x and dy."""

    scratch_bytes: int

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]: ...


class Packing:
    """A reorder between KRSC and the layout a primitive chose; nothing when they are the same."""

    def __init__(self, dnn: OneDnn, source: MemoryDesc, target: MemoryDesc, label: str) -> None:
        self._source, self._target, self._label = source, target, f"{label} pack"
        self._reorder = None if dnn.same_layout(source, target) else dnn.reorder(source, target)
        self.scratch_bytes = self._reorder.scratchpad if self._reorder else 0

    @property
    def needed(self) -> bool:
        return self._reorder is not None

    def calls(self, source: int, target: int, scratch: int) -> list[Call]:
        if self._reorder is None:
            return []
        operands = {Arg.SRC: (self._source, source), Arg.DST: (self._target, target)}
        return [self._reorder.bind(operands, scratch, self._label)]


class LibraryForward:
    """oneDNN's convolution, its weights in the layout it asks for. A post-op that would send it to the reference
    implementation becomes a pass of ours over y."""

    name = "onednn"

    @staticmethod
    def supports(job: Job) -> bool:
        return not job.half or half_convolutions(onednn())

    def __init__(self, job: Job) -> None:
        dnn = onednn()
        self._job, self._made = job, ConvPrimitives(dnn, job.shape, job.dtype)
        made = self._made
        post = PostOps(add=made.y if job.residual else None, relu=job.relu)
        self.primitive = made.forward(bias=job.bias, post=post, training=job.training)
        self._separate = 0
        if (job.residual or job.relu) and is_reference(self.primitive):
            plain = made.forward(bias=job.bias, training=job.training)
            if not is_reference(plain):
                self.primitive = plain
                self._separate = FINISH_ADD * job.residual | FINISH_RELU * job.relu
        self._weights = self.primitive.layout("weights")
        self._packing = Packing(dnn, made.w, self._weights, job.label)
        self.packed_bytes = dnn.size(self._weights) if self._packing.needed else 0
        self.scratch_bytes = max(self.primitive.scratchpad, self._packing.scratch_bytes)
        self.layout: Hashable = ("onednn", job.dtype, dnn.layout_key(self._weights))

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        return self._packing.calls(w, packed, scratch)

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]:
        job, made = self._job, self._made
        operands = {Arg.SRC: (made.x, x), Arg.WEIGHTS: (self._weights, packed), Arg.DST: (made.y, y)}
        if job.bias:
            operands[Arg.BIAS] = (made.b, b)
        if job.residual and not self._separate:
            operands[Arg.POST_OP_0] = (made.y, residual)
        calls: list[Call] = [self.primitive.bind(operands, scratch, job.label)]
        if self._separate:
            calls.append(finish_call(job, y, residual, self._separate))
        return calls


class LibraryBackwardData:
    """oneDNN's data gradient, its weights in the layout it asks for."""

    name = "onednn"

    @staticmethod
    def supports(job: Job) -> bool:
        return not job.half or half_convolutions(onednn())

    def __init__(self, job: Job) -> None:
        dnn = onednn()
        self._job, self._made = job, ConvPrimitives(dnn, job.shape, job.dtype)
        self.primitive = self._made.backward_data(self._made.forward(bias=False))
        self._weights = self.primitive.layout("weights")
        self._packing = Packing(dnn, self._made.w, self._weights, job.label)
        self.packed_bytes = dnn.size(self._weights) if self._packing.needed else 0
        self.scratch_bytes = max(self.primitive.scratchpad, self._packing.scratch_bytes)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        return self._packing.calls(w, packed, scratch)

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]:
        made = self._made
        operands = {Arg.DIFF_DST: (made.y, dy), Arg.WEIGHTS: (self._weights, packed), Arg.DIFF_SRC: (made.x, dx)}
        return [self.primitive.bind(operands, scratch, self._job.label)]


class LibraryBackwardWeight:
    """oneDNN's weight gradient (and bias gradient), brought back to KRSC where it prefers another layout.

    Not for bf16 images narrower than the stride: there oneDNN 3.2 multiplies what lies behind the image by 0, which is
    NaN when that memory holds NaN or Inf.
    """

    name = "onednn"

    @staticmethod
    def supports(job: Job) -> bool:
        return not job.half or (job.shape.w >= job.shape.stride and half_convolutions(onednn()))

    def __init__(self, job: Job) -> None:
        dnn = onednn()
        self._job, self._made = job, ConvPrimitives(dnn, job.shape, job.dtype)
        made = self._made
        self.primitive = made.backward_weights(made.forward(bias=job.bias), bias=job.bias)
        self._weights = self.primitive.layout("diff_weights")
        self._unpacking = Packing(dnn, self._weights, made.dw, job.label)
        self._bytes = align(dnn.size(self._weights)) if self._unpacking.needed else 0
        self.scratch_bytes = self._bytes + max(self.primitive.scratchpad, self._unpacking.scratch_bytes)

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        made, free = self._made, scratch + self._bytes
        target = scratch if self._unpacking.needed else dw
        operands = {Arg.SRC: (made.x, x), Arg.DIFF_DST: (made.y, dy), Arg.DIFF_WEIGHTS: (self._weights, target)}
        if self._job.bias:
            operands[Arg.DIFF_BIAS] = (made.b, db)
        return [self.primitive.bind(operands, free, self._job.label), *self._unpacking.calls(target, dw, free)]


class WidenedForward:
    """For a CPU without bf16 convolution: operands are widened to fp32, which is exact, and y is rounded once."""

    name = "onednn fp32"

    @staticmethod
    def supports(job: Job) -> bool:
        return job.half

    def __init__(self, job: Job) -> None:
        self._job, shape = job, job.shape
        self._inner = LibraryForward(replace(job, dtype=DType.FP32))
        self._x, self._y = align(4 * shape.inputs), align(4 * shape.outputs)
        self._w = align(4 * shape.weights)
        self.packed_bytes = self._inner.packed_bytes or self._w
        self.scratch_bytes = max(self._x + self._y * (1 + job.residual), self._w) + self._inner.scratch_bytes
        self.layout: Hashable = ("widened", self._inner.layout)

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        return widened_pack(self._job, self._inner, w, packed, scratch, self._w)

    def run(self, x: int, packed: int, b: int, residual: int, y: int, scratch: int) -> list[Call]:
        job, shape = self._job, self._job.shape
        wide_x, wide_y = scratch, scratch + self._x
        wide_residual = wide_y + self._y
        free = wide_residual + self._y * job.residual
        calls = [widen_call(job, x, wide_x, shape.inputs)]
        if job.residual:
            calls.append(widen_call(job, residual, wide_residual, shape.outputs))
        calls += self._inner.run(wide_x, packed, b, wide_residual, wide_y, free)
        return [*calls, round_call(job, wide_y, y, shape.outputs)]


class WidenedBackwardData:
    """As ``WidenedForward``."""

    name = "onednn fp32"

    @staticmethod
    def supports(job: Job) -> bool:
        return job.half

    def __init__(self, job: Job) -> None:
        self._job, shape = job, job.shape
        self._inner = LibraryBackwardData(replace(job, dtype=DType.FP32))
        self._x, self._y = align(4 * shape.inputs), align(4 * shape.outputs)
        self._w = align(4 * shape.weights)
        self.packed_bytes = self._inner.packed_bytes or self._w
        self.scratch_bytes = max(self._x + self._y, self._w) + self._inner.scratch_bytes

    def pack(self, w: int, packed: int, scratch: int) -> list[Call]:
        return widened_pack(self._job, self._inner, w, packed, scratch, self._w)

    def run(self, dy: int, packed: int, dx: int, scratch: int) -> list[Call]:
        job, shape, wide_dx = self._job, self._job.shape, scratch + self._y
        return [
            widen_call(job, dy, scratch, shape.outputs),
            *self._inner.run(scratch, packed, wide_dx, wide_dx + self._x),
            round_call(job, wide_dx, dx, shape.inputs),
        ]


class WidenedBackwardWeight:
    """As ``WidenedForward``."""

    name = "onednn fp32"

    @staticmethod
    def supports(job: Job) -> bool:
        return job.half

    def __init__(self, job: Job) -> None:
        self._job, shape = job, job.shape
        self._inner = LibraryBackwardWeight(replace(job, dtype=DType.FP32))
        self._x, self._y = align(4 * shape.inputs), align(4 * shape.outputs)
        self.scratch_bytes = self._x + self._y + self._inner.scratch_bytes

    def run(self, x: int, dy: int, dw: int, db: int, scratch: int) -> list[Call]:
        job, shape, wide_dy = self._job, self._job.shape, scratch + self._x
        return [
            widen_call(job, x, scratch, shape.inputs),
            widen_call(job, dy, wide_dy, shape.outputs),
            *self._inner.run(scratch, wide_dy, dw, db, wide_dy + self._y),
        ]


def widened_pack(
    job: Job, inner: LibraryForward | LibraryBackwardData, w: int, packed: int, scratch: int, wide_bytes: int
) -> list[Call]:
    """Widen KRSC weights, then pack them; the widened weights are the packed ones where ``inner`` takes KRSC."""
    if not inner.packed_bytes:
        return [widen_call(job, w, packed, job.shape.weights)]
    return [widen_call(job, w, scratch, job.shape.weights), *inner.pack(scratch, packed, scratch + wide_bytes)]


def widen_call(job: Job, source: int, target: int, elements: int) -> Call:
    """bf16 to fp32."""
    return kernel_call(cast_bf16_to_fp32, (source, target, elements), job.label, threads=job.team(elements))


def round_call(job: Job, source: int, target: int, elements: int) -> Call:
    """fp32 to bf16, nearest even."""
    return kernel_call(cast_fp32_to_bf16, (source, target, elements), job.label, threads=job.team(elements))


def finish_call(job: Job, y: int, residual: int, mode: int) -> Call:
    """y := act(y + residual) in place; ``mode`` is made of FINISH_*."""
    elements = job.shape.outputs
    arguments = (y, residual, elements, mode, int(job.half))
    return kernel_call(finish, arguments, job.label, threads=job.team(elements))


def bias_bytes(job: Job) -> int:
    """Working memory of ``bias_calls``."""
    return align(4 * job.shape.k * -(-job.shape.outputs // job.shape.k // BIAS_ROWS)) if job.bias else 0


def bias_calls(job: Job, dy: int, db: int, scratch: int) -> list[Call]:
    """db := sum of dy over all pixels, when the job has a bias; the same bits for every team."""
    if not job.bias:
        return []
    channels, rows = job.shape.k, job.shape.outputs // job.shape.k
    return [
        kernel_call(
            bias_partials, (dy, scratch, rows, channels, int(job.half)), job.label, threads=job.team(rows * channels)
        ),
        kernel_call(bias_total, (scratch, db, -(-rows // BIAS_ROWS), channels), job.label),
    ]


def is_reference(primitive: Primitive) -> bool:
    """Whether the library answered with its plain loops, which are a thousand times slower."""
    return primitive.implementation.startswith("ref")


def half_convolutions(dnn: OneDnn) -> bool:
    """Whether the library convolves bf16 on this CPU (oneDNN 3.2: from AVX-512 on)."""
    probe = ConvPrimitives(dnn, ConvShape(1, 4, 4, 16, 16, 3, 3, 1, 1, 1, 4, 4), DType.BF16)
    try:
        return not is_reference(probe.forward(bias=False))
    except DeviceError:
        return False
