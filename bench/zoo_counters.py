"""Law 3 as numbers, for every model of the zoo: what a training step and a validation step allocate and reorder.

    python -m bench.zoo_counters [MODEL...]

Weights are packed once per layer and direction in a training step, because the step before has changed them, and never
in a validation step. Heap growth is that of ``STEPS`` steps after the first: Python's (tracemalloc) and the C library's
(mallinfo2). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tracemalloc
from collections import Counter
from dataclasses import dataclass

from renaissance import zoo
from renaissance.backend.executor import GraphExecutor
from renaissance.core.dtype import DType
from renaissance.core.enums import OptimizerKind
from renaissance.graph import CompileRequest, Variant, compile_model

STEPS, BATCH, LARGEST_SIDE = 3, 2, 64
PACK = " pack"


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


@dataclass(frozen=True)
class Counters:
    """Of one model and element type. ``packs``: reorders of weights in a step; ``twice``: those of them that pack the
    same weights for the same direction again; growths in bytes."""

    model: str
    dtype: str
    calls: int
    packs: int
    twice: int
    val_calls: int
    val_packs: int
    arena_allocations: int
    python_growth: int
    heap_growth: int


def heap_in_use() -> int:
    """Bytes that the C library has handed out, mapped blocks included."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Heap
    heap = info()
    return int(heap.uordblks + heap.hblkhd)


def count(name: str, half: bool) -> Counters:
    """Compile a model for a small input, run it, count."""
    entry = zoo.entry(name)
    side = min(entry.input.h, LARGEST_SIDE)
    if entry.input.h != side and name.startswith("vgg"):
        side = entry.input.h  # its first fc layer belongs to one size
    request = CompileRequest(
        height=side, width=side, channels=entry.input.c, num_classes=entry.num_classes, train_batch=BATCH,
        val_batch=BATCH, half=DType.BF16 if half else None, optimizer=OptimizerKind.SGD_MOMENTUM,
    )  # fmt: skip
    executor = GraphExecutor(compile_model(zoo.model(name, entry.num_classes), request), threads=2)
    for slot in (*executor.own_train_slots, *executor.own_val_slots):
        slot.labels[:] = 0
    programs = [executor.program(v, 0).splitlines() for v in (Variant.TRAIN_BASE, Variant.VAL_BASE)]
    packs = Counter(line.split(maxsplit=1)[1] for line in programs[0] if PACK in line)
    executor.run_train_step(0, lr=0.0, valid=BATCH)
    executor.run_val_step(0, valid=BATCH)
    gc.collect()
    allocations, heap = executor.arena.allocations, heap_in_use()
    tracemalloc.start()
    python = tracemalloc.get_traced_memory()[0]
    for step in range(STEPS):
        executor.run_train_step(step % 2, lr=0.0, valid=BATCH)
        executor.run_val_step(step % 2, valid=BATCH)
    grown = tracemalloc.get_traced_memory()[0] - python
    tracemalloc.stop()
    return Counters(
        model=name,
        dtype="bf16" if half else "fp32",
        calls=len(programs[0]),
        packs=sum(packs.values()),
        twice=sum(n - 1 for n in packs.values()),
        val_calls=len(programs[1]),
        val_packs=sum(PACK in line for line in programs[1]),
        arena_allocations=executor.arena.allocations - allocations,
        python_growth=grown,
        heap_growth=heap_in_use() - heap,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(zoo.models()))
    columns = list(Counters.__dataclass_fields__)
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for name in parser.parse_args().models:
        for half in (True, False):
            counters = count(name, half)
            print("| " + " | ".join(str(getattr(counters, c)) for c in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
