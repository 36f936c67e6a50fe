"""A DeepLearningTask on two GPUs: two ranks as threads, on the stand-ins for CUDA and NCCL, with a real dataserver.

What is replaced: the probe for GPUs, ``open_device``, NCCL's communicator, and the launcher's environment, since that
is the same for threads.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import FakeCuda, timed
from cuda_standin import device as stand_in
from cuda_standin.nccl import StandInCollectives, World
from task_data import CLASSES, write_stripes

from renaissance import (
    GLOBAL_SETTING,
    PREPROCESSOR_SETTING,
    SGD,
    BluePrint,
    CenterCrop,
    ConstantLR,
    CrossEntropyLoss,
    DeepLearningTask,
    NormMode,
    RandomCrop,
    conv,
    fc,
    gap,
    relu,
    seq,
)
from renaissance.backend.cuda import device as devices
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.backend.ranks.exchange import RankFailed
from renaissance.backend.ranks.launch import Launch
from renaissance.core import gpus
from renaissance.core.digest import chain_digest
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.gpus import Gpu
from renaissance.data.private_daemon import start_private_daemon
from renaissance.task import SilentReporter, TrainingResult
from renaissance.task import ranks as module
from renaissance.task.checkpoint import CheckpointFolder
from renaissance.task.loop import TrainingLoop
from renaissance.task.ranks import Peers, refuse_launcher, require_equal_shares
from renaissance.task.result import read_result

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")

TRAIN, VAL, BATCH, SIDE = 76, 17, 16, 8
"""Rank 0 validates 9 samples, rank 1 has 8 and nothing in its second batch. The last training batch is short."""
RANKS, EPOCHS = 2, 2
SECONDS = 120.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data"), train=TRAIN, val=VAL)


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[str]:
    """Address of a dataserver for the tests that are not about a private one."""
    with start_private_daemon({"mnist": data}, workers=1) as daemon:
        yield daemon.address


class Here(threading.local):
    """What a process would have of its own."""

    launch: Launch | None = None
    fake: FakeCuda | None = None


class Machine:
    """Two GPUs, and the ranks on them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.here, self.opened = Here(), dict[int, int]()
        self.world, self.joined = World(RANKS), list[StandInCollectives]()
        self._folder = folder
        patch.setattr(gpus, "visible_gpus", lambda: tuple(Gpu(i, "stand-in", (9, 0)) for i in range(4)))
        patch.setattr(devices, "open_device", self._open)
        patch.setattr(module, "launched", lambda environ: self.here.launch)
        patch.setattr(module, "runtime_folder", lambda: folder)
        patch.setattr(module, "new_unique_id", lambda: b"unique")
        patch.setattr(module, "NcclCollectives", self)

    def connect(self, unique: bytes, rank: int, size: int) -> StandInCollectives:
        assert (unique, size) == (b"unique", RANKS)
        assert self.here.fake is not None
        return StandInCollectives(self.here.fake, self.world, rank)

    def _open(
        self,
        index: int,
        *,
        connect: Callable[[], Any] | None = None,
        choices: PlanChoices | None = None,
        **options: object,
    ) -> Any:
        self.here.fake = FakeCuda(seed=index)
        if self.here.launch is not None:
            self.opened[self.here.launch.rank] = index
        collectives = connect() if connect is not None else None
        tuning = None if choices is None else timed(choices)
        device = stand_in(self.here.fake, collectives=collectives, tuning=tuning)
        if collectives is not None:
            device.before_closing(collectives.close)
            self.joined.append(collectives)
        return device

    def run(self, body: Callable[[int], Any]) -> list[Future[Any]]:
        """``body(rank)`` on all ranks at once; their outcomes."""
        self.world = World(RANKS)

        def ranked(rank: int) -> Any:
            self.here.launch = Launch(rank, RANKS, "test", str(self._folder))
            try:
                return body(rank)
            finally:
                self.world.leave(rank)

        with ThreadPoolExecutor(RANKS) as pool:
            return [pool.submit(ranked, rank) for rank in range(RANKS)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@contextmanager
def settings(data: Path, devices: str = "1,3", amp: bool | str = False, drop_last: bool = False) -> Iterator[None]:
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_gpu(devices).amp(amp).manual_seed(5).global_batch_size(BATCH).input_resolution(SIDE)
        PREPROCESSOR_SETTING.dataset("mnist", data).normalization(NormMode.MNIST)
        PREPROCESSOR_SETTING.drop_last(drop_last)
        PREPROCESSOR_SETTING.train_transforms(RandomCrop(SIDE)).val_transforms(CenterCrop(SIDE)).commit()
        yield


def small(server: str = "", rate: float = 0.2) -> DeepLearningTask:
    net = BluePrint(seq(conv(6, 3, 1, 1), relu(), conv(8, 3, 1, 1), relu(), gap(), fc(CLASSES)))
    task = DeepLearningTask().quiet().learning_curves(False).model(net).total_epochs(EPOCHS)
    if server:
        task.dataserver(server)
    return task.loss(CrossEntropyLoss()).optimizer(SGD().momentum(0.9)).scheduler(ConstantLR().base_lr(rate))


def trained(task: DeepLearningTask) -> TrainingResult:
    with task:
        task.compile()
        return task.run()


class Told(SilentReporter):
    text = ""

    def plan(self, text: str) -> None:
        self.text += text


NUMBERS = ("train_loss", "val_loss", "top1", "top5")


def test_two_ranks_train_what_one_trains_and_only_rank_0_writes(
    data: Path, server: str, machine: Machine, tmp_path: Path
) -> None:
    told = [Told(), Told()]
    with settings(data):
        outcomes = machine.run(lambda rank: trained(small().output(tmp_path / f"of rank {rank}").reporter(told[rank])))
    first, second = (outcome.result() for outcome in outcomes)
    assert machine.opened == {0: 1, 1: 3}, "rank r takes the r-th GPU"
    with settings(data, "0"):
        machine.here.launch = None
        alone = trained(small(server))
    for name in NUMBERS:
        ours, theirs, expected = ([getattr(r, name) for r in run.history] for run in (first, second, alone))
        assert ours == theirs
        np.testing.assert_allclose(ours, expected, rtol=1e-5, err_msg=name)
    assert first.weight_digest == second.weight_digest
    assert first.data_digest == second.data_digest
    assert [r.samples for r in first.history] == [TRAIN] * EPOCHS, "of all ranks"
    assert read_result(tmp_path / "of rank 0")["configuration"]["global"]["world_size"] == RANKS
    assert not (tmp_path / "of rank 1").exists()
    assert "engine" in told[0].text
    assert told[1].text == ""
    del outcomes
    gc.collect()
    assert machine.world.gone == {0, 1}
    assert [c.communicator.waits_for_graphs for c in machine.joined] == [False] * RANKS


def test_a_run_of_two_ranks_that_was_broken_off_goes_on(
    data: Path, server: str, machine: Machine, tmp_path: Path
) -> None:
    class PowerCut(Exception):
        pass

    segment, left, both = TrainingLoop._segment, threading.local(), threading.Barrier(RANKS)

    def cut(self: TrainingLoop, end: int, *rest: Any, **named: Any) -> None:
        left.steps = getattr(left, "steps", 8) - (end - self._next)
        if left.steps < 0:
            self._engine.metrics()
            both.wait(SECONDS)  # the checkpoint of the sixth step is written by then
            raise PowerCut
        segment(self, end, *rest, **named)

    def kept() -> DeepLearningTask:
        return small(server).output(tmp_path / "run")

    with settings(data, amp="fp16"):
        straight = [outcome.result() for outcome in machine.run(lambda rank: trained(small(server)))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingLoop, "_segment", cut)
            for outcome in machine.run(lambda rank: trained(kept().checkpoint_every(steps=3))):
                assert isinstance(outcome.exception(), PowerCut | RankFailed)
        assert CheckpointFolder(tmp_path / "run").latest().name == "epoch-00001-batch-000001.tsr"
        resumed = [outcome.result() for outcome in machine.run(lambda rank: trained(kept().resume(True)))]
    for run in (*straight, *resumed):
        assert run.weight_digest == straight[0].weight_digest
        assert run.data_digest == straight[0].data_digest


def test_ranks_take_the_plans_that_rank_0_has_measured(
    data: Path, server: str, machine: Machine, tmp_path: Path
) -> None:
    def body(rank: int) -> tuple[Any, int]:
        assert machine.here.launch is not None
        with small(server).tune(tmp_path / "plans.json").compile() as task:
            assert machine.here.fake is not None
            return task._profile()["tuned"], machine.here.fake.counts["malloc"]

    with settings(data):
        (digest, measured), (other, allocated) = (outcome.result() for outcome in machine.run(body))
    assert digest == other
    assert measured == 1 + len(json.loads((tmp_path / "plans.json").read_text())["plans"])
    assert allocated == 1, "the second one has measured nothing"


def test_ranks_that_were_configured_differently_do_not_begin(data: Path, server: str, machine: Machine) -> None:
    with settings(data):
        outcomes = machine.run(lambda rank: small(server, 0.2 + rank).compile())
    for outcome in outcomes:
        with pytest.raises(
            (ValueRejected, RankFailed), match=r"schedule\.base_lr is 0\.2 on rank 0 and 1\.2 on rank 1"
        ):
            outcome.result()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_fails_in_the_middle_ends_all_with_its_words(
    data: Path, server: str, machine: Machine, failing_rank: int, tmp_path: Path
) -> None:
    folder = None if failing_rank else tmp_path / "run"

    def body(rank: int) -> TrainingResult:
        task = small(server).compile() if folder is None else small(server).output(folder).compile()
        if rank == failing_rank:
            step, count = task.engine.train_step, [0]

            def failing(*arguments: Any, **options: Any) -> None:
                count[0] += 1
                if count[0] == 3:
                    raise ValueError("the third step is one too many")
                step(*arguments, **options)

            task.engine.train_step = failing  # type: ignore[method-assign]
        return task.run()

    with settings(data):
        outcomes = machine.run(body)
    with pytest.raises(ValueError, match="one too many"):
        outcomes[failing_rank].result()
    to_do = "no checkpoint was asked for" if failing_rank else "resume from the newest checkpoint that rank 0"
    with pytest.raises(RankFailed, match=f"^rank {failing_rank} failed: the third step is one too many; {to_do}"):
        outcomes[1 - failing_rank].result()


def test_a_rank_that_fails_before_the_first_step_ends_all_with_its_words(
    data: Path, server: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = DeepLearningTask._ready

    def failing(self: DeepLearningTask) -> None:
        if self.rank == 0:
            raise RuntimeError("no memory left")
        ready(self)

    monkeypatch.setattr(DeepLearningTask, "_ready", failing)
    with settings(data):
        failed, other = machine.run(lambda rank: small(server).output(tmp_path / "run").compile())
    with pytest.raises(DeviceError, match=r"^GPU 1 failed: no memory left$"):
        failed.result()
    with pytest.raises(RankFailed, match=r"^rank 0 failed: GPU 1 failed: no memory left$"):
        other.result()


def test_several_gpus_take_several_processes(data: Path, machine: Machine) -> None:
    with settings(data):
        with pytest.raises(DeviceError, match="mpiexec -n 2"):
            small().compile()
        plan = small().dry_run()
    assert (plan.train_steps, plan.val_steps) == (-(-TRAIN // BATCH), -(-VAL // BATCH))
    assert "2 ranks with 8 each" in plan.text()


def test_uneven_shares_of_the_last_batch_are_refused_unless_it_is_left_out(data: Path, machine: Machine) -> None:
    with pytest.raises(ValueRejected, match=r"75 training samples cannot be shared evenly by 2 ranks.*drop_last"):
        require_equal_shares(75, 2, drop_last=False)
    require_equal_shares(75, 2, drop_last=True)
    require_equal_shares(76, 2, drop_last=False)
    require_equal_shares(75, 1, drop_last=False)
    with settings(data, "0-3"):
        assert small().dry_run().train_samples % 4 == 0


def test_the_digest_of_a_step_is_of_the_batches_of_all_ranks(machine: Machine, tmp_path: Path) -> None:
    digests = [[bytes([rank, step]) * 8 for step in range(3)] for rank in range(RANKS)]

    def body(rank: int, count: int = 3) -> list[bytes]:
        peers = Peers.join((0, 1), {})
        assert peers is not None
        try:
            return peers.combine(digests[rank][:count])
        finally:
            peers.close()

    expected = [chain_digest([digests[0][step], digests[1][step]]) for step in range(3)]
    assert [outcome.result() for outcome in machine.run(body)] == [expected] * RANKS
    for outcome in machine.run(lambda rank: body(rank, 2 + rank)):
        with pytest.raises(RankFailed, match="they have trained on 2, 3 batches"):
            outcome.result()


def test_a_launcher_that_keeps_rank_0_from_the_other_cpus_is_told_of(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpus = {"own": [(0,), (1, 2)], "same": [(0, 1, 2), (0, 1, 2)]}
    for case, of_rank in cpus.items():

        def allowed(of_rank: list[tuple[int, ...]] = of_rank) -> tuple[int, ...]:
            assert machine.here.launch is not None
            return of_rank[machine.here.launch.rank]

        def join(rank: int) -> None:
            peers = Peers.join((0, 1), {})
            assert peers is not None
            peers.close()

        monkeypatch.setattr(module, "allowed_cpus", allowed)
        caplog.clear()
        for outcome in machine.run(join):
            outcome.result()
        told = "run on CPU 0 only, and all ranks together on 0-2; start with mpiexec --bind-to none" in caplog.text
        assert told == (case == "own")


def test_a_run_on_the_cpu_is_no_matter_for_a_launcher() -> None:
    refuse_launcher({})
    refuse_launcher({"RANK": "3"})
    with pytest.raises(DeviceError, match="torchrun has started 2 processes, but a run on the CPU has one"):
        refuse_launcher({"RANK": "0", "WORLD_SIZE": "2"})
