"""The forms in which oneDNN offers each matrix product of the example (batch 200), side by side.

For choosing the fixed rule of ``renaissance/backend/cpu/products.py``: which primitive, and with which layouts,
computes FC_FWD, FC_BWD_WEIGHT and FC_BWD_DATA. The rule is not a timing at capture (law 2), so whoever meets a new
instruction set (AMX has not been measured) runs this once and compares the row marked ``*``, the present rule, with the
others:

    python -m bench.products [--threads N] [--dtype bf16|fp32] [--rounds N]

A form that reads or writes another layout than the arena's must also pay for the column ``reorder``: one copy of that
operand in every step. The forms of one product run in turns, one call each per round; a row is the median of the
rounds. A form that falls to a reference implementation takes seconds per call and leaves after a few rounds.
The inner product's weight gradient also sums the bias gradient, which the rule leaves to a kernel of its own (about
1 us per 10,000 elements of dy and core). The last line is JSON; ``us`` is null for a form that the library refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.harness import cpu_name
from renaissance.backend.arena import MemoryArena
from renaissance.backend.cpu.onednn import Arg, MemoryDesc, OneDnn, Primitive, explain, onednn
from renaissance.backend.cpu.queue import NativeQueue, team_call
from renaissance.backend.cpu.threads import configure
from renaissance.core.dtype import DType, bf16_from_fp32
from renaissance.core.errors import DeviceError

BATCH = 200
LAYERS = ((784, 1024), (1024, 512), (512, 256), (256, 10))
"""(in, out) of the example's four layers."""
SCRATCH = 64 << 20
PATIENCE = 0.3
"""Seconds after which a form takes no more turns."""


class Operand:
    """A matrix of the arena: its memory, and the layouts under which a form may address it."""

    def __init__(self, bench: Bench, rows: int, columns: int, dtype: DType) -> None:
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.address = bench.memory(rows * columns * dtype.itemsize, dtype)
        self.plain = bench.dnn.desc((rows, columns), dtype)
        self.turned = bench.dnn.desc((columns, rows), dtype, (1, columns))
        """The same memory read as the transposed matrix."""


@dataclass
class Form:
    """One way to compute a product; ``reorders`` are the copies of operands that it needs on top."""

    product: str
    layer: tuple[int, int]
    name: str
    is_rule: bool
    implementation: str = ""
    queue: NativeQueue | None = None
    reorders: list[NativeQueue] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reorder_times: list[float] = field(default_factory=list)

    @property
    def us(self) -> float | None:
        return round(statistics.median(self.times) * 1e6, 1) if self.times else None

    @property
    def gflops(self) -> float | None:
        flops = 2 * BATCH * self.layer[0] * self.layer[1]
        return round(flops / statistics.median(self.times) / 1e9, 1) if self.times else None

    @property
    def reorder_us(self) -> float:
        return round(statistics.median(self.reorder_times) * 1e6, 1) if self.reorder_times else 0.0

    def run(self) -> None:
        """One call of the form and one of its reorders, each timed."""
        if self.queue is None or sum(self.times) + sum(self.reorder_times) > PATIENCE:
            return
        start = time.perf_counter()
        for reorder in self.reorders:
            reorder.launch()
        middle = time.perf_counter()
        self.queue.launch()
        end = time.perf_counter()
        self.times.append(end - middle)
        if self.reorders:
            self.reorder_times.append(middle - start)


class Bench:
    """Memory, library and the forms built so far, for one element type."""

    def __init__(self, dtype: DType, threads: int) -> None:
        self.dnn: OneDnn = onednn()
        self.dtype, self.threads = dtype, threads
        self._arena = MemoryArena(SCRATCH)
        self._numbers = np.random.default_rng(123)

    def memory(self, nbytes: int, dtype: DType | None = None) -> int:
        """Address of new memory: zeros, or normally distributed numbers of ``dtype``."""
        block = self._arena.block(nbytes, "operand")
        if dtype is not None:
            numbers = self._numbers.standard_normal(nbytes // dtype.itemsize, np.float32)
            block.view(dtype.numpy)[...] = bf16_from_fp32(numbers) if dtype.is_half else numbers
        return int(block.ctypes.data)

    def bind(self, primitive: Primitive, operands: dict[Arg, tuple[MemoryDesc, int]], name: str) -> NativeQueue:
        if primitive.scratchpad > SCRATCH:
            raise DeviceError(f"{name}: needs {primitive.scratchpad} bytes of scratch memory; expected up to {SCRATCH}")
        call = primitive.bind(operands, self._arena.base, name)
        queue = NativeQueue([team_call(self.threads), call], explain)
        queue.launch()  # the first call of a primitive is slower
        return queue

    def copy(self, source: tuple[MemoryDesc, int], target: tuple[MemoryDesc, int]) -> NativeQueue:
        operands = {Arg.SRC: source, Arg.DST: target}
        return self.bind(self.dnn.reorder(source[0], target[0]), operands, "reorder")

    def turn(self, operand: Operand) -> tuple[tuple[MemoryDesc, int], NativeQueue]:
        """(the transposed matrix in memory of its own, read as the matrix itself), and the copy that makes it."""
        address = self.memory(operand.rows * operand.columns * operand.dtype.itemsize)
        desc = self.dnn.desc((operand.rows, operand.columns), operand.dtype, (1, operand.rows))
        return (desc, address), self.copy((operand.plain, operand.address), (desc, address))

    def forms(self, layer: tuple[int, int]) -> Iterator[Form]:
        """Every form of the three products of one layer; the first layer has no input gradient."""
        features, out = layer
        x, w, y = (Operand(self, *size, self.dtype) for size in ((BATCH, features), (out, features), (BATCH, out)))
        dw, dx = Operand(self, out, features, DType.FP32), Operand(self, BATCH, features, self.dtype)
        bias = Operand(self, 1, out, DType.FP32)
        groups: list[tuple[str, dict[str, Callable[[Form], None]]]] = [
            ("FC_FWD", self._forward(x, w, bias, y)),
            ("FC_BWD_WEIGHT", self._weight_gradient(y, x, dw, bias, w)),
        ]
        if layer != LAYERS[0]:
            groups.append(("FC_BWD_DATA", self._input_gradient(y, w, dx)))
        for product, group in groups:
            for name, build in group.items():
                form = Form(product, layer, name, is_rule=name == "matmul")
                try:
                    build(form)
                except DeviceError as error:
                    form.implementation, form.queue = f"refused: {error}", None
                yield form

    # -- the forms of each product ------------------------------------------------------------------------------

    def _forward(self, x: Operand, w: Operand, bias: Operand, y: Operand) -> dict[str, Callable[[Form], None]]:
        """y = relu(x w^T + b)."""
        dnn, any_weights = self.dnn, self.dnn.any_desc((w.columns, w.rows), self.dtype)
        flat_bias = (dnn.desc((bias.columns,), DType.FP32), bias.address)

        def matmul(form: Form, weights: MemoryDesc = w.turned, address: int = w.address) -> None:
            primitive = dnn.matmul(x.plain, weights, bias.plain, y.plain, relu=True)
            if weights is any_weights:
                weights, address = self._library_layout(form, primitive, "weights", (w.turned, w.address))
            operands = {Arg.SRC: (x.plain, x.address), Arg.WEIGHTS: (weights, address)}
            operands |= {Arg.BIAS: (bias.plain, bias.address), Arg.DST: (y.plain, y.address)}
            self._finish(form, primitive, operands)

        def transposed_weights(form: Form) -> None:
            address = self.memory(w.rows * w.columns * w.dtype.itemsize)
            desc = dnn.desc((w.columns, w.rows), self.dtype)
            form.reorders.append(self.copy((w.turned, w.address), (desc, address)))
            matmul(form, desc, address)

        def transposed(form: Form) -> None:
            primitive = dnn.matmul(w.plain, x.turned, None, y.turned)
            operands = {Arg.SRC: (w.plain, w.address), Arg.WEIGHTS: (x.turned, x.address)}
            self._finish(form, primitive, operands | {Arg.DST: (y.turned, y.address)})

        def inner(form: Form, weights: MemoryDesc = w.plain) -> None:
            primitive = dnn.inner_product_forward(x.plain, weights, flat_bias[0], y.plain, relu=True)
            operand = (w.plain, w.address)
            if weights is not w.plain:
                operand = self._library_layout(form, primitive, "weights", operand)
            operands = {Arg.SRC: (x.plain, x.address), Arg.WEIGHTS: operand}
            self._finish(form, primitive, operands | {Arg.BIAS: flat_bias, Arg.DST: (y.plain, y.address)})

        return {
            "matmul": matmul,
            "matmul, library's weights": lambda form: matmul(form, any_weights),
            "matmul, weights transposed before": transposed_weights,
            "matmul, y^T = w x^T, no bias, no ReLU": transposed,
            "inner product": inner,
            "inner product, library's weights": lambda form: inner(form, dnn.any_desc((w.rows, w.columns), self.dtype)),
        }

    def _weight_gradient(
        self, dy: Operand, x: Operand, dw: Operand, db: Operand, w: Operand
    ) -> dict[str, Callable[[Form], None]]:
        """dw = dy^T x; FP32."""
        dnn = self.dnn
        flat_bias = (dnn.desc((db.columns,), DType.FP32), db.address)

        def product(form: Form, *operands: tuple[MemoryDesc, int]) -> None:
            primitive = dnn.matmul(operands[0][0], operands[1][0], None, operands[2][0])
            self._finish(form, primitive, dict(zip((Arg.SRC, Arg.WEIGHTS, Arg.DST), operands, strict=True)))

        def transposed_dy(form: Form) -> None:
            address = self.memory(dy.rows * dy.columns * dy.dtype.itemsize)
            desc = dnn.desc((dy.columns, dy.rows), self.dtype)
            form.reorders.append(self.copy((dy.turned, dy.address), (desc, address)))
            product(form, (desc, address), (x.plain, x.address), (dw.plain, dw.address))

        def transposed_x(form: Form) -> None:
            operand, copy = self.turn(x)
            form.reorders.append(copy)
            product(form, (dy.turned, dy.address), operand, (dw.plain, dw.address))

        def other_layout(form: Form) -> None:
            target = (dnn.desc((dw.columns, dw.rows), DType.FP32), self.memory(dw.rows * dw.columns * 4))
            product(form, (x.turned, x.address), (dy.plain, dy.address), target)
            form.reorders.append(self.copy(target, (dw.turned, dw.address)))

        def inner(form: Form, gradient: MemoryDesc = dw.plain) -> None:
            forward = dnn.inner_product_forward(x.plain, w.plain, flat_bias[0], dy.plain)
            primitive = dnn.inner_product_backward_weights(x.plain, gradient, flat_bias[0], dy.plain, forward)
            operand = (dw.plain, dw.address)
            if gradient is not dw.plain:
                layout = primitive.layout("diff_weights")
                if not dnn.same_layout(layout, dw.plain):
                    operand = (layout, self.memory(dnn.size(layout)))
                    form.reorders.append(self.copy(operand, (dw.plain, dw.address)))
            operands = {Arg.SRC: (x.plain, x.address), Arg.DIFF_WEIGHTS: operand, Arg.DIFF_BIAS: flat_bias}
            self._finish(form, primitive, operands | {Arg.DIFF_DST: (dy.plain, dy.address)})

        plain_x, turned_dy, plain_dw = (x.plain, x.address), (dy.turned, dy.address), (dw.plain, dw.address)
        return {
            "matmul": lambda form: product(form, turned_dy, plain_x, plain_dw),
            "matmul, dy transposed before": transposed_dy,
            "matmul, x transposed before": transposed_x,
            "matmul, dw^T = x^T dy, written transposed": lambda form: product(
                form, (x.turned, x.address), (dy.plain, dy.address), (dw.turned, dw.address)
            ),
            "matmul, dw^T = x^T dy, kept as [in,out]": other_layout,
            "inner product": inner,
            "inner product, library's dw": lambda form: inner(form, dnn.any_desc((dw.rows, dw.columns), DType.FP32)),
        }

    def _input_gradient(self, dy: Operand, w: Operand, dx: Operand) -> dict[str, Callable[[Form], None]]:
        """dx = dy w."""
        dnn, any_weights = self.dnn, self.dnn.any_desc((w.rows, w.columns), self.dtype)

        def matmul(form: Form, weights: tuple[MemoryDesc, int] = (w.plain, w.address)) -> None:
            primitive = dnn.matmul(dy.plain, weights[0], None, dx.plain)
            if weights[0] is any_weights:
                weights = self._library_layout(form, primitive, "weights", (w.plain, w.address))
            operands = {Arg.SRC: (dy.plain, dy.address), Arg.WEIGHTS: weights, Arg.DST: (dx.plain, dx.address)}
            self._finish(form, primitive, operands)

        def transposed_weights(form: Form) -> None:
            operand, copy = self.turn(w)
            form.reorders.append(copy)
            matmul(form, operand)

        def transposed(form: Form) -> None:
            primitive = dnn.matmul(w.turned, dy.turned, None, dx.turned)
            operands = {Arg.SRC: (w.turned, w.address), Arg.WEIGHTS: (dy.turned, dy.address)}
            self._finish(form, primitive, operands | {Arg.DST: (dx.turned, dx.address)})

        def inner(form: Form, weights: MemoryDesc = w.plain) -> None:
            forward = dnn.inner_product_forward(dx.plain, weights, None, dy.plain)
            primitive = dnn.inner_product_backward_data(dx.plain, weights, dy.plain, forward)
            operand = (w.plain, w.address)
            if weights is not w.plain:
                operand = self._library_layout(form, primitive, "weights", operand)
            operands = {Arg.DIFF_DST: (dy.plain, dy.address), Arg.WEIGHTS: operand}
            self._finish(form, primitive, operands | {Arg.DIFF_SRC: (dx.plain, dx.address)})

        return {
            "matmul": matmul,
            "matmul, library's weights": lambda form: matmul(form, (any_weights, 0)),
            "matmul, weights transposed before": transposed_weights,
            "matmul, dx^T = w^T dy^T": transposed,
            "inner product": inner,
            "inner product, library's weights": lambda form: inner(form, any_weights),
        }

    def _library_layout(
        self, form: Form, primitive: Primitive, operand: str, plain: tuple[MemoryDesc, int]
    ) -> tuple[MemoryDesc, int]:
        """An operand in the layout that the primitive chose, with the copy that fills it; ``plain`` when they agree."""
        layout = primitive.layout(operand)
        if self.dnn.same_layout(layout, plain[0]):
            return plain
        target = (layout, self.memory(self.dnn.size(layout)))
        form.reorders.append(self.copy(plain, target))
        return target

    def _finish(self, form: Form, primitive: Primitive, operands: dict[Arg, tuple[MemoryDesc, int]]) -> None:
        form.implementation = primitive.implementation
        form.queue = self.bind(primitive, operands, form.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time oneDNN's forms of the example's matrix products.")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    plan = configure(options.threads, "active")
    bench = Bench(DType.parse(options.dtype), options.threads)
    print(f"oneDNN {bench.dnn.version}, {bench.dnn.isa}, {cpu_name()}, {options.dtype}, batch {BATCH}, {plan}")
    forms: list[Form] = []
    for layer in LAYERS:
        group = list(bench.forms(layer))
        for product in dict.fromkeys(form.product for form in group):
            turns = [form for form in group if form.product == product]
            for _ in range(options.rounds):
                for form in turns:
                    form.run()
            report(turns)
        forms += group
    summary = {
        "name": "products",
        "onednn": bench.dnn.version,
        "isa": bench.dnn.isa,
        "cpu": cpu_name(),
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "rule_us": round(sum(form.us or 0.0 for form in forms if form.is_rule), 1),
        "forms": [
            {
                "product": form.product,
                "in": form.layer[0],
                "out": form.layer[1],
                "form": form.name,
                "rule": form.is_rule,
                "implementation": form.implementation,
                "us": form.us,
                "gflops": form.gflops,
                "reorder_us": form.reorder_us,
            }
            for form in forms
        ],
    }
    print(json.dumps(summary))


def report(forms: list[Form]) -> None:
    """The rows of one product of one layer."""
    features, out = forms[0].layer
    title = f"{forms[0].product} {features} -> {out}"
    print(f"\n{title:44}{'us':>11}{'GFLOP/s':>9}{'reorder':>9}  implementation")
    for form in forms:
        us, gflops = ("-", "-") if form.us is None else (form.us, form.gflops)
        reorder = form.reorder_us if form.reorders else ""
        print(
            f"{'*' if form.is_rule else ' '} {form.name:42}{us:>11}{gflops:>9}{reorder:>9}  {form.implementation[:60]}"
        )


if __name__ == "__main__":
    main()
