"""Optimizers: options, kinds, and the update formulas against hand-computed steps (spec/framework 4.2)."""

import math

import numpy as np
import pytest

from renaissance.algo import LARS, SGD, Adam, AdamW, Optimizer, OptimizerConfig
from renaissance.algo.optimizer import OptimizerState, lars_ratio, reference_update
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import ValueRejected

LR, DECAY = 0.1, 0.5


def two_steps(optimizer: Optimizer, w: float, gradients: tuple[float, float]) -> tuple[float, OptimizerState]:
    config, state, weight = optimizer.config(), OptimizerState(), np.array([w])
    for g in gradients:
        weight, state = reference_update(config.kind, weight, [g], state, config.hyper(LR))
    return float(weight[0]), state


def test_kinds_follow_from_the_options() -> None:
    kinds = [o.config().kind for o in (SGD(), SGD().momentum(0), SGD().nesterov(), Adam(), AdamW())]
    assert kinds == [
        OptimizerKind.SGD_MOMENTUM,
        OptimizerKind.SGD,
        OptimizerKind.SGD_NESTEROV,
        OptimizerKind.ADAM,
        OptimizerKind.ADAMW,
    ]
    assert LARS().config().kind is OptimizerKind.LARS
    assert LARS().nesterov().config().kind is OptimizerKind.LARS_NESTEROV
    assert SGD().nesterov().nesterov(False).config().kind is OptimizerKind.SGD_MOMENTUM


def test_nesterov_without_momentum_is_an_error_not_silence() -> None:
    with pytest.raises(ValueRejected, match="nesterov is on but momentum is 0"):
        SGD().momentum(0.0).nesterov().config()
    with pytest.raises(ValueRejected, match="nesterov is on but momentum is 0"):
        LARS().momentum(0.0).nesterov().config()


def test_defaults() -> None:
    assert SGD().config() == OptimizerConfig(OptimizerKind.SGD_MOMENTUM, 0.0, 0.9)
    assert LARS().config() == OptimizerConfig(OptimizerKind.LARS, 0.0, 0.9, eps=1e-8, trust_coefficient=0.001)
    assert AdamW().config() == OptimizerConfig(OptimizerKind.ADAMW, 0.0, 0.0, 0.9, 0.999, 1e-8)
    assert Adam().config() == OptimizerConfig(OptimizerKind.ADAM, 0.0, 0.0, 0.9, 0.999, 1e-8)


def test_every_option_reaches_the_configuration() -> None:
    assert SGD().momentum(0.8).weight_decay(1e-4).nesterov().config() == OptimizerConfig(
        OptimizerKind.SGD_NESTEROV, 1e-4, 0.8
    )
    made = LARS().momentum(0.8).weight_decay(1e-4).trust_coefficient(0.02).eps(0.0).nesterov().config()
    assert made == OptimizerConfig(OptimizerKind.LARS_NESTEROV, 1e-4, 0.8, eps=0.0, trust_coefficient=0.02)
    assert made.hyper(0.5).trust_coefficient == 0.02
    made = AdamW().beta1(0.8).beta2(0.99).eps(1e-6).weight_decay(0.01).config()
    assert made == OptimizerConfig(OptimizerKind.ADAMW, 0.01, 0.0, 0.8, 0.99, 1e-6)


@pytest.mark.parametrize(
    ("make", "m", "v"),
    [
        (SGD().momentum(0), False, False),
        (LARS().momentum(0), True, False),
        (SGD(), True, False),
        (Adam(), True, True),
        (AdamW(), True, True),
    ],
)
def test_which_moments_a_kind_keeps(make: Optimizer, m: bool, v: bool) -> None:
    assert (make.config().has_first_moment, make.config().has_second_moment) == (m, v)


@pytest.mark.parametrize(
    ("optimizer", "name", "bad"),
    [
        (SGD, "momentum", (-0.1, 1.0, math.nan)),
        (SGD, "weight_decay", (True, "0.1", None, -1e-9, 1e39, math.inf, math.nan)),
        (SGD, "nesterov", (1, "yes")),
        (Adam, "beta1", (0.0, 1.0, math.nan)),
        (AdamW, "beta2", (0.0, 1.0, -1.0)),
        (AdamW, "eps", ("small", 0.0, -1e-8, math.inf)),
        (Adam, "weight_decay", (-1.0,)),
        (LARS, "momentum", (-0.1, 1.0)),
        (LARS, "weight_decay", (-1.0, math.nan)),
        (LARS, "trust_coefficient", (0.0, -1.0, 1e-40, 1e39, math.inf)),
        (LARS, "eps", (-1e-9, math.nan)),
        (LARS, "nesterov", (1,)),
    ],
)
def test_bad_values_are_refused_by_name(optimizer: type[Optimizer], name: str, bad: tuple[object, ...]) -> None:
    for value in bad:
        with pytest.raises(ValueRejected, match=f"{name} is"):
            getattr(optimizer(), name)(value)


def test_plain_sgd_by_hand() -> None:
    w1 = 2.0 * (1 - LR * DECAY) - LR * 3.0
    w2 = w1 * (1 - LR * DECAY) - LR * -1.0
    got, state = two_steps(SGD().momentum(0).weight_decay(DECAY), 2.0, (3.0, -1.0))
    assert got == pytest.approx(w2, rel=1e-15)
    assert state.step == 2


def test_momentum_by_hand() -> None:
    w1 = 2.0 * (1 - LR * DECAY) - LR * 3.0
    m2 = 0.9 * 3.0 - 1.0
    got, state = two_steps(SGD().weight_decay(DECAY), 2.0, (3.0, -1.0))
    assert got == pytest.approx(w1 * (1 - LR * DECAY) - LR * m2, rel=1e-15)
    assert state.m == pytest.approx([m2], rel=1e-15)


def test_nesterov_by_hand() -> None:
    w1 = 2.0 * (1 - LR * DECAY) - LR * (0.9 * 3.0 + 3.0)
    m2 = 0.9 * 3.0 - 1.0
    got, _ = two_steps(SGD().nesterov().weight_decay(DECAY), 2.0, (3.0, -1.0))
    assert got == pytest.approx(w1 * (1 - LR * DECAY) - LR * (0.9 * m2 - 1.0), rel=1e-15)


def adam_by_hand(w: float, gradients: tuple[float, ...], coupled: float, decoupled: float) -> float:
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        g = g + coupled * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - LR * decoupled)
        w -= LR * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def test_adam_decays_inside_the_gradient() -> None:
    got, _ = two_steps(Adam().weight_decay(DECAY), 2.0, (3.0, -1.0))
    assert got == pytest.approx(adam_by_hand(2.0, (3.0, -1.0), DECAY, 0.0), rel=1e-13)


def test_adamw_decays_outside_the_gradient() -> None:
    got, state = two_steps(AdamW().weight_decay(DECAY), 2.0, (3.0, -1.0))
    assert got == pytest.approx(adam_by_hand(2.0, (3.0, -1.0), 0.0, DECAY), rel=1e-13)
    assert state.v == pytest.approx([0.999 * 0.001 * 9.0 + 0.001], rel=1e-12)


def test_first_adam_step_has_the_size_of_the_rate() -> None:
    config = Adam().config()
    for g in (1e-3, 5.0, -700.0):
        w, _ = reference_update(config.kind, [0.0], [g], OptimizerState(), config.hyper(LR))
        assert w[0] == pytest.approx(-math.copysign(LR, g), rel=1e-4)


def test_update_leaves_its_inputs_alone() -> None:
    config, w, g = AdamW().weight_decay(0.1).config(), np.ones((2, 3)), np.full((2, 3), 2.0)
    _, state = reference_update(config.kind, w, g, OptimizerState(), config.hyper(LR))
    kept = np.array(state.m, copy=True)
    reference_update(config.kind, w, g, state, config.hyper(LR))
    assert np.array_equal(w, np.ones((2, 3)))
    assert np.array_equal(state.m, kept)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_by_hand(nesterov: bool) -> None:
    """Two elements, so that a norm is not an absolute value: |w| = 5, |g| = 13, then what follows."""
    config = LARS().weight_decay(0.01).trust_coefficient(0.02).eps(0.5).nesterov(nesterov).config()
    w, m, state = np.array([3.0, 4.0]), np.zeros(2), OptimizerState()
    for g in (np.array([5.0, -12.0]), np.array([-1.0, 0.5])):
        ratio = 0.02 * math.hypot(*w) / (math.hypot(*g) + 0.01 * math.hypot(*w) + 0.5)
        scaled = LR * ratio * (g + 0.01 * w)
        m = 0.9 * m + scaled
        want = w - (scaled + 0.9 * m if nesterov else m)
        got, state = reference_update(config.kind, w, g, state, config.hyper(LR))
        assert got == pytest.approx(want, rel=1e-14)
        w = want
    assert state.m == pytest.approx(m, rel=1e-14)


def test_lars_ratio_is_one_without_a_norm_and_never_above_one_hundred() -> None:
    hyper = LARS().trust_coefficient(1.0).eps(0.0).config().hyper(LR)
    assert lars_ratio([0.0, 1e-13], [1.0, 1.0], hyper) == 1.0
    assert lars_ratio([1.0, 1.0], [0.0, 1e-13], hyper) == 1.0
    assert lars_ratio([1.0], [1e-6], hyper) == 100.0
    assert lars_ratio([3.0, 4.0], [0.0, 10.0], hyper) == 0.5


def test_biases_under_lars_go_by_momentum_without_a_ratio() -> None:
    assert LARS().config().plain_kind is OptimizerKind.SGD_MOMENTUM
    assert LARS().nesterov().config().plain_kind is OptimizerKind.SGD_NESTEROV
    assert all(o.config().plain_kind is o.config().kind for o in (SGD(), SGD().momentum(0), Adam(), AdamW()))


@pytest.mark.parametrize(
    ("setter", "value"), [("eps", 1e-46), ("eps", 1e-40), ("beta1", 1 - 2.0**-25), ("beta2", 0.999999999)]
)
def test_a_constant_that_float32_turns_into_nan_weights_is_refused(setter: str, value: float) -> None:
    """The device holds float32 and flushes denormals: eps 0 gives 0 / 0, beta 1 an infinite bias correction."""
    with pytest.raises(ValueRejected, match=f"{setter} is {value}"):
        getattr(AdamW(), setter)(value)


def test_the_nearest_constants_that_float32_can_use_are_taken() -> None:
    beta = float(np.nextafter(np.float32(1), np.float32(0)))
    config = Adam().eps(2.0**-126).beta1(beta).beta2(beta).config()
    assert np.float32(config.eps) > 0
    assert np.float32(config.beta2) < 1
