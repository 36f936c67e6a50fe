"""Initial values: closed-form bounds, statelessness, region policy (spec/framework 1.10)."""

import math

import numpy as np
import pytest

from renaissance.core.enums import FanMode, InitKind
from renaissance.core.errors import ValueRejected
from renaissance.core.philox import Domain, philox, purpose
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor.init import InitConfig, Initializer, distribution, fan_of, fill_parameter

CONV = Shape(8, 3, 3, 4)  # K=8, R=S=3, C=4: fan_in 36, fan_out 72
FC = Shape(300, 1, 1, 200)


@pytest.mark.parametrize(
    ("config", "law", "value"),
    [
        (InitConfig(InitKind.KAIMING_NORMAL), "normal", math.sqrt(2 / 36)),
        (InitConfig(InitKind.KAIMING_UNIFORM), "uniform", math.sqrt(6 / 36)),
        (InitConfig(InitKind.KAIMING_UNIFORM, a=math.sqrt(5)), "uniform", 1 / math.sqrt(36)),
        (InitConfig(InitKind.KAIMING_UNIFORM, fan=FanMode.FAN_OUT), "uniform", math.sqrt(6 / 72)),
        (InitConfig(InitKind.KAIMING_UNIFORM, fan=FanMode.FAN_AVG), "uniform", math.sqrt(6 / 54)),
        (InitConfig(InitKind.XAVIER_NORMAL), "normal", math.sqrt(2 / 108)),
        (InitConfig(InitKind.XAVIER_UNIFORM, scale=2.0), "uniform", 2 * math.sqrt(6 / 108)),
        (InitConfig(InitKind.TRUNC_NORMAL), "truncated", 1 / 6),
        (InitConfig(InitKind.FIXED_NORMAL, sigma=0.02), "normal", 0.02),
        (InitConfig(InitKind.CONSTANTS, scale=0.25), "constant", 0.25),
        (InitConfig(InitKind.STANDARD), "constant", 1.0),
        (InitConfig(InitKind.ZERO_GAMMA), "constant", 0.0),
        (InitConfig(InitKind.ZEROS), "constant", 0.0),
        (InitConfig(), "constant", 0.0),
    ],
)
def test_each_kind_has_the_distribution_of_the_spec(config: InitConfig, law: str, value: float) -> None:
    got_law, got_value = distribution(config, CONV)
    assert got_law == law
    assert got_value == pytest.approx(value, rel=1e-15)


def test_default_fc_weights_are_kaiming_uniform_by_fan_in() -> None:
    config = Initializer().config_for(Region.W_FC_WEIGHT)
    w = fill_parameter(config, FC, seed=123, stream_id=0)
    bound = math.sqrt(6 / 200)
    assert w.shape == (300, 1, 1, 200)
    assert w.dtype == np.float32
    assert w.flags.c_contiguous
    assert np.abs(w).max() <= np.float32(bound)
    assert np.abs(w).max() > 0.999 * bound
    assert abs(w.mean()) < 4 * bound / math.sqrt(3 * w.size)
    assert w.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)


@pytest.mark.parametrize(("element", "seed", "ordinal"), [(0, 123, 0), (1, 123, 5), (6, 2**63 + 9, 2), (59999, 0, 7)])
def test_uniform_value_is_the_documented_function_of_its_counter(element: int, seed: int, ordinal: int) -> None:
    w = fill_parameter(InitConfig(InitKind.KAIMING_UNIFORM), FC, seed, ordinal).reshape(-1)
    word = philox(seed, element // 4, purpose(Domain.WEIGHT_INIT, ordinal), 0, 0)[element % 4]
    expected = np.float32((2 * (word >> 8) * 2.0**-24 - 1) * math.sqrt(6 / 200))
    assert w[element] == expected


def test_normal_value_is_box_muller_of_its_counter() -> None:
    w = fill_parameter(InitConfig(InitKind.FIXED_NORMAL, sigma=1.0), Shape.of(7), 42, 3).reshape(-1)
    r = philox(42, 1, purpose(Domain.WEIGHT_INIT, 3), 0, 0)
    u1, u2 = ((r[0] >> 8) | 1) * 2.0**-24, (r[1] >> 8) * 2.0**-24
    radius = math.sqrt(-2 * math.log(u1))
    assert w[4] == pytest.approx(radius * math.cos(2 * math.pi * u2), rel=1e-6)
    assert w[5] == pytest.approx(radius * math.sin(2 * math.pi * u2), rel=1e-6)


def test_truncated_normal_stays_inside_two_sigma_and_is_not_clipped() -> None:
    w = fill_parameter(InitConfig(InitKind.TRUNC_NORMAL), FC, 1, 0)
    sigma = 1 / math.sqrt(200)
    assert np.abs(w).max() <= np.float32(2 * sigma)
    assert np.count_nonzero(np.abs(w) == np.abs(w).max()) == 1
    assert w.std() == pytest.approx(0.8796 * sigma, rel=0.02)  # std of a unit normal cut at +-2


def test_values_depend_on_seed_and_ordinal_and_on_nothing_else() -> None:
    config = InitConfig(InitKind.KAIMING_UNIFORM)
    a = fill_parameter(config, FC, 123, 0)
    fill_parameter(config, CONV, 123, 1)
    assert np.array_equal(a, fill_parameter(config, FC, 123, 0))
    assert not np.array_equal(a, fill_parameter(config, FC, 123, 1))
    assert not np.array_equal(a, fill_parameter(config, FC, 124, 0))


def test_fan_modes_act() -> None:
    assert [fan_of(CONV, m) for m in FanMode] == [36, 72, 54]
    for mode, fan in zip(FanMode, (36, 72, 54), strict=True):
        config = Initializer().fc(InitKind.KAIMING_NORMAL).fan_mode(mode).config_for(Region.W_FC_WEIGHT)
        assert distribution(config, CONV)[1] == pytest.approx(math.sqrt(2 / fan))


def test_region_policy() -> None:
    init = Initializer().conv(InitKind.KAIMING_NORMAL).fc(InitKind.FIXED_NORMAL).sigma(0.5).scale(2.0).nonlinearity(1.0)
    start = {r: init.config_for(r) for r in Region}
    ones = {r for r, c in start.items() if c.kind is InitKind.CONSTANTS and c.scale == 1.0}
    assert ones == {Region.B_PREV_VAR, Region.B_NEXT_VAR, Region.W_EQ_SCALE, Region.W_BN_WEIGHT, Region.E_BN_WEIGHT}
    assert start[Region.W_FC_WEIGHT] == InitConfig(InitKind.FIXED_NORMAL, 2.0, FanMode.FAN_IN, 1.0, 0.5)
    assert start[Region.W_FIRST_CONV] == start[Region.W_DEEP_CONV]
    assert start[Region.W_DEEP_CONV].kind is InitKind.KAIMING_NORMAL
    zeros = {r for r, c in start.items() if c.kind is InitKind.ZEROS}
    assert {r for r in Region if r.series in "MV"} <= zeros
    assert {Region.W_FC_BIAS, Region.W_BN_BIAS, Region.G_FC_BIAS, Region.E_FC_BIAS, Region.B_PREV_MEAN} <= zeros
    assert start[Region.F_FEATURE_FP32].kind is InitKind.NONE


@pytest.mark.parametrize("kind", [InitKind.STANDARD, InitKind.ZERO_GAMMA])
def test_batch_norm_kinds_are_refused_for_weights(kind: InitKind) -> None:
    with pytest.raises(ValueRejected, match=rf"initializer\.fc: {kind.name}.*expected one of"):
        Initializer().fc(kind)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_parameters_are_refused(bad: float) -> None:
    for setter in (Initializer().scale, Initializer().sigma, Initializer().nonlinearity):
        with pytest.raises(ValueRejected, match="finite"):
            setter(bad)
    with pytest.raises(ValueRejected, match="sigma"):
        Initializer().sigma(-1.0)


def test_parameter_ordinal_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="low bits"):
        fill_parameter(InitConfig(InitKind.KAIMING_UNIFORM), FC, 0, 1 << 24)


def test_gamma_is_one_or_zero_where_a_residual_block_ends() -> None:
    plain, zero = Initializer(), Initializer().bn(InitKind.ZERO_GAMMA)
    shape = Shape.of(5)
    for policy, ends_block, value in ((plain, True, 1.0), (plain, False, 1.0), (zero, False, 1.0), (zero, True, 0.0)):
        assert fill_parameter(policy.gamma(ends_block), shape, 1, 2).tolist() == np.full(shape.dims, value).tolist()
    with pytest.raises(ValueRejected, match=r"initializer\.bn: TRUNC_NORMAL is for weights"):
        Initializer().bn(InitKind.TRUNC_NORMAL)
