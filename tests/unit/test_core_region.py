"""The 68 regions: count, order, series, element types, spans (spec/framework 1.5)."""

import pytest

from renaissance.core import region
from renaissance.core.dtype import DType
from renaissance.core.region import Region, Span, align

ORDER_TEXT = """
B_PREV_MEAN B_PREV_VAR B_NEXT_MEAN B_NEXT_VAR
W_EQ_BIAS W_EQ_SCALE W_BN_BIAS W_BN_WEIGHT W_FC_BIAS W_FC_WEIGHT W_FIRST_CONV W_DEEP_CONV
E_BN_BIAS E_BN_WEIGHT E_FC_BIAS E_FC_WEIGHT E_FIRST_CONV E_DEEP_CONV
E_FC_WEIGHT_FP16 E_FIRST_CONV_FP16 E_DEEP_CONV_FP16
A_FC_WEIGHT A_FIRST_CONV A_DEEP_CONV
G_BN_BIAS G_BN_WEIGHT G_FC_BIAS G_FC_WEIGHT G_FIRST_CONV G_DEEP_CONV R_RESULT
G_FC_WEIGHT_FP16 G_FIRST_CONV_FP16 G_DEEP_CONV_FP16
M_BN_BIAS M_BN_WEIGHT M_FC_BIAS M_FC_WEIGHT M_FIRST_CONV M_DEEP_CONV
V_BN_BIAS V_BN_WEIGHT V_FC_BIAS V_FC_WEIGHT V_FIRST_CONV V_DEEP_CONV
N_FC_WEIGHT N_FIRST_CONV N_DEEP_CONV
I_A_LABEL I_A_DATA I_B_LABEL I_B_DATA
F_FEATURE_FP32 F_GRAD_SLOT_FP32 F_FEATURE_FP16 F_GRAD_SLOT_FP16
S_SCALAR_FP32 S_SCALAR_FP16 S_SCALAR_INT32 S_SCALAR_INT8 S_MASK
T_TEMP_FP32 T_TEMP_FP16 T_TEMP_INT32 T_TEMP_INT8
R_PREDICTED_LABEL R_RESULT_ACCUMULATED
"""
ORDER = ORDER_TEXT.split()


def test_sixty_eight_regions_in_address_order() -> None:
    assert len(ORDER) == 68
    assert [(r.name, int(r)) for r in Region] == [(name, i) for i, name in enumerate(ORDER)]


def test_series_is_the_letter_of_the_name() -> None:
    counts = [(letter, sum(r.series == letter for r in Region)) for letter in "BWEAGMVNIFSTR"]
    assert counts == list(zip("BWEAGMVNIFSTR", (4, 8, 9, 3, 9, 6, 6, 3, 4, 4, 5, 4, 3), strict=True))
    assert sum(count for _, count in counts) == 68


@pytest.mark.parametrize("half", [None, DType.FP16, DType.BF16])
def test_element_types_follow_the_profile(half: DType | None) -> None:
    for r in Region:
        got = r.dtype(half)
        if r in (Region.I_A_DATA, Region.I_B_DATA):
            assert got is (half or DType.FP32)
        elif r.name.endswith("_FP16") or r.series == "A":
            assert got is (half or DType.FP16)
        elif "LABEL" in r.name or r.name.endswith("_INT32"):
            assert got is DType.INT32
        elif r.name.endswith("_INT8") or r is Region.S_MASK:
            assert got is DType.INT8
        else:
            assert got is DType.FP32


def test_spans_cover_what_bulk_operations_need() -> None:
    assert [str(r.name) for r in region.BUCKET_DEEP.regions] == ["G_DEEP_CONV", "R_RESULT"]
    assert [r.name for r in region.BUCKET_FIRST.regions] == ORDER[24:29]
    assert [r.name for r in region.NAN_SPAN.regions] == ORDER[24:30]
    assert [r.name for r in region.ZERO_GRAD_SPAN.regions] == ORDER[24:34]
    assert [r.name for r in region.WEIGHT_SPAN.regions] == ["W_FC_WEIGHT", "W_FIRST_CONV", "W_DEEP_CONV"]
    assert [r.name for r in region.BIAS_SPAN.regions] == ["W_BN_BIAS", "W_BN_WEIGHT", "W_FC_BIAS"]
    assert [r.name for r in region.HALF_WEIGHT_SPAN.regions] == ["A_FC_WEIGHT", "A_FIRST_CONV", "A_DEEP_CONV"]


@pytest.mark.parametrize(("of", "names"), [("G", 6), ("M", 6), ("V", 6)])
def test_gradients_and_moments_lie_in_the_order_of_their_weights(of: str, names: int) -> None:
    weights = [r.name[2:] for r in Region if r.series == "W" and "_EQ_" not in r.name]
    assert [r.name[2:] for r in Region if r.series == of][:names] == weights


def test_backward_span_is_refused_and_text_is_short() -> None:
    with pytest.raises(ValueError, match=r"W_DEEP_CONV\.\.W_FC_BIAS runs backwards"):
        Span(Region.W_DEEP_CONV, Region.W_FC_BIAS)
    assert str(Span(Region.R_RESULT, Region.R_RESULT)) == "R_RESULT"
    assert str(region.BUCKET_DEEP) == "G_DEEP_CONV..R_RESULT"


@pytest.mark.parametrize(
    ("value", "alignment", "up"), [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512), (5, 4, 8)]
)
def test_align_rounds_up(value: int, alignment: int, up: int) -> None:
    assert align(value, alignment) == up
