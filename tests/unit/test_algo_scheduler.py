"""Learning-rate schedules: closed forms by epoch and by batch, warm-up, refusals (spec/framework 4.3)."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest

from renaissance.algo import (
    WSDLR,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWithWarmRestartsLR,
    ExponentialLR,
    LrSchedule,
    MultiStepLR,
    PolynomialLR,
    Scheduler,
    StepLR,
)
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


def test_polynomial_by_hand() -> None:
    s = PolynomialLR().base_lr(1.0).end_lr(0.2).power(3).warmup(1).prepare(5, 2)  # D = 8 steps from epoch 1 on
    assert [s.lr(e) for e in range(5)] == pytest.approx([1.0, 1.0, *(0.2 + 0.8 * (1 - d / 9) ** 3 for d in (2, 4, 6))])
    s = PolynomialLR().base_lr(0.5).end_lr(0.0).step_by_batch().prepare(1, 4)
    assert rates(s) == pytest.approx([0.5, 0.5 * 0.8**2, 0.5 * 0.6**2, 0.5 * 0.4**2])


@pytest.mark.parametrize("by_batch", [False, True])
def test_step_and_multi_step_count_the_same_epochs(by_batch: bool) -> None:
    def choose(scheduler: Scheduler) -> LrSchedule:
        return scheduler.base_lr(1.0).warmup(2).step_by_batch(by_batch).prepare(9, 3)

    step, multi = choose(StepLR().step_size(3).gamma(0.5)), choose(MultiStepLR().milestones([3, 6]).gamma(0.5))
    assert rates(step) == rates(multi)
    assert [step.lr(e) for e in range(2, 9)] == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    uneven = choose(MultiStepLR().milestones([4, 5, 20]).gamma(0.1))
    assert [uneven.lr(e, 2) for e in range(3, 7)] == pytest.approx([1.0, 0.1, 0.01, 0.01])


def test_exponential_starts_after_warmup_and_changes_by_epoch() -> None:
    s = ExponentialLR().base_lr(0.4).gamma(0.5).warmup(2).step_by_batch().prepare(5, 3)
    assert rates(s)[6:] == [0.4] * 3 + [0.2] * 3 + [0.1] * 3
    assert ExponentialLR().base_lr(0.4).gamma(2.0).prepare(3, 3).lr(2) == 1.6
    with pytest.raises(ValueRejected, match="grows to inf in 2000 epochs"):
        ExponentialLR().gamma(2.0).prepare(2000, 1)


def test_wsd_by_hand() -> None:
    s = WSDLR().base_lr(1.0).end_lr(0.2).decay_start(0.5).warmup(1).step_by_batch().prepare(3, 4)  # D = 8, c = 4
    assert rates(s)[4:] == pytest.approx([1, 1, 1, 1, 1.0, 0.8, 0.6, 0.4])
    by_epoch = WSDLR().base_lr(1.0).prepare(10, 7)
    assert [by_epoch.lr(e) for e in range(7, 10)] == pytest.approx([1.0, 1.0, 0.5])
    assert set(rates(WSDLR().base_lr(0.3).decay_start(1.0).prepare(4, 2))) == {0.3}
    assert rates(WSDLR().base_lr(1.0).decay_start(0.0).prepare(4, 1)) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_warm_restarts_by_hand() -> None:
    def half(t: float) -> float:
        return 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2

    made = CosineAnnealingWithWarmRestartsLR().base_lr(1.0).eta_min(0.1).t_0(2)
    assert [made.prepare(7, 5).lr(e) for e in range(7)] == pytest.approx([1.0, half(0.5)] * 3 + [1.0])
    longer = made.t_mult(3).warmup(1).step_by_batch().prepare(11, 2)  # periods of 2, then 6, then 18 epochs
    want = [0.5, 1.0] + [half(t / 4) for t in range(4)] + [half(t / 12) for t in range(12)]
    assert rates(longer) == pytest.approx(want + [half(t / 36) for t in range(4)])


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("make", [PolynomialLR, CosineAnnealingLR, WSDLR])
def test_nothing_left_after_warmup_trains_at_base(make: Callable[[], Scheduler], by_batch: bool) -> None:
    s = make().base_lr(1.0).warmup(3).step_by_batch(by_batch).prepare(3, 2)
    assert rates(s)[-1] == 1.0


@pytest.mark.parametrize(
    "make",
    [
        ConstantLR,
        CosineAnnealingLR,
        PolynomialLR,
        StepLR,
        lambda: MultiStepLR().milestones([4]),
        ExponentialLR,
        WSDLR,
        CosineAnnealingWithWarmRestartsLR,
    ],
)
@pytest.mark.parametrize("by_batch", [False, True])
def test_no_step_is_trained_at_rate_zero(make: Callable[[], Scheduler], by_batch: bool) -> None:
    scheduler = make().base_lr(1.0).warmup(3)
    s = (scheduler.step_by_batch() if by_batch else scheduler.step_by_epoch()).prepare(6, 4)
    assert all(r > 0.0 for r in rates(s))
    assert max(rates(s)) == 1.0
    assert s.lr(2, 3) == 1.0, "warm-up ends at the base rate"
    assert [rate for epoch in range(6) for rate in s.epoch_rates(epoch)] == rates(s)
    json.dumps(asdict(s))


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
        ("base_lr", ("0.1", True, 0.0, -1.0, 1e39, math.nan, math.inf)),
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


@pytest.mark.parametrize(
    ("scheduler", "name", "bad"),
    [
        (PolynomialLR, "power", (0.0, -1.0, math.nan)),
        (PolynomialLR, "end_lr", (-1.0, math.inf)),
        (StepLR, "step_size", (0, 1.5)),
        (StepLR, "gamma", (0.0, -0.1, math.nan)),
        (MultiStepLR, "milestones", ([0], [3, 3], [5, 2], [1.5], "30", 30.0)),
        (MultiStepLR, "gamma", (0.0,)),
        (ExponentialLR, "gamma", (0.0, math.inf)),
        (WSDLR, "decay_start", (-0.1, 1.1, math.nan)),
        (WSDLR, "end_lr", (-1.0,)),
        (CosineAnnealingWithWarmRestartsLR, "t_0", (0, True)),
        (CosineAnnealingWithWarmRestartsLR, "t_mult", (0, 1.5)),
        (CosineAnnealingWithWarmRestartsLR, "eta_min", (-1.0,)),
        (ConstantLR, "step_by_batch", (1,)),
    ],
)
def test_bad_values_of_the_other_schedules_are_refused_by_name(
    scheduler: Callable[[], Scheduler], name: str, bad: tuple[object, ...]
) -> None:
    for value in bad:
        with pytest.raises(ValueRejected, match=name):
            getattr(scheduler(), name)(value)


def test_contradictions_of_the_other_schedules_are_refused() -> None:
    for made in (PolynomialLR().end_lr(0.2), WSDLR().end_lr(0.2), CosineAnnealingWithWarmRestartsLR().eta_min(0.2)):
        with pytest.raises(ValueRejected, match=r"is 0\.2, above base_lr 0\.1"):
            made.base_lr(0.1).prepare(2, 2)
    with pytest.raises(ValueRejected, match="has no milestones"):
        MultiStepLR().prepare(2, 2)
    with pytest.raises(ValueRejected, match="milestones begins with 2, inside the warm-up of 3"):
        MultiStepLR().milestones([2, 5]).warmup(3).prepare(9, 2)


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
