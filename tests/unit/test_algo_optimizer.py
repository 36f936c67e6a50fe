"""Optimizers: options, kinds, and the update formulas against hand-computed steps (spec/framework 4.2)."""

import math

import numpy as np
import pytest

from renaissance.algo import SGD, Adam, AdamW, Optimizer, OptimizerConfig
from renaissance.algo.optimizer import OptimizerState, reference_update
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
    assert SGD().nesterov().nesterov(False).config().kind is OptimizerKind.SGD_MOMENTUM


def test_nesterov_without_momentum_is_an_error_not_silence() -> None:
    with pytest.raises(ValueRejected, match="nesterov is on but momentum is 0"):
        SGD().momentum(0.0).nesterov().config()


def test_defaults() -> None:
    assert SGD().config() == OptimizerConfig(OptimizerKind.SGD_MOMENTUM, 0.0, 0.9)
    assert AdamW().config() == OptimizerConfig(OptimizerKind.ADAMW, 0.0, 0.0, 0.9, 0.999, 1e-8)
    assert Adam().config() == OptimizerConfig(OptimizerKind.ADAM, 0.0, 0.0, 0.9, 0.999, 1e-8)


def test_every_option_reaches_the_configuration() -> None:
    assert SGD().momentum(0.8).weight_decay(1e-4).nesterov().config() == OptimizerConfig(
        OptimizerKind.SGD_NESTEROV, 1e-4, 0.8
    )
    made = AdamW().beta1(0.8).beta2(0.99).eps(1e-6).weight_decay(0.01).config()
    assert made == OptimizerConfig(OptimizerKind.ADAMW, 0.01, 0.0, 0.8, 0.99, 1e-6)


@pytest.mark.parametrize(
    ("make", "m", "v"),
    [(SGD().momentum(0), False, False), (SGD(), True, False), (Adam(), True, True), (AdamW(), True, True)],
)
def test_which_moments_a_kind_keeps(make: Optimizer, m: bool, v: bool) -> None:
    assert (make.config().has_first_moment, make.config().has_second_moment) == (m, v)


@pytest.mark.parametrize(
    ("optimizer", "name", "bad"),
    [
        (SGD, "momentum", (-0.1, 1.0, math.nan)),
        (SGD, "weight_decay", (-1e-9, math.inf, math.nan)),
        (SGD, "nesterov", (1, "yes")),
        (Adam, "beta1", (0.0, 1.0, math.nan)),
        (AdamW, "beta2", (0.0, 1.0, -1.0)),
        (AdamW, "eps", (0.0, -1e-8, math.inf)),
        (Adam, "weight_decay", (-1.0,)),
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


@pytest.mark.parametrize("kind", [OptimizerKind.LARS, OptimizerKind.LARS_NESTEROV])
def test_kinds_without_a_formula_are_refused(kind: OptimizerKind) -> None:
    with pytest.raises(ValueRejected, match=f"{kind.name} is not part of this version"):
        reference_update(kind, [0.0], [0.0], OptimizerState(), AdamW().config().hyper(LR))


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
