"""NCCL on a GPU: one rank, captured; and, where there are two GPUs, two processes that train together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from task_data import write_stripes

from renaissance.backend.cuda.calls import Buffer, LibraryCall
from renaissance.backend.cuda.device import DeviceContext
from renaissance.backend.cuda.nccl import NcclCollectives, new_unique_id
from renaissance.backend.cuda.pinned import PinnedBlock
from renaissance.backend.cuda.program import Item, Program
from renaissance.backend.cuda.runtime import CopyKind
from renaissance.core.enums import StreamKind
from renaissance.core.errors import DeviceError
from renaissance.core.gpus import visible_gpus

CHILD = Path(__file__).with_name("rank_child.py")
SECONDS = 120.0


def alone(device: DeviceContext) -> NcclCollectives:
    """A communicator of one rank."""
    if device.name == "stand-in":
        from cuda_standin.nccl import StandInCollectives, World

        return StandInCollectives(device.runtime, World(1), 0)
    return NcclCollectives.connect(new_unique_id(), 0, 1)


def test_a_mean_over_one_rank_is_captured_and_replayed(device: DeviceContext) -> None:
    runtime, count = device.runtime, 1000
    collectives, block = alone(device), PinnedBlock(runtime, 4 * count)
    values = Buffer(runtime.malloc(4 * count), 4 * count)
    host = block.bytes.view(np.float32)
    host[:] = np.arange(count)
    mean = LibraryCall(lambda stream: collectives.mean(stream, values), "mean")
    program = Program(device, [Item("start", StreamKind.COMP_1, ()), Item("mean", StreamKind.UPDATE, (mean,))])
    runtime.memcpyAsync(values.ptr, block.buffer.ptr, values.nbytes, CopyKind.HOST_TO_DEVICE, device.origin)
    program.issue()  # connects the ranks
    device.synchronize()
    program.capture()
    for _ in range(3):
        program.launch()
    device.synchronize()
    host[:] = 0
    runtime.memcpyAsync(block.buffer.ptr, values.ptr, values.nbytes, CopyKind.DEVICE_TO_HOST, device.origin)
    device.synchronize()
    assert np.array_equal(host, np.arange(count, dtype=np.float32))
    program.close()
    collectives.close()
    assert "leave NCCL" not in {thread.name for thread in threading.enumerate()}, "nothing waits for a graph"
    runtime.free(values.ptr)
    block.free()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A set of MNIST's form, for two ranks."""
    try:
        gpus = len(visible_gpus())
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    if gpus < 2:
        pytest.skip(f"needs two GPUs; there is {gpus}")
    return write_stripes(tmp_path, train=2048, val=101)


def start(data: Path, output: Path, epochs: int) -> list[subprocess.Popen[str]]:
    """Two ranks, as torchrun starts them."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    return [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(data), str(output), str(epochs)],
            env={**environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def test_two_gpus_train_the_same_weights_twice(data: Path) -> None:
    digests = []
    for run in ("first", "second"):
        ranks = start(data, data / run, epochs=2)
        for rank in ranks:
            out, err = rank.communicate(timeout=SECONDS)
            assert rank.returncode == 0, err
            digests.append(out.splitlines()[-1])
    assert len(set(digests)) == 1
    assert digests[0].startswith("digest ")


def test_a_killed_rank_ends_the_other_with_its_name(data: Path) -> None:
    ranks = start(data, data / "run", epochs=10_000)
    try:
        for rank in ranks:
            assert rank.stderr is not None
            while "trains" not in rank.stderr.readline():
                assert rank.poll() is None
        ranks[1].send_signal(signal.SIGKILL)
        _, err = ranks[0].communicate(timeout=SECONDS)
        assert ranks[0].returncode == 1
        assert f"rank 1 (process {ranks[1].pid}) has died" in err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
