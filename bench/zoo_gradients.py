"""Loss, parameter gradients and running statistics of every model of the zoo against PyTorch with the same weights.

    python -m bench.zoo_gradients [MODEL ...] [--tables 0123] [--threads N] [--backend cpu|reference] [--write]

The yardstick is PyTorch in float64 at the weights that the step computes with (for bf16: rounded to bf16). Beside our
errors stand PyTorch's own, in fp32 and under autocast to bf16, from the same weights, images and dropout masks. An
error is |difference| / |value| in the Frobenius norm, one number for each parameter tensor. PyTorch runs in a process
of the peers' environment (``bench.peers.zoo_gradients``), which gets everything in one file.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, cpu_name, peers_python
from renaissance.backend.reference.elementwise import dropout_factor
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.machine import CorePlan
from renaissance.data.station import SlotView
from renaissance.graph import CompileRequest, Variant, compile_model
from renaissance.task.engine import Engine
from renaissance.zoo import entry

PAGE = ROOT / "docs" / "results" / "zoo-gradients.md"
BATCHES = {
    "lenet5": 64,
    "nin": 32,
    "vgg11_bn": 8,
    "vgg16_bn": 8,
    "resnet18": 8,
    "resnet34": 8,
    "resnet50": 8,
    "mobilenet_v2": 8,
    "resnet18_cifar": 16,
    "resnet50_cifar": 8,
}
WITHOUT_NORMS = ("lenet5", "nin")
SIZE = 64
"""Pixels of the images of the models made for 224, whose float64 steps would take hours."""
SMOOTHING, SEED, STEP = 0.1, 20260401, 0


def bf16(values: np.ndarray) -> np.ndarray:
    return fp32_from_bf16(bf16_from_fp32(values))


class Ours:
    """Our step of one model on one random batch."""

    def __init__(self, name: str, half: DType | None, shift: float, threads: int, backend: str) -> None:
        self.half = half
        shape, n, classes = entry(name).input, BATCHES[name], entry(name).num_classes
        size = min(shape.h, SIZE)
        rng = np.random.default_rng(7)
        self.images = rng.standard_normal((n, size, size, shape.c)).astype(np.float32)
        self.labels = rng.integers(0, classes, n).astype(np.int32)
        request = CompileRequest(
            height=size,
            width=size,
            channels=shape.c,
            num_classes=classes,
            train_batch=n,
            val_batch=n,
            half=half,
            label_smoothing=SMOOTHING,
        )
        images = self.images if half is None else bf16_from_fp32(self.images)
        slots = [SlotView(images.copy(), self.labels.copy()) for _ in range(2)]
        cores = CorePlan.choose(workers=1, compute_threads=threads)
        self.engine = Engine(compile_model(entry(name).make(classes), request), backend, cores, slots, slots)
        self.engine.initialize(SEED)
        self.parameters = self.engine.compiled.parameters
        self._vary(shift)

    def _vary(self, shift: float) -> None:
        """Scales and biases away from 1 and 0, where mistakes in them would not show; those of batch norms ``shift``
        further."""
        rng = np.random.default_rng(11)
        for parameter in self.parameters:
            if not parameter.decay:
                values = np.array(self.engine.read(parameter.weight))
                values += 0.1 * rng.standard_normal(values.shape).astype(np.float32)
                self.engine.write(parameter.weight, values + shift * parameter.name.endswith(".bn.bias"))
        self.engine.weights_written()

    def step(self) -> dict[str, np.ndarray]:
        """Everything the other side needs to repeat the step and to measure its results."""
        weights = {f"weight{i}": np.array(self.engine.read(p.weight)) for i, p in enumerate(self.parameters)}
        self.engine.train_step(0, len(self.labels), 0.0, last=False)
        compiled = self.engine.compiled
        result = {f"grad{i}": np.array(self.engine.read(p.grad)) for i, p in enumerate(self.parameters)}
        for i, norm in enumerate(compiled.batch_norms):
            result[f"mean{i}"] = np.array(self.engine.read(norm.prev_mean))
            result[f"var{i}"] = np.array(self.engine.read(norm.prev_var))
        result |= weights | self._masks() | {"images": self.images, "labels": self.labels}
        result["loss"] = np.array(self.engine.read(compiled.scalar("loss")))
        result["names"] = np.array([p.name for p in self.parameters])
        if self.half is not None:
            result |= {f"rounded{i}": bf16(weights[f"weight{i}"]) for i, p in enumerate(self.parameters) if p.decay}
            result["rounded_images"] = bf16(self.images)
        return result

    def _masks(self) -> dict[str, np.ndarray]:
        compiled = self.engine.compiled
        masks = {}
        for node in compiled.training.nodes:
            if node.op == "DROPOUT_FWD":
                shape = compiled.plans[Variant.TRAIN_BASE].tensor(node.outputs[0]).shape
                layer, p = int(node.attrs["layer"]), float(node.attrs["p"])
                masks[f"mask{layer}"] = dropout_factor(shape.numel, p, layer, SEED, STEP).reshape(shape.dims)
        return masks


def compare(name: str, half: DType | None, shift: float, threads: int, backend: str) -> dict[str, Any]:
    """Errors of ours and of PyTorch itself, as ``bench.peers.zoo_gradients`` finds them."""
    ours = Ours(name, half, shift, threads, backend)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.npz"
        np.savez(path, **ours.step())
        ours.engine.close()
        del ours
        command = [
            str(peers_python()),
            "-m",
            "bench.peers.zoo_gradients",
            name,
            str(path),
            *(["--bf16"] if half else []),
        ]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{name}: {found.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def row(name: str, answer: dict[str, Any]) -> str:
    cells = [name, answer["images"], f"{answer['parameters']:,}"]
    for side in ("ours", "own", "disturbed"):
        e = answer[side]
        cells += [f"{e['loss']:.0e}", f"{e['median']:.1e}", f"{e['worst']:.1e} ({e['where']})"]
        cells += [f"{e[key]:.0e}" if e[key] else "" for key in ("zeros", "statistics")]
    return "| " + " | ".join(cells) + " |"


SIDES = ("ours", "PyTorch", "disturbed")
MEASURES = ("loss", "gradients: median", "worst", "zeros", "BN statistics")
COLUMNS = ["model", "images", "parameters", *(f"{side}: {measure}" for side in SIDES for measure in MEASURES)]
HEAD = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"
TEXT = """# Gradients of the model zoo against PyTorch

`python -m bench.zoo_gradients --write` makes this page: one training step of every model on random images, label
smoothing 0.1, dropout with the same masks on both sides, all BN scales and biases moved away from their first values.
{machine}

Every number is |difference| / |value| against PyTorch in float64 with the same weights, in the Frobenius norm: one for
each parameter tensor, the median and the worst over the tensors of a model. For bf16 the yardstick is float64 at the
weights and images rounded to bf16, so that what is seen is the arithmetic of the step. *Ours* is our step, *PyTorch*
its own, in fp32 and under autocast. *Zeros*: some gradients are 0 in exact arithmetic, that of a bias which a later
batch norm takes out again; what is left of them is given relative to the gradient of the weights before them. (Some
biases are taken out all but a rest: conv34 and conv24 of ResNet-50, in the last table.) *BN statistics*: the worst of
the running means and variances after the step.

*Disturbed* shows how sensitive these gradients are: float64 in everything, but with the output of every convolution
moved by a millionth of its size (fp32), or rounded to bf16. A value near 0 then falls on the other side of its ReLU,
or another pixel wins a max pool, and the derivative jumps. One such jump is worth up to a hundredth of a gradient, and
in bf16 a deep network with its first weights has thousands: there, nobody's gradient is that of float64, and the
first two tables say no more than that ours is as good as PyTorch's. So the bench runs a second time with the bias of
every batch norm raised by 2, where few values are near 0. 3x3 convolutions of stride 1 run by Winograd's algorithms
here, which are less exact than the plain sum (errors of every op: op-errors.md) and so flip more ReLUs.

{tables}
"""
TABLES = (
    ("fp32", None, 0.0),
    ("bf16", DType.BF16, 0.0),
    ("fp32, biases of batch norms raised by 2", None, 2.0),
    ("bf16, biases of batch norms raised by 2", DType.BF16, 2.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", default=list(BATCHES), help="names of the zoo; all by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--tables", default="0123", help="which of the four tables; all by default, and with --write")
    options = parser.parse_args()
    if options.write and options.tables != "0123":
        parser.error("--write needs all tables")
    parts, torch = [], "?"
    for number in options.tables:
        title, half, shift = TABLES[int(number)]
        lines = [HEAD]
        for name in options.models:
            if shift and name in WITHOUT_NORMS:
                continue
            answer = compare(name, half, shift, options.threads, options.backend)
            torch = answer["torch"]
            lines.append(row(name, answer))
            print(f"{title} {lines[-1]}", flush=True)
        parts.append(f"## {title}\n\n" + "\n".join(lines))
    if options.write:
        versions = f"Python {platform.python_version()}, PyTorch {torch}"
        machine = f"Measured on {cpu_name()}, {options.threads} threads, {versions}."
        PAGE.write_text(TEXT.format(machine=machine, tables="\n\n".join(parts)))


if __name__ == "__main__":
    main()
