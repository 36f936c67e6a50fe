"""The ranks of one machine meet, agree, and never wait for one that is gone: threads and real processes on a socket."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from renaissance.backend.ranks.exchange import RankFailed, Ranks
from renaissance.backend.ranks.launch import Launch
from renaissance.core.errors import DeviceError, ValueRejected

SECONDS = 60.0  # far more than any test takes
SOON = 0.2


def launch(rank: int, size: int) -> Launch:
    return Launch(rank, size, "test", "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meet"


@contextmanager
def joined(path: Path, size: int) -> Iterator[list[Ranks]]:
    """All ranks of a run, as threads of this process would have them."""
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        coming = [pool.submit(Ranks.join, launch(rank, size), path, SECONDS) for rank in range(size)]
        ranks = [future.result(SECONDS) for future in coming]
        for one in ranks:
            stack.callback(one.close)
        yield ranks


def on_each(ranks: list[Ranks], do: Callable[[Ranks], object]) -> list[Future[object]]:
    """``do`` on all ranks at once; their outcomes."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(do, one) for one in ranks]


def errors(outcomes: list[Future[object]]) -> list[str]:
    return [str(outcome.exception()) for outcome in outcomes]


def test_every_rank_gets_the_parts_of_all_in_order(path: Path) -> None:
    with joined(path, 4) as ranks:
        large = [bytes([one.rank]) * 300_000 for one in ranks]  # more than a socket holds
        gathered = [f.result() for f in on_each(ranks, lambda one: one.gather("digests", large[one.rank]))]
        assert gathered == [large] * 4
        shared = [f.result() for f in on_each(ranks, lambda one: one.share("address", f"of rank {one.rank}"))]
        assert shared == ["of rank 0"] * 4
        for outcome in on_each(ranks, lambda one: one.agree("identity", {"model": "m", "optimizer": {"lr": 0.1}})):
            outcome.result()


def test_ranks_of_different_runs_name_the_first_difference(path: Path) -> None:
    with joined(path, 3) as ranks:
        facts = [{"model": "m", "optimizer": {"lr": rate, "wd": wd}} for rate, wd in ((0.1, 0), (0.1, 0), (0.2, 1))]
        outcomes = on_each(ranks, lambda one: one.agree("identity", facts[one.rank]))
        assert {type(outcome.exception()) for outcome in outcomes} == {ValueRejected}
        (text,) = set(errors(outcomes))
        assert "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 2" in text


def test_ranks_at_different_places_of_the_program_are_out_of_step(path: Path) -> None:
    with joined(path, 2) as ranks:
        outcomes = on_each(ranks, lambda one: one.gather("epoch" if one.rank else "checkpoint", b""))
        assert all("rank 0 is at 'checkpoint', rank 1 at 'epoch'" in text for text in errors(outcomes))


def test_a_rank_that_fails_is_heard_by_all(path: Path) -> None:
    with joined(path, 3) as ranks:
        told = threading.Event()
        ranks[1].on_failure(told.set)

        def act(one: Ranks) -> object:
            if one.rank == 2:
                one.fail("GPU 2 has no memory left")
                return None
            return one.gather("identity", b"")

        assert errors(on_each(ranks, act)[:2]) == ["rank 2 failed: GPU 2 has no memory left"] * 2
        assert told.wait(SECONDS)
        with pytest.raises(RankFailed, match="GPU 2 has no memory left"):
            ranks[0].check()
        late = threading.Event()
        ranks[0].on_failure(late.set)
        assert late.is_set()


def test_an_error_inside_a_rank_is_told_to_the_others(path: Path) -> None:
    with joined(path, 2) as ranks:
        with pytest.raises(ZeroDivisionError), ranks[1]:
            raise ZeroDivisionError("1 / 0")
        with pytest.raises(RankFailed, match="rank 1 failed: 1 / 0"):
            ranks[0].gather("identity", b"")


def test_a_rank_that_leaves_early_is_not_waited_for(path: Path) -> None:
    with joined(path, 3) as ranks:
        told = [threading.Event() for _ in ranks]
        for one, event in zip(ranks, told, strict=True):
            one.on_failure(event.set)
        ranks[1].close()
        assert told[0].wait(SECONDS), "it may wait for the GPU, and not ask"
        assert told[2].wait(SECONDS)
        with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) has left the run"):
            ranks[0].gather("identity", b"")
        with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) has left the run"):
            ranks[2].check()
        ranks[1].close()


def test_at_the_end_each_leaves_when_it_likes(path: Path) -> None:
    def act(one: Ranks) -> bytes:
        parts = one.gather("the end", bytes([one.rank]), last=True)
        one.close()
        return b"".join(parts)

    for _ in range(5):
        with joined(path, 4) as ranks:
            assert [outcome.result() for outcome in on_each(ranks, act)] == [bytes(range(4))] * 4
            for one in ranks:
                one.check()


CHILD = """
import os, sys, time
from renaissance.backend.ranks.exchange import RankFailed, Ranks
from renaissance.backend.ranks.launch import launched
ranks = Ranks.join(launched(os.environ), sys.argv[1])
ranks.gather("ready", b"")
try:
    ranks.gather("never", b"")
except RankFailed as error:
    print(error, flush=True)
"""


def test_a_killed_process_is_named_on_every_other_rank(path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "PMI"))}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**environ, "RANK": str(rank), "WORLD_SIZE": "3"},
        )
        for rank in (1, 2)
    ]
    try:
        with Ranks.join(launch(0, 3), path, SECONDS) as ranks:
            told = threading.Event()
            ranks.on_failure(told.set)
            ranks.gather("ready", b"")
            children[1].send_signal(signal.SIGKILL)
            assert told.wait(SECONDS)  # while this thread waits for something else
            words = f"rank 2 (process {children[1].pid}) has died"
            with pytest.raises(RankFailed) as caught:
                ranks.gather("never", b"")
            assert str(caught.value) == words
            assert children[0].communicate(timeout=SECONDS)[0] == f"{words}\n"
            assert children[0].returncode == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_process_that_cannot_be_told_is_ended(path: Path) -> None:
    ended = threading.Event()
    ours, theirs = socket.socketpair()
    from renaissance.backend.ranks.meeting import Link

    ranks = Ranks(1, 2, [Link(ours, 0)], patience=0.01, last_resort=ended.set)
    theirs.close()  # rank 0 dies; this thread, as if inside a library, asks nothing
    assert ended.wait(SECONDS)
    ranks.close()


def test_who_has_not_come_is_named_and_nothing_is_left_behind(path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        host, guest = (pool.submit(Ranks.join, launch(rank, 4), path, 1.0) for rank in (0, 2))
        with pytest.raises(DeviceError, match=r"not all 4 ranks have come .* missing: 1, 3; .*RENAISSANCE_RENDEZVOUS"):
            host.result(SECONDS)
        with pytest.raises(DeviceError, match=r"rank 0: not all 4 ranks have come .* missing: 1, 3"):
            guest.result(SECONDS)
    assert not path.exists()
    with pytest.raises(DeviceError, match=r"rank 0 has not come to .*meet within 0.2 s"):
        Ranks.join(launch(1, 4), path, SOON)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (launch(1, 2), r"says that it is one of 2 ranks, rank 0 is one of 3; start all ranks at once"),
        (launch(1, 3), r"both say that they are rank 1"),
    ],
)
def test_a_rank_of_another_job_is_refused(path: Path, other: Launch, words: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        host, *guests = (pool.submit(Ranks.join, one, path, 5.0) for one in (launch(0, 3), launch(1, 3), other))
        with pytest.raises(DeviceError, match=words):
            host.result(SECONDS)
        for guest in guests:
            with pytest.raises(DeviceError):
                guest.result(SECONDS)


def test_a_rank_that_dies_before_all_are_there_is_named(path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(Ranks.join, launch(0, 3), path, SECONDS)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as early:
            while early.connect_ex(str(path)):
                pass
            hello = b'{"rank": 2, "size": 3, "version": "0.1.0"}'
            early.sendall(b"\x01" + len(hello).to_bytes(4, "little") + hello)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(
            DeviceError, match=rf"rank 2 \(process {os.getpid()}\) has died before all ranks were there"
        ):
            host.result(SECONDS)


def test_another_user_is_no_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(DeviceError, match=r"meet: belongs to user \d+, not to 4242"):
            Ranks.join(launch(1, 2), path, SECONDS)
    path.unlink()
    with ThreadPoolExecutor(2) as pool:
        host, guest = (pool.submit(Ranks.join, launch(rank, 2), path, SOON) for rank in (0, 1))
        with pytest.raises(DeviceError, match=r"missing: 1;"):
            host.result(SECONDS)
        with pytest.raises(DeviceError):
            guest.result(SECONDS)


def test_a_socket_that_a_dead_run_has_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with joined(path, 2) as ranks:
        assert not path.exists()  # all are there: nobody else can come
        for outcome in on_each(ranks, lambda one: one.gather("ready", b"")):
            outcome.result()


def test_a_place_that_is_taken_is_refused(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(DeviceError, match="the ranks of another run are meeting here"):
            Ranks.join(launch(0, 2), path, SOON)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ValueRejected, match="is there, and no socket"):
        Ranks.join(launch(0, 2), file, SOON)
    assert file.read_text() == "precious"
    for rank in (0, 1):
        with pytest.raises(ValueRejected, match="at most 107 bytes; set RENAISSANCE_RENDEZVOUS"):
            Ranks.join(launch(rank, 2), tmp_path / ("x" * 120), SOON)
    with pytest.raises(ValueRejected, match="cannot meet here: No such file or directory"):
        Ranks.join(launch(0, 2), tmp_path / "none" / "meet", SOON)
