"""Learning-rate schedules: closed forms by epoch and by batch, warm-up, refusals (spec/framework 4.3)."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest

from renaissance.algo import ConstantLR, CosineAnnealingLR, LrSchedule, Scheduler
from renaissance.core.errors import ValueRejected


def rates(schedule: LrSchedule) -> list[float]:
    return [schedule.lr(e, b) for e in range(schedule.epochs) for b in range(schedule.steps_per_epoch)]


def test_constant_is_constant() -> None:
    assert set(rates(ConstantLR().base_lr(0.3).prepare(4, 3))) == {0.3}
    assert ConstantLR().prepare(1, 1).lr(0) == 0.1


def test_the_schedule_of_the_example() -> None:
    s = CosineAnnealingLR().base_lr(1e-3).warmup(5).prepare(100, 300)
    assert [s.lr(e) for e in range(6)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3], rel=1e-12)
    assert s.lr(99) == pytest.approx(1e-6, rel=1e-9)
    for e in (5, 30, 77, 99):
        expected = 1e-6 + (1e-3 - 1e-6) * (1 + math.cos(math.pi * (e - 5) / 94)) / 2
        assert s.lr(e) == pytest.approx(expected, rel=1e-12)
    assert len({s.lr(40, b) for b in range(300)}) == 1


def test_cosine_by_batch() -> None:
    s = CosineAnnealingLR().base_lr(0.5).eta_min(0.1).warmup(1).step_by_batch().prepare(3, 4)
    warm = [0.5 * (k + 1) / 4 for k in range(4)]
    decay = [0.1 + 0.4 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    assert rates(s) == pytest.approx(warm + decay, rel=1e-12)


def test_cosine_without_warmup_starts_at_base_and_ends_at_eta() -> None:
    s = CosineAnnealingLR().base_lr(0.2).eta_min(0.0).prepare(11, 7)
    assert s.lr(0) == 0.2
    assert s.lr(5) == pytest.approx(0.1, rel=1e-12)
    assert s.lr(10) == pytest.approx(0.0, abs=1e-17)
    assert all(a > b for a, b in zip(map(s.lr, range(10)), map(s.lr, range(1, 11)), strict=True))


@pytest.mark.parametrize("make", [ConstantLR, CosineAnnealingLR])
@pytest.mark.parametrize("by_batch", [False, True])
def test_no_step_is_trained_at_rate_zero(make: Callable[[], Scheduler], by_batch: bool) -> None:
    scheduler = make().base_lr(1.0).warmup(3)
    s = (scheduler.step_by_batch() if by_batch else scheduler.step_by_epoch()).prepare(6, 4)
    assert all(r > 0.0 for r in rates(s))
    assert max(rates(s)) == 1.0


def test_warmup_start_by_value_and_by_factor_agree() -> None:
    by_value = ConstantLR().base_lr(0.36).warmup(10).warmup_start_lr(0.09).prepare(20, 2)
    by_factor = ConstantLR().base_lr(0.36).warmup(10).warmup_start_factor(0.25).prepare(20, 2)
    assert rates(by_value) == rates(by_factor)
    assert by_value.lr(0) == pytest.approx(0.09 + 0.27 / 10, rel=1e-12)
    assert by_value.lr(9) == by_value.lr(10) == 0.36


def test_warmup_longer_than_the_run_ends_at_base() -> None:
    s = CosineAnnealingLR().base_lr(1.0).warmup(50).prepare(4, 2)
    assert [s.lr(e) for e in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_one_epoch_after_warmup_keeps_base() -> None:
    s = CosineAnnealingLR().base_lr(1.0).warmup(2).prepare(3, 5)
    assert s.lr(2) == 1.0


def test_schedule_is_plain_data_and_the_same_every_time() -> None:
    make = CosineAnnealingLR().base_lr(1e-3).warmup(2).prepare
    assert make(5, 3) == make(5, 3)
    assert json.loads(json.dumps(asdict(make(5, 3))))["kind"] == "cosine"
    with pytest.raises(AttributeError):
        make(5, 3).base_lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("epoch", "batch"), [(-1, 0), (5, 0), (0, -1), (0, 3)])
def test_outside_the_schedule_is_refused(epoch: int, batch: int) -> None:
    with pytest.raises(ValueRejected, match=r"learning rate: .*expected 0 to"):
        ConstantLR().prepare(5, 3).lr(epoch, batch)


@pytest.mark.parametrize(("epochs", "steps"), [(0, 1), (1, 0), (-1, 1), (1.5, 1), (True, 1)])
def test_prepare_needs_positive_whole_numbers(epochs: int, steps: int) -> None:
    with pytest.raises(ValueRejected, match="schedule: "):
        ConstantLR().prepare(epochs, steps)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("base_lr", (0.0, -1.0, math.nan, math.inf)),
        ("warmup", (-1, 1.5, True)),
        ("warmup_start_lr", (-1e-9, math.nan)),
        ("warmup_start_factor", (-0.1, 1.1, math.nan)),
        ("eta_min", (-1e-9, math.nan, math.inf)),
    ],
)
def test_bad_values_are_refused_by_name(name: str, bad: tuple[object, ...]) -> None:
    for value in bad:
        with pytest.raises(ValueRejected, match=f"{name} is"):
            getattr(CosineAnnealingLR(), name)(value)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueRejected, match="already steps by epoch"):
        ConstantLR().step_by_epoch().step_by_batch()
    assert ConstantLR().step_by_batch().step_by_batch().prepare(1, 1).by_batch
    with pytest.raises(ValueRejected, match="warmup_start_lr is set already"):
        ConstantLR().warmup_start_lr(0.1).warmup_start_factor(0.1)
    with pytest.raises(ValueRejected, match="warmup_start_factor is set already"):
        ConstantLR().warmup_start_factor(0.1).warmup_start_lr(0.1)
    with pytest.raises(ValueRejected, match="warmup is 0 epochs"):
        ConstantLR().warmup_start_lr(0.1).prepare(1, 1)
    with pytest.raises(ValueRejected, match=r"eta_min is 0\.2, above base_lr 0\.1"):
        CosineAnnealingLR().base_lr(0.1).eta_min(0.2).prepare(1, 1)
