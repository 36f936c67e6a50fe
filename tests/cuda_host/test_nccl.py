"""NCCL as the backend uses it: its constants, what is pinned, and the calls that a communicator gets."""

import gc
import re
import threading
import weakref
from types import SimpleNamespace

import pytest

from renaissance.backend.cuda import launch_collectives, nccl
from renaissance.backend.cuda.calls import Buffer, LibraryCall
from renaissance.backend.cuda.nccl import NcclCollectives
from renaissance.backend.registry import OpRegistry
from renaissance.core.dtype import DType
from renaissance.core.errors import DeviceError, DTypeError, ValueRejected
from renaissance.core.region import BUCKET_DEEP, HALF_WEIGHT_SPAN, Region, Span


class Communicator:
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def allReduce(self, *args: int) -> None:  # noqa: N802  # CuPy's name
        self.calls.append(args)

    def abort(self) -> None:
        self.calls.append(("abort",))
        raise RuntimeError("late")


class Waiting(Communicator):
    """As long as graphs are there."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs_gone, self.asked = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.asked.set()
        self.graphs_gone.wait()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to NCCL through the environment is forgotten after each test."""
    for name, value in nccl.DEFAULTS.items():
        monkeypatch.setenv(name, value)


def test_constants_are_those_of_the_header() -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="needs the wheels of NVIDIA")
    folder = pathfinder.find_nvidia_header_directory("nccl")
    if folder is None:
        pytest.skip("needs the wheel of NCCL, for its header")
    with open(f"{folder}/nccl.h") as header:
        text = header.read()
    for name, ours in (("ncclAvg", nccl.AVERAGE), ("ncclFloat32", nccl.FLOAT32)):
        match = re.search(rf"\b{name}\s*=\s*(\d+)", text)
        assert match is not None
        assert int(match[1]) == ours, name
    code = re.search(r"#define NCCL_VERSION_CODE (\d+)", text)
    parts = [re.search(rf"#define NCCL_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    assert code is not None
    assert all(parts)
    assert nccl.version_text(int(code[1])) == ".".join(part[1] for part in parts if part)


def test_cupy_has_the_calls() -> None:
    cupy = pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy")
    if not cupy.available:
        pytest.skip("needs NCCL")
    words = cupy.NcclCommunicator.allReduce.__doc__
    names = re.findall(r"(\w+)(?=[,)])", words.partition("(self, ")[2])
    assert names == ["sendbuf", "recvbuf", "count", "datatype", "op", "stream"]
    assert all(hasattr(cupy.NcclCommunicator, name) for name in ("abort",))
    assert (cupy.NCCL_AVG, cupy.NCCL_FLOAT32) == (nccl.AVERAGE, nccl.FLOAT32)
    assert len(nccl.new_unique_id()) == 128


def test_a_communicator_without_a_gpu_is_an_error_in_words() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU")
    if not pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy").available:
        pytest.skip("needs NCCL")
    with pytest.raises(DeviceError, match=r"rank 0 of 1 cannot connect: NCCL_ERROR.*Each rank needs a GPU of its own"):
        NcclCollectives.connect(nccl.new_unique_id(), 0, 1)


def test_a_mean_is_an_average_of_float32_in_place() -> None:
    communicator = Communicator()
    collectives = NcclCollectives(communicator, 1, 4, {"nccl": "2.32.3"})
    collectives.mean(77, Buffer(4096, 1024))
    assert communicator.calls == [(4096, 4096, 256, 7, 4, 77)]
    assert (collectives.rank, collectives.size, collectives.facts()) == (1, 4, {"nccl": "2.32.3"})
    with pytest.raises(ValueRejected, match="6 bytes are no whole number of float32"):
        collectives.mean(77, Buffer(4096, 6))


def test_a_communicator_is_left_once() -> None:
    communicator = Communicator()
    collectives = NcclCollectives(communicator, 0, 2, {})
    collectives.close()
    collectives.close()
    collectives.abort()
    assert communicator.calls == [("abort",)]
    with pytest.raises(DeviceError, match="rank 0 of 2 has left its communicator"):
        collectives.mean(1, Buffer(256, 256))


def test_leaving_does_not_wait_for_graphs_that_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LEAVING_SECONDS", 0.01)
    for leave in (NcclCollectives.abort, NcclCollectives.close):
        communicator = Waiting()
        leave(NcclCollectives(communicator, 0, 2, {}))
        assert communicator.asked.wait(60)
        communicator.graphs_gone.set()


def test_no_finalizer_of_a_communicator_ever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for graphs that are still there when the process ends."""
    made: list[weakref.ref[Communicator]] = []

    def connected(size: int, unique_id: bytes, rank: int) -> Communicator:
        communicator = Communicator()
        made.append(weakref.ref(communicator))
        return communicator

    fake = SimpleNamespace(NcclCommunicator=connected, NcclError=RuntimeError, get_version=lambda: 23203)
    monkeypatch.setattr(nccl, "_nccl", lambda: fake)
    collectives = NcclCollectives.connect(b"", 1, 2)
    assert (collectives.rank, collectives.size) == (1, 2)
    assert collectives.facts() == {"nccl": "2.32.3", "NCCL_ALGO": "Ring"}
    collectives.close()
    del collectives
    gc.collect()
    assert made[0]() is not None


def test_algorithms_whose_sums_change_from_run_to_run_are_refused() -> None:
    assert nccl.configure(environ := {}) == {"NCCL_ALGO": "Ring"}
    assert environ == {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "lo"}
    chosen = {"NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "Simple", "NCCL_DEBUG": "WARN"}
    assert nccl.configure(dict(chosen)) == {"NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "Simple"}
    for other in ("NVLS", "ring,CollnetDirect", "^Ring", ""):
        with pytest.raises(ValueRejected, match=r"NCCL_ALGO is .* expected Ring, Tree or Ring,Tree"):
            nccl.configure({"NCCL_ALGO": other})


def test_the_collective_is_on_the_stream_of_its_node() -> None:
    registry = OpRegistry()
    launch_collectives.register(registry)
    launcher = registry.launcher("RANGE_MEAN_ALLREDUCE", "cuda")
    communicator = Communicator()

    def launch(span: Span, nbytes: int) -> list[LibraryCall]:
        context = SimpleNamespace(
            half=DType.BF16,
            span=lambda span: Buffer(512, nbytes),
            collectives=NcclCollectives(communicator, 0, 2, {}),
        )
        node = SimpleNamespace(op="RANGE_MEAN_ALLREDUCE", index=9, spans_out=(span,))
        return list(launcher(node, context))

    (call,) = launch(BUCKET_DEEP, 512)
    assert call.label == "RANGE_MEAN_ALLREDUCE #9"
    call.issue(SimpleNamespace(), 33)
    assert communicator.calls == [(512, 512, 128, 7, 4, 33)]
    assert launch(BUCKET_DEEP, 0) == []  # empty on every rank: no call
    for span, region in (
        (HALF_WEIGHT_SPAN, "A_FC_WEIGHT"),
        (Span(Region.G_DEEP_CONV, Region.G_FC_WEIGHT_FP16), "G_FC"),
    ):
        with pytest.raises(DTypeError, match=rf"#9: region {region}\w* of the span is not float32"):
            launch(span, 512)
