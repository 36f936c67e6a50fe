"""Stand-ins for cuDNN and cuBLASLt: NumPy on the memory of a FakeCuda, issued as operations of its streams.

Products are taken in float32 and rounded to the result's type once, as the libraries do. Every plan wants a workspace
and scribbles over it, so that two plans which share one without an order show.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cuda_standin.errors import CudaError
from cuda_standin.memory import Range
from cuda_standin.runtime import FakeCuda
from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.libraries import ConvolutionSpec, Plan, ProductSpec
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.cuda.tuning import PlanChoices, Question
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.errors import DeviceError

WORKSPACE = 512
"""Bytes that every plan asks for."""
SCRIBBLE = 0xA5
F32 = npt.NDArray[np.float32]


def view(address: int, count: int, dtype: DType) -> npt.NDArray[Any]:
    """Elements in device memory, BF16 as bit patterns."""
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype.numpy)


def load(address: int, shape: tuple[int, ...], dtype: DType) -> F32:
    """Elements in device memory as float32."""
    stored = view(address, int(np.prod(shape)), dtype).reshape(shape)
    return fp32_from_bf16(stored) if dtype is DType.BF16 else stored.astype(np.float32)


def store(address: int, values: F32, dtype: DType) -> None:
    """Round float32 once; what is too large becomes infinite."""
    target = view(address, values.size, dtype)
    with np.errstate(over="ignore"):
        target[:] = (bf16_from_fp32(values) if dtype is DType.BF16 else values.astype(dtype.numpy)).reshape(-1)


@dataclass(slots=True)
class FakeClock:
    """A clock that goes on when a plan of ``tuned`` has run, and then only; ``runs`` by the plan's name."""

    now: float = 0.0
    runs: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Tuning:
    """Lets the stand-ins offer several plans, which differ in name, workspace and ``costs``: seconds of the clock."""

    choices: PlanChoices
    clock: FakeClock
    costs: Sequence[float] = (3e-4, 2e-4)


def timed(choices: PlanChoices, costs: Sequence[float] = (2e-3, 1e-3)) -> Tuning:
    """``choices``, measured by a clock of the stand-in's."""
    clock = choices.clock = FakeClock()
    return Tuning(choices, clock, costs)


@dataclass(frozen=True, slots=True)
class StandInPlan:
    """Plan of libraries.py. ``shapes`` of the three operands, the last one written."""

    fake: FakeCuda
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtype: DType
    result: DType
    compute: Callable[[F32, F32], F32]
    workspace: int = WORKSPACE
    ran: Callable[[], None] = lambda: None

    def execute(self, stream: int, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        """Issue it. Raises CudaError for a buffer that is too small."""
        ranges = [
            self._range(buffer, int(np.prod(shape)) * dtype.itemsize, what)
            for buffer, shape, dtype, what in zip(
                (first, second, out),
                self.shapes,
                (self.dtype, self.dtype, self.result),
                ("first operand", "second operand", "result"),
                strict=True,
            )
        ]
        work = self._range(workspace, self.workspace, "workspace")

        def run() -> None:
            ctypes.memset(work[0], SCRIBBLE, self.workspace)
            operands = [load(r[0], s, self.dtype) for r, s in zip(ranges[:2], self.shapes[:2], strict=True)]
            store(ranges[2][0], self.compute(*operands), self.result)
            if np.any(view(work[0], self.workspace, DType.UINT8) != SCRIBBLE):
                raise CudaError("IllegalAddress", f"{self.name}: another operation used the workspace meanwhile")
            self.ran()

        self.fake.warm(id(self), self.name)
        self.fake.library(stream, self.name, run, ranges[:2], (ranges[2], work))

    def _range(self, buffer: Buffer, size: int, what: str) -> Range:
        if buffer.nbytes < size:
            raise CudaError("InvalidValue", f"{self.name}: the {what} has {buffer.nbytes} bytes, {size} are needed")
        return self.fake.device_range(buffer.ptr, size, f"{self.name}, {what}")


class _Plans:
    """Plans by spec; a first one is refused while a stream is capturing."""

    def __init__(self, fake: FakeCuda, library: str, tuning: Tuning | None = None) -> None:
        self._fake, self._library, self._tuning = fake, library, tuning
        self._plans: dict[ConvolutionSpec | ProductSpec, StandInPlan] = {}
        self._streams: Sequence[int] = ()

    def open(self, streams: Sequence[int]) -> None:
        """As the libraries."""
        self._streams = streams

    def _plan(self, spec: Any, make: Callable[[Any], StandInPlan]) -> Plan:
        if spec not in self._plans:
            if self._fake.capturing:
                raise DeviceError(f"{self._library}: a plan is made while a stream is capturing: {spec}; warm up first")
            plan = make(spec)
            self._plans[spec] = plan if self._tuning is None else self._chosen(spec, plan, self._tuning)
        return self._plans[spec]

    def _chosen(self, spec: Any, plan: StandInPlan, tuning: Tuning) -> StandInPlan:
        def offers() -> Iterator[StandInPlan]:
            for number, cost in enumerate(tuning.costs):
                name = f"{plan.name} #{number}"

                def ran(name: str = name, cost: float = cost) -> None:
                    tuning.clock.now += cost
                    tuning.clock.runs[name] += 1

                yield replace(plan, name=name, workspace=WORKSPACE * (1 + number), ran=ran)

        types = (plan.dtype, plan.dtype, plan.result)
        sizes = tuple(int(np.prod(s)) * t.itemsize for s, t in zip(plan.shapes, types, strict=True))
        named = {p.name: p for p in offers()}
        question = Question(f"{spec} | stand-in", sizes, offers, named.get)
        return tuning.choices.of(question, cast(CudaRuntime, self._fake), self._streams[0])

    def facts(self) -> dict[str, str]:
        return {self._library: f"stand-in, {len(self._plans)} plans"}


class StandInConvolutions(_Plans):
    """Convolutions of libraries.py."""

    def __init__(self, fake: FakeCuda, tuning: Tuning | None = None) -> None:
        super().__init__(fake, "cudnn", tuning)

    def plan(self, spec: ConvolutionSpec) -> Plan:
        return self._plan(spec, self._make)

    def _make(self, spec: ConvolutionSpec) -> StandInPlan:
        x = (spec.n, spec.h, spec.w, spec.c)
        w = (spec.k, spec.r, spec.s, spec.c // spec.groups)
        y = (spec.n, spec.out_h, spec.out_w, spec.k)
        shapes, compute = {
            Direction.FORWARD: ((x, w, y), _forward),
            Direction.DATA: ((y, w, x), _data),
            Direction.WEIGHT: ((y, x, w), _weight),
        }[spec.direction]
        name = f"convolution {spec.direction.name.lower()} {spec.r}x{spec.s} {spec.c}->{spec.k}"
        return StandInPlan(self._fake, name, shapes, spec.dtype, spec.dtype, lambda a, b: compute(spec, a, b))


class StandInProducts(_Plans):
    """Products of libraries.py."""

    def __init__(self, fake: FakeCuda, tuning: Tuning | None = None) -> None:
        super().__init__(fake, "cublaslt", tuning)

    def plan(self, spec: ProductSpec) -> Plan:
        return self._plan(spec, self._make)

    def _make(self, spec: ProductSpec) -> StandInPlan:
        a = (spec.k, spec.m) if spec.ta else (spec.m, spec.k)
        b = (spec.n, spec.k) if spec.tb else (spec.k, spec.n)

        def product(left: F32, right: F32) -> F32:
            with np.errstate(over="ignore", invalid="ignore"):
                return (left.T if spec.ta else left) @ (right.T if spec.tb else right)

        name = f"product {spec.m}x{spec.n}x{spec.k}"
        return StandInPlan(self._fake, name, (a, b, (spec.m, spec.n)), spec.dtype, spec.result, product)


def _taps(spec: ConvolutionSpec) -> list[tuple[int, int]]:
    return [(r, s) for r in range(spec.r) for s in range(spec.s)]


def _window(spec: ConvolutionSpec, padded: F32, r: int, s: int) -> F32:
    """The elements of a padded x [N,H+2p,W+2p,C] that tap (r, s) meets, [N,Ho,Wo,C]: a view."""
    rows = slice(r, r + spec.stride * (spec.out_h - 1) + 1, spec.stride)
    columns = slice(s, s + spec.stride * (spec.out_w - 1) + 1, spec.stride)
    return padded[:, rows, columns]


def _padded(spec: ConvolutionSpec, x: F32) -> F32:
    return np.pad(x, ((0, 0), (spec.pad, spec.pad), (spec.pad, spec.pad), (0, 0)))


def _rows(spec: ConvolutionSpec, values: F32) -> F32:
    """[groups, pixels, channels of a group]."""
    return values.reshape(-1, spec.groups, values.shape[-1] // spec.groups).transpose(1, 0, 2)


def _taps_of(spec: ConvolutionSpec, w: F32) -> F32:
    """[R, S, groups, K/groups, C/groups]."""
    return w.reshape(spec.groups, -1, *w.shape[1:]).transpose(2, 3, 0, 1, 4)


def _forward(spec: ConvolutionSpec, x: F32, w: F32) -> F32:
    padded, taps = _padded(spec, x), _taps_of(spec, w)
    y = np.zeros((spec.groups, spec.n * spec.out_h * spec.out_w, spec.k // spec.groups), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for r, s in _taps(spec):
            y += _rows(spec, _window(spec, padded, r, s)) @ taps[r, s].transpose(0, 2, 1)
    return y.transpose(1, 0, 2).reshape(spec.n, spec.out_h, spec.out_w, spec.k)


def _data(spec: ConvolutionSpec, dy: F32, w: F32) -> F32:
    taps, grad = _taps_of(spec, w), _rows(spec, dy)
    padded = np.zeros((spec.n, spec.h + 2 * spec.pad, spec.w + 2 * spec.pad, spec.c), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for r, s in _taps(spec):
            window = _window(spec, padded, r, s)
            window += (grad @ taps[r, s]).transpose(1, 0, 2).reshape(window.shape)
    return padded[:, spec.pad : spec.pad + spec.h, spec.pad : spec.pad + spec.w]


def _weight(spec: ConvolutionSpec, dy: F32, x: F32) -> F32:
    padded, grad = _padded(spec, x), _rows(spec, dy).transpose(0, 2, 1)
    dw = np.zeros((spec.groups, spec.k // spec.groups, spec.r, spec.s, spec.c // spec.groups), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for r, s in _taps(spec):
            dw[:, :, r, s] = grad @ _rows(spec, _window(spec, padded, r, s))
    return dw.reshape(spec.k, spec.r, spec.s, -1)
