"""Worst errors of every op of the CPU backend against float64, as the table of docs/results/op-errors.md.

    python -m bench.op_errors [--threads N] [--write]

The cases are those of the unit tests (tests/unit/op_sweep.py) and, for convolutions and norms, the layers of the zoo at
small batches. An error is the largest |difference| of an output over its largest |value|; *of allowed* is the largest
difference over what fp32 sums of that many terms and one rounding of the result may give. The last column says whether
teams of one, two and three threads give the same bits.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from op_cases import Case, compare, measured  # noqa: E402
from op_sweep import FAMILIES, Draw, convolution, norm_backward, norm_forward  # noqa: E402

from bench.harness import cpu_name  # noqa: E402
from renaissance.backend.cpu.onednn import onednn  # noqa: E402
from renaissance.core.dtype import DType  # noqa: E402

PAGE = ROOT / "docs" / "results" / "op-errors.md"
TYPES = (DType.FP32, DType.BF16)
TEAMS = (1, 2, 3)
LAYERS = (
    # n, h, w, channels, out, kernel, stride, pad, groups: layers of ResNet-18 and -50, VGG, MobileNetV2, NiN
    (2, 224, 224, 3, 64, 7, 2, 3, 1),
    (4, 32, 32, 3, 64, 3, 1, 1, 1),
    (4, 56, 56, 64, 64, 3, 1, 1, 1),
    (4, 56, 56, 64, 128, 3, 2, 1, 1),
    (8, 28, 28, 128, 128, 3, 1, 1, 1),
    (8, 14, 14, 256, 256, 3, 1, 1, 1),
    (16, 7, 7, 512, 512, 3, 1, 1, 1),
    (32, 4, 4, 512, 512, 3, 1, 1, 1),
    (4, 56, 56, 64, 256, 1, 1, 0, 1),
    (4, 56, 56, 256, 512, 1, 2, 0, 1),
    (16, 7, 7, 512, 2048, 1, 1, 0, 1),
    (4, 112, 112, 32, 32, 3, 1, 1, 32),
    (4, 56, 56, 144, 144, 3, 2, 1, 144),
    (8, 14, 14, 384, 384, 3, 1, 1, 384),
    (16, 7, 7, 960, 960, 3, 1, 1, 960),
    (8, 32, 32, 3, 192, 5, 1, 2, 1),
    (4, 28, 28, 128, 128, 3, 1, 1, 32),
)
NORMS = ((8, 56, 56, 64), (32, 14, 14, 256), (32, 7, 7, 960), (64, 1, 1, 128))


def zoo_layers() -> Iterator[Case]:
    for i, geometry in enumerate(LAYERS):
        yield from convolution(geometry, Draw(101, i), activation=("none", "relu")[i % 2], bias=i % 3 == 0)
    for i, shape in enumerate(NORMS):
        draw = Draw(102, i)
        yield norm_forward(shape, shape[0] - i, draw(*shape) * 2 + 0.5, draw, "relu", True)
        yield norm_backward(shape, shape[0] - i, draw, "relu", True, 2)


class Row:
    """What has been seen of one op."""

    def __init__(self) -> None:
        self.cases = 0
        self.relative = dict.fromkeys(TYPES, 0.0)
        self.allowed = dict.fromkeys(TYPES, 0.0)
        self.worst = dict.fromkeys(TYPES, "")
        self.differs: set[str] = set()

    def add(self, case: Case, threads: int) -> None:
        self.cases += 1
        for f in TYPES:
            got = measured(case, "cpu", f, threads)
            for error in compare(case, f, got):
                self.relative[f] = max(self.relative[f], error.relative)
                if error.of_allowed > self.allowed[f]:
                    self.allowed[f], self.worst[f] = error.of_allowed, f"{case.title}, {error.output}"
            for team in TEAMS:
                other = measured(case, "cpu", f, team) if team != threads else got
                if any(other[k].tobytes() != got[k].tobytes() for k in got):
                    self.differs.add(f.name.lower())

    def text(self, op: str) -> str:
        cells = [op, str(self.cases)]
        for f in TYPES:
            cells += [f"{self.relative[f]:.1e}" if self.relative[f] else "0", f"{self.allowed[f]:.2f}"]
        cells.append("yes" if not self.differs else "no: " + ", ".join(sorted(self.differs)))
        return "| " + " | ".join(cells) + " |"


HEAD = """# Errors of every op

`python -m bench.op_errors --write` makes this page. Every op of the CPU backend that does arithmetic, forward and
backward, against the float64 reference on the same stored operands, over {cases} cases: odd sizes, one channel, one
sample, one place, stride 3, groups, depthwise, padded batches, and the layers of the model zoo.

{machine}

An error is the largest difference of an output over its largest value (where terms cancel to less than a thousandth,
over the largest sum of absolute terms). A bf16 result is rounded once, so half a unit in the last place, 2^-8 = 3.9e-3
of the value, is the floor. Gradients of weights are fp32 in both columns.

What is rounded besides: 3x3 convolutions of stride 1 run by Winograd's algorithms, in fp32 F(4x4), whose transforms
cost a digit and a half, in bf16 F(2x2), whose transformed operands are rounded to bf16; folded weights (CONV_INF) and
sums of two gradients (BN_BWD) are rounded before they are used.

*Of allowed*: the largest difference over what this arithmetic explains: (terms + 4) 2^-24 of the sum of absolute terms,
one rounding of the result to its type, and for convolutions 8 standard deviations of terms rounded to bf16 one by one
(a test fails above 1). *Teams*: one, two and three threads give the same bits. Where they do not, the library cuts a
sum by the number of threads, which therefore is part of the numeric profile.

| op | cases | fp32 error | of allowed | bf16 error | of allowed | teams |
|---|---|---|---|---|---|---|
"""


def machine(threads: int) -> str:
    library = onednn()
    return (
        f"Measured on {cpu_name()}, {threads} threads, oneDNN {library.version} ({library.isa}), "
        f"Python {platform.python_version()}, NumPy {np.__version__}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} instead of printing")
    options = parser.parse_args()
    rows: dict[str, Row] = defaultdict(Row)
    for family in (*FAMILIES, zoo_layers):
        for case in family():
            rows[case.op].add(case, options.threads)
    head = HEAD.format(cases=sum(r.cases for r in rows.values()), machine=machine(options.threads))
    text = head + "\n".join(row.text(op) for op, row in rows.items()) + "\n"
    for op, row in rows.items():
        for f in TYPES:
            if row.allowed[f] > 1:
                print(f"{op} {f.name}: {row.allowed[f]:.2f} of allowed at {row.worst[f]}", file=sys.stderr)
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
