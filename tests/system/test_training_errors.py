"""Bad input to a training command: one line that names the thing, an exit code other than 0, no traceback (law 7)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training_support import COLD_START, EXAMPLE, MNIST, ROOT, cut_mnist, start_example

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from renaissance.cli.errors import run_command
from training_support import settings, small_task
from pathlib import Path

def main():
    with settings(Path({data!r}), batch={batch}):
        small_task(1, classes={classes}).compile()

sys.exit(run_command(main))
"""

OTHER_VERSION = """
import runpy, sys
import renaissance.data.station as station
station.PROTOCOL_VERSION = 99
sys.argv = [{example!r}, *{arguments!r}]
runpy.run_path({example!r}, run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=COLD_START)


def script(**values: object) -> str:
    filled = {"tests": str(Path(__file__).parent), "data": str(MNIST), "batch": 200, "classes": 10, **values}
    return SCRIPT.format(**filled)


def assert_one_error_line(ran: subprocess.CompletedProcess[str], *named: str) -> None:
    assert ran.returncode == 1, ran.stderr
    lines = ran.stderr.splitlines()
    assert len(lines) == 1, ran.stderr
    assert lines[0].startswith("error: ")
    assert "unexpected" not in lines[0]
    for part in named:
        assert part in lines[0], lines[0]


def test_last_layer_that_does_not_fit_is_one_error_line() -> None:
    assert_one_error_line(run("-c", script(classes=11)), "11", "10")


def test_batch_size_zero_is_one_error_line() -> None:
    assert_one_error_line(run("-c", script(batch=0)), "global_batch_size is 0")


def test_nobody_listening_is_one_error_line(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    assert_one_error_line(run(str(EXAMPLE), "--dataserver", address), address, "dataserver serve")


def test_missing_data_folder_is_one_error_line(tmp_path: Path) -> None:
    assert_one_error_line(run(str(EXAMPLE), "--data", str(tmp_path / "none")), str(tmp_path / "none"))


def test_resume_without_a_checkpoint_is_one_error_line(tmp_path: Path) -> None:
    assert_one_error_line(run(str(EXAMPLE), "--output", str(tmp_path), "--resume"), "no checkpoint to resume from")


def test_truncated_data_is_the_daemons_error_in_one_line(tmp_path: Path) -> None:
    folder = cut_mnist(tmp_path)
    images = folder / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-100])
    assert_one_error_line(run(str(EXAMPLE), "--data", str(folder)), "train-images-idx3-ubyte.gz")


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    ran = run(str(EXAMPLE), "--epochz", "3")
    assert ran.returncode == 2
    assert "--epochz" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_daemon_of_another_protocol_version_is_one_error_line(tmp_path: Path) -> None:
    from renaissance.data.private_daemon import start_private_daemon

    folder = cut_mnist(tmp_path)
    with start_private_daemon({"mnist": folder}, workers=1) as daemon:
        arguments = ["--dataserver", daemon.address]
        ran = run("-c", OTHER_VERSION.format(example=str(EXAMPLE), arguments=arguments))
    assert_one_error_line(ran, "version", "99")


def test_interrupted_example_stops_its_daemon_and_exits_130(tmp_path: Path) -> None:
    import signal

    from training_support import children, is_alive, wait_until

    run = tmp_path / "run"
    with start_example(cut_mnist(tmp_path / "data"), "--epochs", "100000", "--output", str(run)) as trainer:
        assert trainer.stdout is not None
        while not trainer.stdout.readline().startswith("epoch"):
            assert trainer.poll() is None
        for _ in range(2):
            trainer.stdout.readline()  # the line of the second epoch: the checkpoint of the first is written
        family = children(trainer.pid)
        assert family
        trainer.send_signal(signal.SIGINT)
        out, err = trainer.communicate()
        assert trainer.returncode == 130
        assert out.splitlines()[-1].startswith(f"interrupted; resume from {run}/checkpoints/epoch-")
        assert "Traceback" not in err
        wait_until(lambda: not any(map(is_alive, family)), "daemon and workers end")
