"""The slot rule and placement of tensor descriptors (spec/framework 2.3)."""

import pytest

from renaissance.core.dtype import DType
from renaissance.core.errors import MemoryPlanError
from renaissance.core.region import Region
from renaissance.core.shape import Shape
from renaissance.tensor.dtensor import UNPLACED, DTensor, slot_bytes

TEMP = Region.T_TEMP_FP32


@pytest.mark.parametrize(
    ("elements", "fp32", "fp16", "int8"),
    [(1, 512, 256, 256), (121, 1024, 512, 256), (256, 1536, 768, 512), (802816, 3211776, 1605888, 803072)],
)
def test_slot_table_of_the_spec(elements: int, fp32: int, fp16: int, int8: int) -> None:
    shape = Shape.of(elements)
    assert [slot_bytes(shape, d) for d in (DType.FP32, DType.INT32)] == [fp32, fp32]
    assert [slot_bytes(shape, d) for d in (DType.FP16, DType.BF16)] == [fp16, fp16]
    assert [slot_bytes(shape, d) for d in (DType.INT8, DType.UINT8)] == [int8, int8]


@pytest.mark.parametrize("elements", [1, 120, 121, 248, 249, 1000, 4097])
def test_master_slot_is_twice_its_half_slot_and_has_spare_bytes(elements: int) -> None:
    shape = Shape.of(elements)
    full, half = slot_bytes(shape, DType.FP32), slot_bytes(shape, DType.BF16)
    assert full == 2 * half
    assert half >= 2 * elements + 16
    assert half % 256 == 0


def test_descriptor_of_a_compact_tensor() -> None:
    d = DTensor.make(7, "x", Shape(2, 5, 4, 3), DType.BF16, Region.I_A_DATA)
    assert d.nbytes == 240
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
