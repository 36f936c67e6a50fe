"""The slot rule, channel alignment and placement of tensor descriptors (spec/framework 2.3)."""

import pytest

from renaissance.core.dtype import DType
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor.dtensor import UNPLACED, DTensor, channel_alignment, slot_bytes

TEMP = Region.T_TEMP_FP32


@pytest.mark.parametrize(
    ("elements", "fp32", "fp16", "int8"),
    [(1, 512, 256, 256), (121, 1024, 512, 256), (256, 1536, 768, 512), (802816, 3211776, 1605888, 803072)],
)
def test_slot_table_of_the_spec(elements: int, fp32: int, fp16: int, int8: int) -> None:
    shape = Shape.of(elements)
    assert [slot_bytes(shape, d, TEMP) for d in (DType.FP32, DType.INT32)] == [fp32, fp32]
    assert [slot_bytes(shape, d, TEMP) for d in (DType.FP16, DType.BF16)] == [fp16, fp16]
    assert [slot_bytes(shape, d, TEMP) for d in (DType.INT8, DType.UINT8)] == [int8, int8]


@pytest.mark.parametrize("elements", [1, 120, 121, 248, 249, 1000, 4097])
def test_master_slot_is_twice_its_half_slot_and_has_spare_bytes(elements: int) -> None:
    shape = Shape.of(elements)
    full, half = slot_bytes(shape, DType.FP32, Region.W_FC_WEIGHT), slot_bytes(shape, DType.BF16, Region.A_FC_WEIGHT)
    assert full == 2 * half
    assert half >= 2 * elements + 16
    assert half % 256 == 0


def test_every_region_is_compact_on_the_cpu() -> None:
    assert {channel_alignment(d, r) for d in DType for r in Region} == {1}


def test_gpu_column_pads_inputs_features_and_masks_only() -> None:
    padded = {(d, r): a for d in DType for r in Region if (a := channel_alignment(d, r, "cuda")) != 1}
    halves = (DType.FP16, DType.BF16)
    assert padded == {
        **{(d, r): 4 for d in halves for r in (Region.I_A_DATA, Region.I_B_DATA)},
        **{(d, r): 8 for d in halves for r in (Region.F_FEATURE_FP16, Region.F_GRAD_SLOT_FP16)},
        (DType.INT8, Region.S_MASK): 8,
    }


def test_padded_descriptor_has_padded_strides_and_bytes() -> None:
    d = DTensor.make(0, "x", Shape(2, 5, 4, 3), DType.FP16, Region.I_A_DATA, backend="cuda")
    assert (d.padded_c, d.is_compact) == (4, False)
    assert d.strides == (80, 16, 4, 1)
    assert d.host_strides == (60, 12, 3, 1)
    assert (d.nbytes, d.padded_bytes) == (240, 320)
    assert d.slot_bytes == 512


def test_compact_descriptor_on_the_cpu() -> None:
    d = DTensor.make(7, "x", Shape(2, 5, 4, 3), DType.BF16, Region.I_A_DATA)
    assert d.is_compact
    assert d.strides == d.host_strides == (60, 12, 3, 1)
    assert d.nbytes == d.padded_bytes == 240
    assert str(d) == "#7 x [2,5,4,3] BF16 I_A_DATA unplaced +256"


def test_placement_gives_an_end_and_keeps_everything_else() -> None:
    d = DTensor.make(1, "w", Shape(10, 1, 1, 256), DType.FP32, Region.W_FC_WEIGHT)
    assert (d.offset, d.placed) == (UNPLACED, False)
    with pytest.raises(MemoryPlanError, match="'w' has no offset"):
        _ = d.end
    placed = d.at(512)
    assert placed.end == 512 + d.slot_bytes
    assert (placed.id, placed.shape, placed.slot_bytes) == (d.id, d.shape, d.slot_bytes)


def test_larger_slot_is_accepted_smaller_or_odd_is_not() -> None:
    assert DTensor(0, "x", Shape.of(1), DType.FP32, TEMP, 1024).slot_bytes == 1024
    for slot in (0, 256, 600):
        with pytest.raises(MemoryPlanError, match=f"'x'.*slot of {slot} bytes.*at least 512"):
            DTensor(0, "x", Shape.of(1), DType.FP32, TEMP, slot)


@pytest.mark.parametrize("offset", [-2, 100, 255])
def test_bad_offset_is_rejected(offset: int) -> None:
    with pytest.raises(MemoryPlanError, match="offset"):
        DTensor.make(0, "x", Shape.of(1), DType.FP32, TEMP).at(offset)
