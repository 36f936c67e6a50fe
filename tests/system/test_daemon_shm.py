"""/dev/shm limited to 1 MB changes nothing: no shared memory or semaphore of the data plane has a name there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[2])
from conftest import train_recipe
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.station import TransferStation
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
options = dict(dataset="mnist", split="train", recipe=train_recipe(), seed=11, batch_size=600, depth=16)
with start_private_daemon({"mnist": sys.argv[1]}, workers=3) as private:
    with TransferStation(private.address, **options) as station:
        assert station._ring.layout.total_bytes > 20 << 20
        for epoch in range(20):
            for batch in station.epoch(epoch):
                pass
        assert os.listdir("/dev/shm") == []
        print(station.epoch_digest(0))
"""


def test_shm_of_one_megabyte_is_enough(dts_folder: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    wrapper = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    try:
        probe = subprocess.run([*wrapper, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip(f"not allowed to mount in a namespace of its own: {probe.stderr.strip()}")
    program = [sys.executable, "-c", PROGRAM, str(dts_folder), str(Path(__file__).parent)]
    done = subprocess.run([*wrapper, *program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 32
