"""The epoch loop of one rank of several: what it asks the others, and when; and how sets are shared."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from test_task_loop import BATCH, STEPS, TAIL, FakeEngine, FakeSource, make_plan

from renaissance.core.digest import chain_digest
from renaissance.task.dataplane import tails
from renaissance.task.loop import LoopPlan, Sources, TrainingLoop
from renaissance.task.progress import SilentReporter
from renaissance.task.result import Progress


class Lost(Exception):
    pass


@dataclass
class FakePeers:
    """Two ranks with the same batches; the other one is lost before check number ``lost``."""

    size: int = 2
    lost: int = 10**6
    combined: list[int] = field(default_factory=list)
    checks: int = 0

    def combine(self, digests: list[bytes]) -> list[bytes]:
        self.combined.append(len(digests))
        return [chain_digest([digest, digest]) for digest in digests]

    def check(self) -> None:
        self.checks += 1
        if self.checks > self.lost:
            raise Lost


class RankEngine(FakeEngine):
    def reduce_metrics(self) -> None:
        self.other.append(("reduce",))


def loop(plan: LoopPlan, peers: FakePeers, **hooks: object) -> tuple[TrainingLoop, RankEngine]:
    engine = RankEngine()
    sources = Sources(FakeSource(), FakeSource(batches_per_epoch=2, tail=3))
    return TrainingLoop(plan, engine, sources, SilentReporter(), peers=peers, **hooks), engine  # type: ignore[arg-type]


def test_samples_and_digests_are_of_all_ranks() -> None:
    peers = FakePeers()
    training, engine = loop(make_plan(total_epochs=2), peers)
    progress = training.run()
    assert [r.samples for r in progress.history] == [2 * ((STEPS - 1) * BATCH + TAIL)] * 2
    own = [bytes.fromhex(f"{0:016x}{step:016x}") for step in range(STEPS)]
    assert progress.history[0].data_digest == chain_digest(chain_digest([d, d]) for d in own).hex()
    assert peers.combined == [STEPS] * 2, "once an epoch"
    assert engine.other.count(("reduce",)) == 2, "once a validation pass"


@pytest.mark.parametrize("writes", [True, False])
def test_all_ranks_meet_before_a_checkpoint_and_the_one_that_writes_knows_all_digests(writes: bool) -> None:
    peers, saved = FakePeers(), list[Progress]()
    training, _ = loop(make_plan(total_epochs=1, checkpoint_steps=3), peers, save=saved.append if writes else None)
    training.run()
    assert peers.combined == [3, 3, 1]
    if writes:
        assert [len(p.batch_digests) for p in saved] == [3, 6]
        assert [p.samples for p in saved] == [2 * 3 * BATCH, 2 * 6 * BATCH]


def test_nothing_is_written_after_a_rank_was_lost() -> None:
    peers, saved = FakePeers(lost=4), list[Progress]()
    training, engine = loop(make_plan(total_epochs=1, checkpoint_steps=5), peers, save=saved.append)
    with pytest.raises(Lost):
        training.run()
    assert saved == []
    assert sum(call[0] == "train" for call in engine.calls) <= 5


def test_a_rank_that_is_lost_in_validation_is_noticed_before_the_result_counts() -> None:
    done: list[object] = []
    training, engine = loop(make_plan(total_epochs=1), FakePeers(lost=STEPS), epoch_done=done.append)
    with pytest.raises(Lost):
        training.run()
    assert engine.validating
    assert done == []


@pytest.mark.parametrize(
    ("samples", "ranks", "drop_last", "expected"),
    [
        ((76, 21), 1, False, (12, 5)),
        ((76, 21), 2, False, (38 % 16, 11)),
        ((76, 21), 2, True, (None, 11)),
        ((64, 32), 2, False, (None, None)),
        ((64, 31), 2, False, (None, None)),  # rank 1 has an empty row in its only batch
        ((64, 33), 2, False, (None, 1)),  # rank 1 has an empty batch
        ((128, 100), 8, False, (None, 13)),
    ],
)
def test_the_last_batch_is_as_long_as_that_of_the_largest_share(
    samples: tuple[int, int], ranks: int, drop_last: bool, expected: tuple[int | None, int | None]
) -> None:
    assert tails(samples, 16, drop_last, ranks) == expected
