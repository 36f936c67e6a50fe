"""Known silent traps of this field around values and settings, and what happens here instead.

Each test says how bad the trap is elsewhere (upstream, or a common library) and pins our answer, so that nobody
"simplifies" it away.
"""

import math

import numpy as np
import pytest

from renaissance.algo import SGD, ConstantLR, CosineAnnealingLR, CrossEntropyLoss
from renaissance.algo.loss import reference_cross_entropy
from renaissance.core.dtype import DType, bf16_from_fp32, fp32_from_bf16
from renaissance.core.enums import InitKind, NormMode
from renaissance.core.errors import DeviceError, DTypeError, ShapeError, ValueRejected
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.core.shape import Shape
from renaissance.data.recipe import Normalization
from renaissance.tensor import InitConfig, Tensor, fill_parameter


def test_zero_size_is_an_error_not_a_one() -> None:
    """Bad: a computed size of 0 becomes 1, and the model trains on the wrong shape."""
    with pytest.raises(ShapeError, match="axis C is 0"):
        Shape.of(2, 0)


def test_a_fifth_size_is_an_error_not_dropped() -> None:
    """Bad: the fifth size is ignored and every later one means another axis."""
    with pytest.raises(ShapeError):
        Shape.of(1, 2, 3, 4, 5)


def test_nan_is_not_close_to_anything() -> None:
    """Very bad: with "difference > tolerance rejects", a tensor of NaN passes every numeric test."""
    nan, one = Tensor.full(Shape.of(4), math.nan), Tensor.full(Shape.of(4), 1.0)
    assert not nan.is_close(one)
    assert not nan.is_close(nan)
    assert not nan.is_close(one, tolerance=math.inf)
    one.numpy()[0, 0, 0, 3] = math.nan
    assert not one.is_close(Tensor.full(Shape.of(4), 1.0)), "one NaN among good values counts too"


def test_infinities_are_close_to_themselves_only() -> None:
    """Mild: inf - inf is NaN, so a careless fix of the NaN trap rejects equal infinities."""
    inf = Tensor.full(Shape.of(4), math.inf)
    assert inf.is_close(inf.clone())
    assert not inf.is_close(Tensor.full(Shape.of(4), -math.inf))
    assert not inf.is_close(Tensor.full(Shape.of(4), 3e38))


def test_bf16_is_rounded_not_cut() -> None:
    """Bad: dropping the low 16 bits biases every weight towards zero, half a unit on average."""
    values = np.random.default_rng(0).uniform(1.0, 2.0, 100_000).astype(np.float32)
    rounded = fp32_from_bf16(bf16_from_fp32(values))
    cut = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert abs(float((rounded - values).mean())) < 1e-5
    assert float((cut - values).mean()) < -3e-3


def test_bf16_cannot_take_a_small_step_so_master_weights_are_fp32() -> None:
    """Bad: 1 + 0.003 is 1 in bf16, so a model kept in bf16 alone stops learning at small rates."""
    step = np.array([1.0 + 0.003], np.float32)
    assert fp32_from_bf16(bf16_from_fp32(step))[0] == 1.0
    assert step[0] != 1.0


def test_bf16_bit_patterns_are_never_taken_for_integers() -> None:
    """Bad: NumPy sees bf16 as uint16; a value conversion of the bits gives 16256.0 instead of 1.0."""
    with pytest.raises(DTypeError, match="give dtype="):
        Tensor.from_numpy(np.array([0x3F80], np.uint16))
    assert Tensor.from_numpy(np.array([0x3F80], np.uint16), DType.BF16).to_float32()[0, 0, 0, 0] == 1.0


def test_rounding_to_bf16_can_overflow_and_nan_stays_nan() -> None:
    """Bad: the rounding addition turns some NaN patterns into -0 and large finite values into infinity; the second is
    right, the first is not."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(fp32_from_bf16(bf16_from_fp32(bits))).all()
    assert np.isinf(fp32_from_bf16(bf16_from_fp32(np.array([3.4e38], np.float32)))[0])


def test_half_subnormals_print_as_they_are() -> None:
    """Mild: printed as 0, an underflow looks like a dead unit."""
    tiny = Tensor.full(Shape.of(1), 2.0**-24, DType.FP16)
    assert tiny.to_string().endswith("[5.96e-08]")


def test_integers_over_an_empty_range_are_refused() -> None:
    """Bad: low == high divides by zero, or returns low, depending on the library."""
    with pytest.raises(ValueRejected, match="low < high"):
        Tensor.uniform_int(Shape.of(4), 3, 3, seed=0)
    assert (Tensor.uniform_int(Shape.of(4), 3, 3, seed=0, dtype=DType.INT8).numpy() == 3).all()


@pytest.mark.parametrize("make", [ConstantLR, CosineAnnealingLR])
def test_first_warmup_epoch_is_not_trained_at_rate_zero(make: type[ConstantLR]) -> None:
    """Bad: stepping by epoch from a start rate of 0, the whole first epoch changes nothing and only costs time."""
    schedule = make().base_lr(1e-3).warmup(5).prepare(20, 300)
    assert schedule.lr(0, 0) == pytest.approx(2e-4)
    assert schedule.lr(4) == pytest.approx(1e-3)


def test_warmup_start_without_warmup_is_refused() -> None:
    """Mild: the option is accepted and never looked at."""
    with pytest.raises(ValueRejected, match="warmup is 0 epochs"):
        ConstantLR().warmup_start_factor(0.1).prepare(10, 10)


def test_nesterov_without_momentum_is_refused() -> None:
    """Mild: silently becomes plain SGD."""
    with pytest.raises(ValueRejected, match="nesterov"):
        SGD().momentum(0).nesterov().config()


def test_weight_decay_of_plain_sgd_is_kept() -> None:
    """Bad: upstream allocates no decay scalar for plain SGD, so the option does nothing (A10)."""
    assert SGD().momentum(0).weight_decay(1e-4).config().weight_decay == 1e-4


def test_smoothing_of_one_half_is_a_legal_value() -> None:
    """Mild: documented as below 1, refused above 0.2."""
    assert CrossEntropyLoss().label_smoothing(0.5).config().label_smoothing == 0.5


def test_loss_of_a_confident_mistake_is_not_bounded() -> None:
    """Bad: a guard of 1e-8 inside the logarithm caps the loss at 18.4 and flattens its gradient (A20)."""
    assert reference_cross_entropy([[100.0, 0.0]], [1])[0] == pytest.approx(100.0)


def test_short_batch_is_averaged_over_its_real_rows() -> None:
    """Bad: dividing by the padded size makes the tail of every epoch count less (A12)."""
    z = np.array([[2.0, 0.0], [0.0, 0.0]])
    assert reference_cross_entropy(z, [0, -1])[0] == reference_cross_entropy(z[:1], [0])[0]


def test_asking_for_a_gpu_never_trains_on_the_cpu() -> None:
    """Very bad: an error in the GPU list is caught and the run goes on, a hundred times slower (A18)."""
    with GLOBAL_SETTING.scoped():
        for gpus in ("0", "x"):
            with pytest.raises((DeviceError, ValueRejected)):
                GLOBAL_SETTING.use_gpu(gpus)
        assert GLOBAL_SETTING.device is None


def test_true_is_not_a_batch_size() -> None:
    """Mild: bool is an int in Python, so local_batch_size(True) would train sample by sample."""
    with GLOBAL_SETTING.scoped(), pytest.raises(ValueRejected, match="local_batch_size is True"):
        GLOBAL_SETTING.local_batch_size(True)


def test_one_scope_does_not_leak_into_the_next() -> None:
    """Bad: process-global settings make the second experiment of a notebook run with those of the first (C1)."""
    with GLOBAL_SETTING.scoped():
        GLOBAL_SETTING.manual_seed(1).amp(True)
    with GLOBAL_SETTING.scoped():
        assert (GLOBAL_SETTING.snapshot().seed, GLOBAL_SETTING.snapshot().amp) == (0, False)


def test_normalisation_presets_go_by_name() -> None:
    """Bad: upstream has two enumerations with the same names in another order; mapping by number normalises MNIST with
    the constants of MLPerf."""
    assert Normalization.preset(NormMode.MNIST, 1).mean == (0.1307,)
    assert [int(NormMode[n]) for n in ("NO_NORM", "MLPERF", "IMAGENET", "MNIST", "CIFAR")] == [0, 1, 2, 3, 4]


def test_weights_do_not_depend_on_what_was_drawn_before() -> None:
    """Bad: with a stateful generator, one more layer or variant changes the start of every later one (A15)."""
    config, shape = InitConfig(InitKind.KAIMING_UNIFORM), Shape(10, 1, 1, 20)
    alone = fill_parameter(config, shape, seed=1, stream_id=6)
    for ordinal in range(6):
        fill_parameter(config, shape, seed=1, stream_id=ordinal)
    assert np.array_equal(alone, fill_parameter(config, shape, seed=1, stream_id=6))
