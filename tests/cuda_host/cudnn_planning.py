"""What test_cudnn_plans runs in a process of its own, with a libcuda.so.1 that knows no device on its path.

    python cudnn_planning.py plans FOLDER        a few plans built, kept and read again
    python cudnn_planning.py all                 every convolution of the zoo built, in every type

Prints one JSON object. gpu_properties/ holds device descriptors in cuDNN's own form: sm_90 is an H200, sm_80 an A100,
sm_120 a GeForce RTX 5090, the last two from published figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from renaissance import zoo
from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.cudnn import CudnnConvolutions, CudnnPlan, Target
from renaissance.backend.cuda.libraries import ConvolutionSpec
from renaissance.backend.cuda.plans import PlanFolder
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError
from renaissance.graph import build_arch_plan

PROPERTIES = Path(__file__).parent / "gpu_properties"
TARGETS = ("sm_80", "sm_90", "sm_120")
BATCH = 64
NOT_CAPTURING = cast(CudaRuntime, SimpleNamespace(streamIsCapturing=lambda stream: False))


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of one model; ``macs``: multiply-adds of one sample."""

    model: str
    first: bool
    sizes: dict[str, int]
    macs: int


def layers() -> Iterator[Layer]:
    """Every convolution of the zoo."""
    for name in zoo.models():
        entry = zoo.entry(name)
        for layer in build_arch_plan(zoo.model(name), entry.input, entry.num_classes).layers:
            if "groups" in layer.attrs:
                a, x = layer.attrs, layer.input
                sizes = {"h": x.h, "w": x.w, "c": x.c, "k": a["out"], "r": a["kernel"], "s": a["kernel"]}
                sizes |= {name: a[name] for name in ("stride", "pad", "groups")}
                one = spec_of(sizes, Direction.FORWARD, DType.FP32)
                sums = one.out_h * one.out_w * one.k
                yield Layer(name, layer.first, sizes, sums * one.r * one.s * one.c // one.groups)


def spec_of(sizes: dict[str, int], direction: Direction, dtype: DType) -> ConvolutionSpec:
    """For a batch of 64."""
    return ConvolutionSpec(direction, BATCH, **sizes, dtype=dtype)


def specs(dtype: DType) -> list[ConvolutionSpec]:
    """Every convolution that training a model of the zoo computes, once: there is no data gradient of a first layer."""
    return list(
        dict.fromkeys(
            spec_of(layer.sizes, direction, dtype)
            for layer in layers()
            for direction in Direction
            if direction is not Direction.DATA or not layer.first
        )
    )


def convolutions(target: str, **options: Any) -> CudnnConvolutions:
    """cuDNN for a described device."""
    return CudnnConvolutions(NOT_CAPTURING, Target(target, (PROPERTIES / f"{target}.json").read_text()), **options)


def every_plan() -> dict[str, Any]:
    """Of each target and type the convolutions that end without a plan, and the largest workspace."""
    report: dict[str, Any] = {}
    for target in TARGETS:
        for dtype, tf32 in ((DType.FP16, False), (DType.BF16, False), (DType.FP32, True), (DType.FP32, False)):
            dnn, refused, workspace = convolutions(target, tf32=tf32), [], 0
            for spec in specs(dtype):
                try:
                    workspace = max(workspace, dnn.plan(spec).workspace)
                except DeviceError:
                    refused.append(str(spec))
            name = f"{target} {dtype.name}" + (" TF32" if tf32 else "")
            report[name] = {"refused": refused, "workspace": workspace, "facts": dnn.facts()}
    return report


SMALL = {"h": 32, "w": 32, "c": 64, "k": 64, "r": 3, "s": 3, "stride": 1, "pad": 1, "groups": 1}
DEPTHWISE = SMALL | {"groups": 64}
BUILT = (
    spec_of(SMALL, Direction.FORWARD, DType.FP16),
    spec_of(SMALL | {"r": 1, "s": 1, "stride": 2, "pad": 0, "k": 128}, Direction.WEIGHT, DType.BF16),
    spec_of(DEPTHWISE, Direction.DATA, DType.FP32),
)
"""Built for each target: every direction, every type, a stride, groups, float32 without TF32."""


def a_few_plans(folder: Path) -> dict[str, Any]:
    """Build ``BUILT`` for each target, and read them again; then what a stored plan must not be trusted for."""
    return {
        "plans": {target: [_kept(target, spec, folder / target) for spec in BUILT] for target in TARGETS},
        "damage": _damaged("sm_90", BUILT[0], folder / "damaged"),
        "execution": _executed(convolutions("sm_90", folder=PlanFolder(folder / "sm_90")).plan(BUILT[0])),
        "refused": _refused(spec_of(SMALL, Direction.WEIGHT, DType.FP32)),
        "frontend": convolutions("sm_90").facts()["cudnn_frontend"],
    }


def _kept(target: str, spec: ConvolutionSpec, folder: Path) -> dict[str, Any]:
    made = convolutions(target, folder=PlanFolder(folder))
    plan, files = made.plan(spec), _files(folder)
    read = convolutions(target, folder=PlanFolder(folder))
    again = read.plan(spec)
    return {
        "name": plan.name,
        "workspace": plan.workspace,
        "same": (plan.name, plan.workspace, made.facts()) == (again.name, again.workspace, read.facts()),
        "once": made.plan(spec) is plan,
        "read": _files(folder) == files,  # a plan that is made anew is written anew
    }


def _damaged(target: str, spec: ConvolutionSpec, folder: Path) -> dict[str, Any]:
    """Whether a stored plan that cuDNN does not take, or that has become another, is made anew and written again."""
    store, key = PlanFolder(folder), convolutions(target).key(spec)
    plan = convolutions(target, folder=store).plan(spec)
    stored = store.load(key)
    assert stored is not None
    outcome = {}
    for name, bad in {
        "nonsense": replace(stored, blob=b"{}"),
        "cut": replace(stored, blob=stored.blob[:-100]),
        "other workspace": replace(stored, workspace=stored.workspace + 1),
    }.items():
        store.keep(key, bad)
        again, written = convolutions(target, folder=store).plan(spec), store.load(key)
        assert written is not None
        new = (written.name, written.workspace, len(written.blob)) == (stored.name, stored.workspace, len(stored.blob))
        outcome[name] = new and (again.name, again.workspace) == (plan.name, plan.workspace)
    return outcome


def _executed(plan: CudnnPlan) -> str:
    """What cuDNN says to a plan that is executed without a handle: it has taken the addresses by then."""
    room = Buffer(0x10000, 1 << 30)
    try:
        replace(plan, handles={7: None}).execute(7, room, room, room, room)
    except DeviceError as error:
        return str(error)
    return "executed"


def _refused(spec: ConvolutionSpec) -> str:
    """What is said when no plan is small enough. One that the notes rule out is not compiled."""
    try:
        convolutions("sm_80", workspace=-1).plan(spec)
    except DeviceError as error:
        return str(error)
    return "planned"


def _files(folder: Path) -> Iterable[tuple[str, int]]:
    return sorted((path.name, path.stat().st_ino) for path in folder.iterdir())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plans", given]:
            print(json.dumps(a_few_plans(Path(given))))
        case ["all"]:
            print(json.dumps(every_plan()))
        case other:
            sys.exit(f"unknown: {other}")
