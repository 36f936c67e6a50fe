"""cuDNN without a GPU: plans of every convolution of the zoo for three devices, how plans are kept, what is refused.

Planning happens in processes of their own (cudnn_planning.py) with a libcuda.so.1 that knows no device. It takes the
whole of cuDNN: nvidia-cudnn-jit alone compiles each plan, which takes half an hour, and has none for some of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cudnn_planning
import libcuda_stub
import pytest

from renaissance import zoo
from renaissance.backend.convolution import Direction
from renaissance.backend.cuda import cudnn as module
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.cudnn import CudnnConvolutions, CudnnPlan, Target, nhwc_strides, operands
from renaissance.backend.cuda.libraries import ConvolutionSpec
from renaissance.backend.cuda.plans import PlanFolder, StoredPlan
from renaissance.backend.cuda.runtime import CudaRuntime
from renaissance.backend.cuda.tuning import PlanChoices, Question
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, DTypeError, ShapeError, ValueRejected
from renaissance.graph import build_arch_plan
from renaissance.graph.cost import model_cost

PROGRAM = Path(cudnn_planning.__file__)
ROOT = PROGRAM.parents[2]
SPEC = cudnn_planning.spec_of(cudnn_planning.SMALL, Direction.FORWARD, DType.FP16)
ROOM = Buffer(0x10000, 1 << 30)


@pytest.fixture(scope="module")
def planning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, subprocess.Popen[str]]]:
    """The processes that plan, both at once."""
    installed = {str(distribution.name) for distribution in importlib.metadata.distributions()}
    lacking = libcuda_stub.missing()
    if "nvidia-cudnn-frontend" not in installed:
        lacking = "no nvidia-cudnn-frontend"
    if not any(re.fullmatch(r"nvidia-cudnn-cu\d+", name) for name in installed):
        lacking = "no cuDNN (nvidia-cudnn-cu12)"
    if lacking is not None:
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("cudnn")
    path = os.pathsep.join(filter(None, (str(libcuda_stub.build(folder)), os.environ.get("LD_LIBRARY_PATH"))))
    environment = os.environ | {"LD_LIBRARY_PATH": path, "PYTHONPATH": str(ROOT)}
    tasks = {"all": (), "plans": (str(folder / "plans"),)}
    running = {
        name: subprocess.Popen(
            [sys.executable, str(PROGRAM), name, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, arguments in tasks.items()
    }
    try:
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return cast(dict[str, Any], json.loads(out))


def test_the_zoo_is_walked_completely() -> None:
    """The multiply-adds of the convolutions found and of the dense layers are those of each model."""
    found = Counter[str]()
    for layer in cudnn_planning.layers():
        found[layer.model] += layer.macs
    for name in zoo.models():
        entry = zoo.entry(name)
        plan = build_arch_plan(zoo.model(name), entry.input, entry.num_classes)
        dense = sum(a.input.numel * a.attrs["out"] for a in plan.layers if a.kind.name.startswith("FC"))
        assert found[name] + dense == model_cost(plan).macs, name
    assert len(cudnn_planning.specs(DType.FP16)) == 404


def test_every_convolution_of_the_zoo_has_a_plan_on_three_devices_in_every_type(
    planning: Mapping[str, subprocess.Popen[str]],
) -> None:
    done = outcome(planning["all"])
    assert len(done) == 12
    for name, found in done.items():
        assert found["refused"] == [], name
        assert 0 < found["workspace"] < 1 << 30, name


def test_plans_are_built_kept_and_taken_from_the_disk_only_when_they_are_good(
    planning: Mapping[str, subprocess.Popen[str]],
) -> None:
    found = outcome(planning["plans"])
    # Up to 1.25 at least, the frontend reads a plan only where there is a device; then it is made anew.
    reads = tuple(map(int, found["frontend"].split(".")[:2])) >= (1, 28)
    for target, plans in found["plans"].items():
        for plan in plans:
            assert plan["name"].startswith("eng"), target
            assert plan["workspace"] >= 0, target
            assert (plan["same"], plan["once"], plan["read"] or not reads) == (True, True, True), (target, plan)
    assert found["damage"] == {"nonsense": True, "cut": True, "other workspace": True}
    # It took the plan and the addresses and stops at the handle, which needs a device.
    assert "cuDNN failed on ConvolutionSpec" in found["execution"]
    assert "handle is NULL" in found["execution"]
    assert "cuDNN has no plan on sm_80 for ConvolutionSpec" in found["refused"]
    assert "without TF32 and at most -1 bytes of workspace: none of" in found["refused"]


def test_a_stored_plan_is_one_of_its_key_and_whole(tmp_path: Path) -> None:
    store, plan = PlanFolder(tmp_path / "new"), StoredPlan("eng1_k2=3", 131, bytes(range(256)) + b"\n\n")
    key = {"cudnn": "9.28.0", "target": "NVIDIA H200 sm_90", "convolution": {"n": 1}}
    assert store.load(key) is None
    store.keep(key, plan)
    assert store.load(key) == plan
    assert store.load(key | {"target": "NVIDIA A100 sm_80"}) is None
    good = store.path(key).read_bytes()
    for at in range(0, len(good), 7):
        store.path(key).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert store.load(key) is None, at
    for size in (0, 5, len(good) - 1):
        store.path(key).write_bytes(good[:size])
        assert store.load(key) is None, size
    other = key | {"cudnn": "9.29.0"}
    store.path(other).write_bytes(good)  # whole, and of another library
    assert store.load(other) is None
    store.keep(other, plan)
    assert store.load(other) == plan


def test_a_folder_that_cannot_be_written_keeps_nothing_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = PlanFolder(tmp_path / "file")
    store.keep({"a": 1}, StoredPlan("eng1", 0, b""))
    assert store.load({"a": 1}) is None


class Graph:
    """A graph of the frontend, recorded: ``plans`` are (name, workspace) in the order of the heuristics; those whose
    name is in ``barred`` do not build, as the frontend has it with engines that a note rules out."""

    def __init__(self, plans: list[tuple[str, int]], barred: set[str]) -> None:
        self.plans, self.barred, self.calls = plans, barred, list[Any]()
        self.broken: set[str] = set()

    def tensor(self, **attributes: Any) -> str:
        return cast(str, attributes["name"])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Graph:  # set_dim() and its like return what they change
            self.calls.append((name, *arguments, *named.items()))
            return self

        return call

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def build_plan_at_index(self, index: int) -> None:
        if self.plans[index][0] in self.barred:
            raise Frontend.cudnnGraphNotSupportedError("Deselecting execution plan")
        if self.plans[index][0] in self.broken:
            raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")
        self.calls.append(("built", index))

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.plans[index][1]

    def get_plan_name_at_index(self, index: int) -> str:
        return self.plans[index][0]


class Names:
    """An enumeration of the frontend: every name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class Frontend:
    """The frontend's calls, recorded; ``handle`` gives an int (up to 1.21) or an object (1.28)."""

    cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})  # noqa: N815  # its own name
    __version__ = "0"
    data_type = heur_mode = numerical_note = Names()

    def __init__(self, objects: bool = True, graph: Graph | None = None) -> None:
        self.objects, self.graph = objects, graph
        self.calls, self.made = list[Any](), 0

    def pygraph(self, **attributes: Any) -> Graph:
        assert self.graph is not None
        return self.graph

    def backend_version_string(self) -> str:
        return "0"

    def create_handle(self) -> object:
        self.made += 1
        return SimpleNamespace(number=self.made) if self.objects else self.made

    def set_stream(self, handle: object, stream: int) -> None:
        self.calls.append(("stream", handle, stream))

    def destroy_handle(self, handle: object) -> None:
        self.calls.append(("destroy", handle))


def capturing(*streams: int) -> CudaRuntime:
    return cast(CudaRuntime, SimpleNamespace(streamIsCapturing=lambda stream: stream in streams))


@pytest.mark.parametrize("objects", [False, True])
def test_each_stream_has_a_handle_of_its_own(monkeypatch: pytest.MonkeyPatch, objects: bool) -> None:
    fake = Frontend(objects)
    monkeypatch.setattr(module, "load", lambda: fake)
    dnn = CudnnConvolutions(capturing(), Target("a GPU"))
    with pytest.raises(DeviceError, match="before the convolutions were opened"):
        dnn.plan(SPEC)
    dnn.open([11, 12])
    handles = {stream: handle for _, handle, stream in fake.calls}
    assert list(handles) == [11, 12]
    executed = []
    graph = SimpleNamespace(
        execute=lambda addresses, workspace, handle: executed.append((addresses, workspace, handle))
    )
    plan = module.CudnnPlan(SPEC, "eng1", 64, graph, dnn._handles, (RuntimeError,))
    plan.execute(12, Buffer(256, 1 << 30), Buffer(512, 1 << 30), Buffer(768, 1 << 30), Buffer(1024, 64))
    assert executed == [({1: 256, 2: 512, 3: 768}, 1024, handles[12])]
    with pytest.raises(DeviceError, match=r"stream 0xd was not given to open"):
        plan.execute(13, ROOM, ROOM, ROOM, ROOM)
    with pytest.raises(DeviceError, match="w has 73726 bytes; expected 73728"):
        plan.execute(11, ROOM, Buffer(256, 73726), ROOM, ROOM)
    with pytest.raises(DeviceError, match="63 bytes of workspace; expected 64"):
        plan.execute(11, ROOM, ROOM, ROOM, Buffer(256, 63))
    dnn.close()
    dnn.close()
    assert [handle for what, handle, *_ in fake.calls if what == "destroy"] == [handles[12], handles[11]]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
def test_the_first_plan_within_the_rules_is_taken(monkeypatch: pytest.MonkeyPatch, tf32: bool, dtype: DType) -> None:
    graph = Graph([("eng20", 0), ("eng3_k2=1", 4097), ("eng7", 4096), ("eng8", 0)], barred={"eng20"})
    monkeypatch.setattr(module, "load", lambda: Frontend(graph=graph))
    dnn = CudnnConvolutions(capturing(), Target("a GPU"), tf32=tf32, workspace=4096)
    dnn.open([11])
    spec = replace(SPEC, dtype=dtype)
    plan = dnn.plan(spec)
    assert (plan.name, plan.workspace) == ("eng7", 4096)
    names = [call[0] for call in graph.calls]
    # A note rules out plans that exist already; none is built before.
    order = ("create_execution_plans", "deselect_numeric_notes", "built")
    assert [name for name in names if name in order] == [*order, "built"]
    (notes,) = (call[1] for call in graph.calls if call[0] == "deselect_numeric_notes")
    assert {"NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "DOWN_CONVERT_INPUTS"} <= set(notes)
    assert ("TENSOR_CORE" in notes) == (dtype is DType.FP32 and not tf32)
    assert ("create_execution_plans", ["A", "FALLBACK"]) in graph.calls
    graph.barred |= {"eng7", "eng8"}
    with pytest.raises(DeviceError, match=r"no plan on a GPU for ConvolutionSpec.*none of 4 plans is deterministic"):
        dnn.plan(replace(spec, n=1))
    graph.barred, graph.broken = {"eng20"}, {"eng7"}
    assert dnn.plan(replace(spec, n=2)).name == "eng8"  # an engine that fails to build leaves the next one
    graph.broken = {"eng7", "eng8"}
    with pytest.raises(DeviceError, match=r"none of 4 plans .*; one failed: CUDNN_STATUS_INTERNAL_ERROR"):
        dnn.plan(replace(spec, n=3))


class Plans(Graph):
    """A graph that can be stored: what it has built last, by name. It reads what was stored likewise."""

    def build_plan_at_index(self, index: int) -> None:
        super().build_plan_at_index(index)
        self.last = self.plans[index]

    def serialize(self) -> list[int]:
        return list(self.last[0].encode())

    def deserialize(self, handle: object, stored: list[int]) -> None:
        self.last = next(plan for plan in self.plans if plan[0] == bytes(stored).decode())

    def get_workspace_size(self) -> int:
        return self.last[1]

    def execute(self, addresses: object, workspace: int, handle: object) -> None:
        self.calls.append(("executed", self.last[0]))


class Measured(PlanChoices):
    """Chooses the plan of this number, or what a file holds."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path)
        self.number, self.made, self.questions = number, list[CudnnPlan](), list[Question[Any]]()

    def of(self, question: Question[Any], runtime: CudaRuntime, stream: int) -> Any:
        self.questions.append(question)
        return super().of(question, runtime, stream)

    def _measure(self, question: Question[Any], runtime: CudaRuntime, stream: int) -> Any:
        self.made = list(question.offers())
        plan = self.made[self.number]
        self._known[question.key] = {"plan": plan.name, "ms": {}}
        self._write()
        return plan


def test_a_measured_plan_is_one_within_the_rules_and_is_kept_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offered = [("eng20", 0), ("eng3", 4097), ("eng7", 64), ("eng8", 128), ("eng7", 64), ("eng9", 0)]
    graphs: list[Plans] = []

    def graph(**attributes: Any) -> Plans:
        graphs.append(Plans(offered, barred={"eng20"}))
        return graphs[-1]

    frontend = Frontend()
    monkeypatch.setattr(frontend, "pygraph", graph)
    monkeypatch.setattr(module, "load", lambda: frontend)
    file, folder = tmp_path / "plans.json", PlanFolder(tmp_path / "plans")

    def planned(choices: PlanChoices | None, target: str = "NVIDIA H200 sm_90, 132 SMs") -> CudnnPlan:
        graphs.clear()
        dnn = CudnnConvolutions(capturing(), Target(target), workspace=4096, folder=folder, choices=choices)
        dnn.open([11])
        plan = dnn.plan(SPEC)
        assert dnn.plan(SPEC) is plan
        plan.execute(11, ROOM, ROOM, ROOM, ROOM)
        assert plan.graph.calls[-1] == ("executed", plan.name)
        return plan

    assert planned(None).name == "eng7"
    choices = Measured(file, 1)
    assert planned(choices).name == "eng8"
    assert [plan.name for plan in choices.made] == ["eng7", "eng8", "eng9"]
    assert len({id(plan.graph) for plan in choices.made}) == 3, "a graph executes what it has built last"
    (question,) = choices.questions
    assert question.sizes == tuple(size for _, size in module.operand_bytes(SPEC))
    assert question.key == (
        "convolution forward 64x32x32x64 by 64x3x3 stride 1 pad 1 groups 1 fp16 | NVIDIA H200 sm_90, 132 SMs, "
        "TF32 off, cuDNN 0, frontend 0"
    )
    assert len(list((tmp_path / "plans").iterdir())) == 2, "the first and the chosen one"

    assert planned(Measured(file, 0)).name == "eng8", "as the file says"
    assert [call for made in graphs for call in made.calls if call[0] == "built"] == [], "read from the disk"
    assert planned(None).name == "eng7", "who does not measure gets what he got before"
    for stored in (tmp_path / "plans").iterdir():
        stored.unlink()
    assert planned(Measured(file, 0)).name == "eng8"
    assert [call for made in graphs for call in made.calls if call[0] == "built"] == [("built", 3)], "that one only"
    assert planned(Measured(file, 2), "NVIDIA H200 sm_90, 114 SMs").name == "eng9", "another GPU is measured"
    offered[3] = ("eng8", 8192)
    (tmp_path / "plans").rename(tmp_path / "old")
    with pytest.raises(ValueRejected, match=r"the library offers no plan 'eng8' for convolution forward"):
        planned(Measured(file, 0))


def test_nothing_is_made_while_a_stream_is_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", Frontend)
    with pytest.raises(DeviceError, match="a cuDNN handle was asked for while a stream is capturing"):
        CudnnConvolutions(capturing(12), Target("a GPU")).open([11, 12])
    streams: set[int] = set()
    runtime = cast(CudaRuntime, SimpleNamespace(streamIsCapturing=lambda stream: stream in streams))
    dnn = CudnnConvolutions(runtime, Target("a GPU"))
    dnn.open([11, 12])
    streams.add(12)
    with pytest.raises(DeviceError, match=r"a cuDNN plan for ConvolutionSpec.*while a stream is capturing"):
        dnn.plan(SPEC)


def test_what_is_no_convolution_of_cudnn_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", Frontend)
    dnn = CudnnConvolutions(capturing(), Target("a GPU"))
    dnn.open([11])
    with pytest.raises(DTypeError, match="operands of INT8"):
        dnn.plan(replace(SPEC, dtype=DType.INT8))
    for wrong in ({"groups": 3}, {"n": 0}, {"pad": -1}, {"r": 99}, {"k": 63, "groups": 2}):
        with pytest.raises(ShapeError, match="sizes must be positive"):
            dnn.plan(replace(SPEC, **wrong))


def test_without_the_wheels_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(DeviceError, match=r"cuDNN cannot be loaded: .*; pip install 'renaissance\[cuda12\]'"):
        module.load()


def test_dimensions_and_strides_are_those_of_compact_nhwc() -> None:
    spec = ConvolutionSpec(Direction.WEIGHT, 2, 9, 7, 6, 4, 3, 3, 2, 1, 2, DType.FP32)
    x, w, y = ("x", [2, 6, 9, 7]), ("w", [4, 3, 3, 3]), ("y", [2, 4, 5, 4])
    assert operands(spec) == [y, x, w]
    assert operands(replace(spec, direction=Direction.DATA)) == [y, w, x]
    assert operands(replace(spec, direction=Direction.FORWARD)) == [x, w, y]
    n, c, h, v = nhwc_strides([2, 6, 9, 7])
    assert [(a * n + b * h + d * v + e * c) for a in (0, 1) for b in (0, 8) for d in (0, 6) for e in (0, 5)] == [
        ((a * 9 + b) * 7 + d) * 6 + e for a in (0, 1) for b in (0, 8) for d in (0, 6) for e in (0, 5)
    ]
