"""Small data sets, daemons and a check that nothing is left, for tests with real processes.

Waiting is always for an event (a process's end, a line of output, a closed socket) with a limit, never a sleep.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from renaissance.core.enums import NormMode
from renaissance.data.client import server_stats
from renaissance.data.formats.dts import layout_of, write_dts
from renaissance.data.formats.idx import IMAGE_MAGIC, LABEL_MAGIC, MNIST_FILES
from renaissance.data.protocol import PROTOCOL_VERSION
from renaissance.data.recipe import Recipe
from renaissance.data.station import TransferStation
from renaissance.data.transforms import Pad, RandomCrop, RandomErasing, RandomRotation, RandomScale
from renaissance.data.wire import dataserver_pb2 as pb

LIMIT_SECONDS = 5.0
"""Nothing may hang longer than this after a death (law 6)."""

TRAIN_SAMPLES, VAL_SAMPLES = 611, 123


def train_recipe() -> Recipe:
    chain = [Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5)]
    return Recipe.build(chain, NormMode.MNIST, resolution=28, color_channels=1)


def val_recipe() -> Recipe:
    return Recipe.build([], NormMode.MNIST, resolution=28, color_channels=1, validation=True)


def make_samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 10, count, np.uint8), rng.integers(0, 256, (count, 28, 28, 1), np.uint8)


@pytest.fixture(scope="session")
def dts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dts")
    for split, count in (("train", TRAIN_SAMPLES), ("val", VAL_SAMPLES)):
        labels, images = make_samples(count, count)
        write_dts(folder / layout_of("mnist").file_name(split), "mnist", split, labels, images)
    return folder


@pytest.fixture(scope="session")
def raw_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples in the published form."""
    folder = tmp_path_factory.mktemp("raw")
    for split, count in (("train", TRAIN_SAMPLES), ("val", VAL_SAMPLES)):
        labels, images = make_samples(count, count)
        names = MNIST_FILES[split]
        (folder / names.labels).write_bytes(struct.pack(">II", LABEL_MAGIC, count) + labels.tobytes())
        header = struct.pack(">IIII", IMAGE_MAGIC, count, 28, 28)
        (folder / names.images).write_bytes(header + images.tobytes())
    return folder


def open_request(**changes: Any) -> pb.OpenSessionRequest:
    """A request as a TransferStation makes it, to be changed."""
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "dataset": "mnist",
        "split": "train",
        "recipe_json": train_recipe().to_json(),
        "batch_size": 50,
        "dtype": "fp32",
        "depth": 4,
        "world_size": 1,
        "order": "global",
        "on_corrupt": "fail",
        "max_corrupt": 100,
        "max_corrupt_share": 0.01,
        "share_count": 1,
    }
    return pb.OpenSessionRequest(**{**fields, **changes})


class DaemonProcess:
    """``dataserver serve`` as a user starts it."""

    def __init__(self, folder: Path, path: Path, workers: int = 2, *options: str) -> None:
        self.path = path
        self.address = f"unix:{path}"
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "dataserver", "serve", "--data", f"mnist={folder}", "--listen", self.address]
        command += ["--workers", str(workers), "--log-level", "WARNING", "--ready-fd", str(writer), *options]
        self.process = subprocess.Popen(
            command, pass_fds=(writer,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        os.close(writer)
        with open(reader) as pipe:
            line = pipe.readline()
        self.answer: dict[str, str] = json.loads(line) if line else {}
        if not self.answer:
            _, log = self.process.communicate()
            raise AssertionError(f"the daemon ended before it served: {log}")
        self.handles = {pid: os.pidfd_open(pid) for pid in self.pids()} if "address" in self.answer else {}

    def pids(self) -> list[int]:
        """Daemon, zygote and workers."""
        found = [self.process.pid]
        for pid in found:
            found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found

    def worker_pids(self) -> list[int]:
        """Of the living ones; a worker that has just been killed is missing until its successor runs."""
        return [worker["pid"] for worker in server_stats(self.address)["workers"] if worker["pid"]]

    def worker_pid(self, number: int, killed: int = 0) -> int:
        """Of one worker; asks again while the end of ``killed`` is not yet known or its successor being started."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            pid = server_stats(self.address)["workers"][number]["pid"]
            if pid not in (0, killed):
                return int(pid)
        raise AssertionError(f"worker {number} was not started again")

    def kill(self) -> None:
        """SIGKILL the daemon's main process only."""
        self.handles |= {pid: os.pidfd_open(pid) for pid in self.pids() if pid not in self.handles}
        self.process.kill()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.handles |= {pid: os.pidfd_open(pid) for pid in self.pids() if pid not in self.handles}
        self.process.send_signal(number)
        return self.process.wait(LIMIT_SECONDS)

    def assert_gone(self) -> None:
        """Within the limit no process of it lives and no socket file is left."""
        for pid, handle in self.handles.items():
            assert wait_for_exit(handle), f"process {pid} still lives"
            os.close(handle)
        self.handles.clear()
        self.process.communicate(timeout=LIMIT_SECONDS)
        assert not list(self.path.parent.glob(self.path.name + "*"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=LIMIT_SECONDS)
        for handle in self.handles.values():
            os.close(handle)


def read_on(station: TransferStation) -> None:
    """Read epochs until something is raised; a ring holds far fewer batches."""
    for epoch in range(1000):
        for _ in station.epoch(epoch):
            pass


def wait_for_exit(handle: int) -> bool:
    """True once the process behind the pidfd has ended; False after the limit."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(LIMIT_SECONDS * 1000))


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short, because a socket path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rns-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def daemon(dts_folder: Path, socket_folder: Path) -> Iterator[DaemonProcess]:
    """Two workers on the small data set; must be gone without trace at the end."""
    process = DaemonProcess(dts_folder, socket_folder / "ds")
    try:
        yield process
        if process.process.poll() is None:
            assert process.stop() == 0
            process.assert_gone()
    finally:
        process.close()
