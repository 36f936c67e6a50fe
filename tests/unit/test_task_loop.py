"""The epoch loop's bookkeeping, with a scripted engine and scripted batches instead of graphs and processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from renaissance.core.digest import chain_digest
from renaissance.task import loop as module
from renaissance.task.loop import LoopPlan, Sources, Sums, TrainingLoop
from renaissance.task.progress import SilentReporter
from renaissance.task.result import Progress

STEPS = 7
BATCH = 4
TAIL = 2


@dataclass
class FakeBatch:
    slot: int
    valid: int
    digest_bytes: bytes
    source: FakeSource

    def release(self) -> None:
        self.source.held -= 1


@dataclass
class FakeSource:
    batches_per_epoch: int = STEPS
    wait_seconds: float = 0.0
    tail: int = TAIL
    asked: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0

    def acquire(self, epoch: int, index: int) -> FakeBatch:
        self.asked.append((epoch, index))
        self.held += 1
        self.wait_seconds += 0.001
        valid = self.tail if index == self.batches_per_epoch - 1 else BATCH
        return FakeBatch(index % 4, valid, bytes.fromhex(f"{epoch:016x}{index:016x}"), self)


@dataclass
class FakeEngine:
    """Counts samples; top-1 of validation n (from 1) is n / 10, that of the moving averages 0.05 more."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    count: float = 0.0
    loss: float = 0.0
    validations: int = 0
    validating: bool = False
    ema: bool = False
    other: list[tuple[object, ...]] = field(default_factory=list)
    held: list[FakeBatch] = field(default_factory=list)
    """As a GPU does: the batch before is given back when the next step has been asked for."""

    def train_step(
        self, slot: int, valid: int, lr: float, last: bool, *, end: bool = False, frozen: bool = False
    ) -> None:
        self.calls.append(("train", slot, valid, lr, last))
        self.other.append(("train", end, frozen))
        self.count += valid
        self.loss += valid * 0.5

    def freeze_first_layer(self, frozen: bool) -> None:
        self.other.append(("freeze", frozen))

    def prepare_validation(self, ema: bool = False) -> None:
        self.other.append(("prepare", ema))
        self.ema = ema

    def val_step(self, slot: int, valid: int, last: bool, *, ema: bool = False) -> None:
        assert ema == self.ema
        self.calls.append(("val", slot, valid, last))
        self.count += valid
        self.validating = True

    def release(self, batch: FakeBatch) -> None:
        self.held.append(batch)
        while len(self.held) > 1:
            self.held.pop(0).release()

    def drain(self) -> None:
        while self.held:
            self.held.pop(0).release()

    def switch_ema(self) -> None:
        self.other.append(("switch",))

    def clear_metrics(self) -> None:
        self.count = self.loss = 0.0
        self.validating = False

    def metrics(self) -> Sums:
        if self.validating:
            self.validations += not self.ema
            top1 = self.validations / 10 + 0.05 * self.ema
            return Sums(self.count * 0.25, self.count * top1, self.count, self.count)
        return Sums(self.loss, 0.0, 0.0, self.count)

    def progress(self) -> Sums:
        self.other.append(("progress",))
        return Sums(0.0, 0.0, 0.0, 0.0)


def make(plan: LoopPlan | None = None, start: Progress | None = None, **hooks: object):
    engine, train, val = FakeEngine(), FakeSource(), FakeSource(batches_per_epoch=2, tail=3)
    sources = Sources(train, val, hooks.pop("train_end", None))  # type: ignore[arg-type]
    if start is not None and start.next_batch:
        engine.count, engine.loss = float(start.samples), start.samples * 0.5  # what the checkpoint's tensors restore
    plan = plan or make_plan()
    return TrainingLoop(plan, engine, sources, SilentReporter(), start=start, **hooks), engine, train, val  # type: ignore[arg-type]


def make_plan(**changes: object) -> LoopPlan:
    values: dict[str, object] = {
        "total_epochs": 3,
        "rates": lambda epoch: [0.1 * (epoch + 1)] * STEPS,
        "train_last": True,
        "val_last": True,
    }
    return LoopPlan(**{**values, **changes})  # type: ignore[arg-type]


def test_every_batch_is_trained_on_once_in_order_and_given_back() -> None:
    loop, engine, train, val = make()
    loop.run()
    assert train.asked == [(e, i) for e in range(3) for i in range(STEPS)]
    assert val.asked == [(e, i) for e in range(3) for i in range(2)]
    assert train.held == val.held == 0
    assert [c[1] for c in engine.calls if c[0] == "train"][:STEPS] == [0, 1, 2, 3, 0, 1, 2]


def test_only_the_tail_batch_uses_the_last_variant() -> None:
    loop, engine, _, _ = make()
    loop.run()
    first_epoch = [c for c in engine.calls if c[0] == "train"][:STEPS]
    assert [c[4] for c in first_epoch] == [False] * (STEPS - 1) + [True]
    assert first_epoch[-1][2] == TAIL
    assert [c[3] for c in engine.calls if c[0] == "val"][:2] == [False, True]


def test_full_last_batch_keeps_the_base_variant() -> None:
    loop, engine, _, _ = make(make_plan(train_last=False, val_last=False))
    loop.run()
    assert not any(c[-1] for c in engine.calls)


def test_records_hold_means_over_true_sample_counts() -> None:
    loop, _, _, _ = make()
    history = loop.run().history
    assert [r.epoch for r in history] == [1, 2, 3]
    assert history[0].samples == (STEPS - 1) * BATCH + TAIL
    assert history[0].train_loss == 0.5
    assert history[0].val_loss == 0.25
    assert [r.top1 for r in history] == pytest.approx([0.1, 0.2, 0.3])
    assert [r.lr for r in history] == pytest.approx([0.1, 0.2, 0.3])
    assert history[0].wait_seconds == pytest.approx(STEPS * 0.001)


def test_epoch_digest_is_the_chain_of_batch_digests() -> None:
    loop, _, _, _ = make()
    expected = chain_digest(bytes.fromhex(f"{1:016x}{i:016x}") for i in range(STEPS)).hex()
    assert loop.run().history[1].data_digest == expected


def test_learning_rate_of_each_step_is_passed_on() -> None:
    loop, engine, _, _ = make(make_plan(total_epochs=1, rates=lambda epoch: [i / 100 for i in range(STEPS)]))
    loop.run()
    assert [c[3] for c in engine.calls if c[0] == "train"] == [i / 100 for i in range(STEPS)]


def test_validation_follows_its_epochs_and_its_source_reads_on_in_order() -> None:
    loop, _, _, val = make(make_plan(total_epochs=7, validates=lambda epoch: epoch % 3 == 1))
    history = loop.run().history
    assert [r.epoch for r in history if r.top1 is not None] == [1, 4, 7]
    assert val.asked == [(n, i) for n in range(3) for i in range(2)]


def test_moving_averages_are_validated_in_a_second_pass_with_their_own_numbers() -> None:
    plan = make_plan(total_epochs=3, ema=True, validates=lambda epoch: epoch != 2)
    loop, engine, _, val = make(plan)
    history = loop.run().history
    assert val.asked == [(n, i) for n in range(4) for i in range(2)]
    assert [r.ema_top1 for r in history] == [pytest.approx(0.15), None, pytest.approx(0.25)]
    assert [r.top1 for r in history] == [pytest.approx(0.1), None, pytest.approx(0.2)]
    assert (history[0].ema_loss, history[0].ema_top5) == (0.25, 1.0)
    assert [c for c in engine.other if c[0] in ("prepare", "switch")] == [("prepare", False), ("prepare", True)] * 2


def test_a_resumed_run_validates_with_the_passes_of_the_straight_one() -> None:
    plan = make_plan(total_epochs=4, ema=True, validates=lambda epoch: epoch in (1, 4))
    saved: list[Progress] = []
    make(make_plan(total_epochs=4, ema=True, checkpoint_epochs=1), save=saved.append)[0].run()
    loop, _, _, val = make(plan, start=saved[1])
    loop.run()
    assert val.asked == [(n, i) for n in (2, 3) for i in range(2)]


def test_weights_are_switched_before_every_epoch_but_the_first_and_never_inside_one() -> None:
    saved: list[Progress] = []
    plan = make_plan(ema=True, switch_ema=True, checkpoint_steps=2)
    loop, engine, _, _ = make(plan, save=saved.append)
    loop.run()
    epochs = "".join("s" if c[0] == "switch" else "t" for c in engine.other if c[0] in ("switch", "train"))
    assert epochs == "s".join(["t" * STEPS] * 3)
    for at in saved:
        resumed, engine, _, _ = make(plan, start=at)
        resumed.run()
        left = 2 - at.epoch + (at.next_batch == 0 and at.epoch < 3)
        assert engine.other.count(("switch",)) == max(left, 0), at


def test_epochs_at_the_second_resolution_read_from_its_source_with_its_variant() -> None:
    second = FakeSource()
    plan = make_plan(end_epochs=frozenset({1, 2}), sizes=(20, 28, 28))
    loop, engine, train, _ = make(plan, train_end=second)
    history = loop.run().history
    assert train.asked == [(0, i) for i in range(STEPS)]
    assert second.asked == [(e, i) for e in (1, 2) for i in range(STEPS)]
    assert [c[1] for c in engine.other if c[0] == "train"] == [False] * STEPS + [True] * 2 * STEPS
    assert [r.resolution for r in history] == [20, 28, 28]
    assert history[1].wait_seconds == pytest.approx(STEPS * 0.001), "of the source that was read"


@pytest.mark.parametrize("start", [None, Progress(1, 3), Progress(2, 0)])
def test_first_layer_is_frozen_once_the_epochs_are_done_also_after_a_resume(start: Progress | None) -> None:
    loop, engine, _, _ = make(make_plan(freeze_after=2), start=start)
    loop.run()
    first, at = (start.epoch, start.next_batch) if start else (0, 0)
    assert [c[1] for c in engine.other if c[0] == "freeze"] == [epoch >= 2 for epoch in range(first, 3)]
    steps = [c[2] for c in engine.other if c[0] == "train"]
    assert steps == [False] * (2 * STEPS - first * STEPS - at) + [True] * STEPS


def test_a_frozen_layer_is_frozen_before_weights_are_switched_also_after_a_resume() -> None:
    plan = make_plan(total_epochs=3, ema=True, switch_ema=True, freeze_after=1)
    for start, switches in ((None, 2), (Progress(1, 0), 2), (Progress(2, 0), 1), (Progress(2, 3), 0)):
        loop, engine, _, _ = make(plan, start=start)
        loop.run()
        told = [c for c in engine.other if c[0] in ("freeze", "switch")]
        after = [told[i - 1] for i, c in enumerate(told) if c == ("switch",)]
        assert after == [("freeze", True)] * switches, start


def test_writing_checkpoints_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])

    def save(progress: Progress) -> None:
        clock[0] += 100.0

    loop, engine, _, _ = make(make_plan(total_epochs=2, checkpoint_steps=2), save=save)
    step = engine.train_step

    def slow(*arguments: object, **options: object) -> None:
        clock[0] += 1.0
        step(*arguments, **options)  # type: ignore[arg-type]

    engine.train_step = slow  # type: ignore[method-assign]
    assert [r.train_seconds for r in loop.run().history] == [STEPS, STEPS]


def test_batches_are_given_back_in_order_and_all_of_them_where_a_pass_ends_or_a_checkpoint_is_written() -> None:
    held = []

    def save(progress: Progress) -> None:
        held.append((train.held, len(engine.held)))

    loop, engine, train, val = make(make_plan(checkpoint_steps=3, train_last=False), save=save)
    validate = engine.prepare_validation
    engine.prepare_validation = lambda ema=False: [held.append((train.held, val.held)), validate(ema)]  # type: ignore[assignment,func-returns-value]
    loop.run()
    assert len(held) == 3 * STEPS // 3 + 3
    assert set(held) == {(0, 0)}
    assert (train.held, val.held) == (0, 0)


def test_the_exact_metrics_are_waited_for_only_where_a_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, waits = [], []

    class Told(SilentReporter):
        def step(self, done: int, loss: float, samples_per_s: float, wait_share: float) -> None:
            shown.append((done, loss))

    monkeypatch.setattr(module, "PROGRESS_UPDATES", 3)
    loop, engine, _, _ = make(make_plan(total_epochs=1))
    exact = engine.metrics
    engine.metrics = lambda: [waits.append(len(shown)), exact()][1]  # type: ignore[method-assign]
    loop._reporter = Told()
    loop.run()
    assert [done for done, _ in shown] == [2, 4, 6, 7]
    assert shown[-1][1] == 0.5, "the last one of an epoch is exact"
    assert waits[0] == 3, "not before the last segment"
    assert engine.other.count(("progress",)) == 3


def test_early_stop_goes_by_the_better_of_weights_and_moving_averages() -> None:
    loop, _, _, _ = make(make_plan(total_epochs=9, early_stop_top1=0.34, ema=True))
    assert len(loop.run().history) == 3


def test_early_stop_ends_after_the_epoch_that_reaches_top1() -> None:
    loop, _, _, _ = make(make_plan(total_epochs=9, early_stop_top1=0.15))
    progress = loop.run()
    assert progress.stopped_early
    assert len(progress.history) == 2


@pytest.mark.parametrize(("threshold", "epochs"), [(0.15, 2), (None, 9), (0.45, 5)])
def test_resumed_early_stop_goes_by_the_threshold_of_the_new_run(threshold: float | None, epochs: int) -> None:
    stopped = make(make_plan(total_epochs=9, early_stop_top1=0.15))[0].run()
    loop, engine, _, _ = make(make_plan(total_epochs=9, early_stop_top1=threshold), start=stopped)
    engine.validations = 2
    progress = loop.run()
    assert len(progress.history) == epochs
    assert progress.stopped_early == (threshold is not None)


def test_checkpoint_after_every_nth_step_and_epoch() -> None:
    saved: list[Progress] = []
    loop, _, _, _ = make(make_plan(total_epochs=2, checkpoint_steps=5), save=saved.append)
    loop.run()
    assert [(p.epoch, p.next_batch) for p in saved] == [(0, 5), (1, 3)]
    saved.clear()
    loop, _, _, _ = make(make_plan(total_epochs=3, checkpoint_epochs=2), save=saved.append)
    loop.run()
    assert [(p.epoch, p.next_batch) for p in saved] == [(2, 0), (3, 0)]  # the last epoch is always saved


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_resume_at_any_step_equals_the_straight_run(every: int) -> None:
    saved: list[Progress] = []
    straight, _, _, _ = make(make_plan(checkpoint_steps=every), save=saved.append)
    want = straight.run()
    for at in saved:
        resumed, engine, train, _ = make(start=Progress.from_json(at.to_json()))
        engine.validations = len(at.history)
        got = resumed.run()
        assert [r.data_digest for r in got.history] == [r.data_digest for r in want.history]
        assert [r.train_loss for r in got.history] == [r.train_loss for r in want.history]
        assert [r.samples for r in got.history] == [r.samples for r in want.history]
        assert train.asked[:1] in ([(at.epoch, at.next_batch)], [(at.epoch + 1, 0)], [])


def test_finished_epochs_are_told_in_order() -> None:
    told: list[int] = []
    loop, _, _, _ = make(epoch_done=lambda record: told.append(record.epoch))
    loop.run()
    assert told == [1, 2, 3]
