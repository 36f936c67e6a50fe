"""Members and numbers of the shared enumerations: files and kernels depend on them (spec/framework 1.2)."""

from enum import IntEnum, IntFlag

import pytest

from renaissance.core import enums

IN_ORDER = {
    "Phase": "PLANNING MEMORY_LOCKED COMPILED",
    "StreamKind": "TRANS COMP_1 COMP_2 COMP_3 UPDATE",
    "OptimizerKind": "SGD SGD_MOMENTUM SGD_NESTEROV LARS LARS_NESTEROV ADAM ADAMW",
    "DatasetType": "NONE IMAGENET MNIST CIFAR_10 CIFAR_100",
    "NormMode": "NO_NORM MLPERF IMAGENET MNIST CIFAR",
    "InitKind": "NONE ZEROS CONSTANTS KAIMING_NORMAL KAIMING_UNIFORM XAVIER_NORMAL XAVIER_UNIFORM TRUNC_NORMAL "
    "FIXED_NORMAL STANDARD ZERO_GAMMA",
    "FanMode": "FAN_IN FAN_OUT FAN_AVG",
    "TTA": "DISABLED LR SHIFT_1PX",
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_members_count_from_zero_in_this_order(name: str) -> None:
    enum: type[IntEnum] = getattr(enums, name)
    assert [(m.name, int(m)) for m in enum] == [(n, i) for i, n in enumerate(IN_ORDER[name].split())]


def test_bit_masks() -> None:
    assert {m.name: int(m) for m in enums.Metric.__members__.values()} == {
        "NONE": 0,
        "TRAIN_LOSS": 1,
        "VAL_LOSS": 2,
        "VAL_TOP1": 4,
        "VAL_TOP5": 8,
        "EMA_TOP1": 16,
        "EMA_TOP5": 32,
        "EMA_LOSS": 64,
    }
    assert {m.name: int(m) for m in enums.CompileInfo.__members__.values()} == {
        "NONE": 0,
        "ARCH_PLAN": 1,
        "MEMORY_PLAN": 2,
        "TRAIN_GRAPH": 4,
        "INFER_GRAPH": 8,
        "ALL": 15,
    }


def test_every_shared_enumeration_is_counted_here() -> None:
    defined = {n for n, e in vars(enums).items() if isinstance(e, type) and issubclass(e, IntEnum | IntFlag)}
    assert defined - {"IntEnum", "IntFlag"} == {*IN_ORDER, "Metric", "CompileInfo"}
