"""Global settings: write-once, scopes, validation, and the snapshot a task works from (spec/framework 1.6)."""

import json
import logging
from collections.abc import Iterator

import pytest

from renaissance.core import gpus
from renaissance.core.dtype import DType
from renaissance.core.enums import DatasetType
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.gpus import Gpu
from renaissance.core.settings import (
    GLOBAL_SETTING,
    GlobalSetting,
    TrainResolution,
    parse_gpus,
    per_rank_batch,
)


@pytest.fixture(name="setting")
def fresh() -> Iterator[GlobalSetting]:
    with GLOBAL_SETTING.scoped():
        yield GLOBAL_SETTING


def test_the_chain_of_the_example_sets_everything(setting: GlobalSetting) -> None:
    s = setting.use_cpu().amp(True).manual_seed(123).global_batch_size(200).input_resolution(28).snapshot()
    assert (s.device, s.world_size, s.seed, s.amp) == ("cpu", 1, 123, True)
    assert (s.local_batch_size, s.global_batch_size) == (200, 200)
    assert s.train_resolution == TrainResolution(28, 28)
    assert (s.val_resolution, s.compute_threads) == (28, None)


def test_defaults_of_an_untouched_registry(setting: GlobalSetting) -> None:
    s = setting.snapshot()
    assert (s.device, s.world_size, s.seed, s.amp, s.dataset_type) == (None, 1, 0, False, DatasetType.NONE)
    unset = (s.local_batch_size, s.global_batch_size, s.train_resolution, s.val_resolution, s.num_classes)
    assert unset == (None,) * 5


def test_same_value_again_is_fine_another_names_both(setting: GlobalSetting) -> None:
    setting.amp(True).amp(True)
    with pytest.raises(ValueRejected, match="amp is already True and cannot become False"):
        setting.amp(False)
    setting.manual_seed(1)
    with pytest.raises(ValueRejected, match="seed is already 1 and cannot become 2"):
        setting.manual_seed(2)
    setting.val_resolution(24)
    with pytest.raises(ValueRejected, match="val_resolution is already 24 and cannot become 28"):
        setting.input_resolution(28)
    assert setting.snapshot().train_resolution is None, "a refused setter must not store half of its values"


def test_batch_size_by_either_name_is_one_setting(setting: GlobalSetting) -> None:
    setting.use_cpu().local_batch_size(64).global_batch_size(64)
    with pytest.raises(ValueRejected, match="already 64 and cannot become 128"):
        setting.global_batch_size(128)


def test_reset_forgets_values_and_lock(setting: GlobalSetting) -> None:
    setting.manual_seed(1).lock("compile()")
    setting.reset()
    assert setting.manual_seed(2).snapshot().seed == 2


def test_scopes_start_fresh_nest_and_restore_after_errors(setting: GlobalSetting) -> None:
    def fail_inside() -> None:
        with setting.scoped():
            assert setting.snapshot().seed == 0
            with setting.scoped():
                setting.manual_seed(3)
            setting.manual_seed(2)
            raise RuntimeError("planted")

    setting.manual_seed(1)
    with pytest.raises(RuntimeError, match="planted"):
        fail_inside()
    assert setting.snapshot().seed == 1


def test_a_locked_registry_accepts_only_what_it_already_holds(setting: GlobalSetting) -> None:
    setting.amp(True).lock("DeepLearningTask.compile()")
    setting.amp(True)
    with pytest.raises(ValueRejected, match=r"seed cannot be set to 5 after DeepLearningTask\.compile\(\)"):
        setting.manual_seed(5)


def test_global_batch_size_needs_a_device_first(setting: GlobalSetting) -> None:
    with pytest.raises(DeviceError, match="call use_cpu"):
        setting.global_batch_size(200)


def test_global_batch_is_shared_evenly_or_refused() -> None:
    assert per_rank_batch(200, 4) == 50
    with pytest.raises(ValueRejected, match=r"is 201, which 4 ranks cannot share evenly.*200 or 204"):
        per_rank_batch(201, 4)
    with pytest.raises(ValueRejected, match=r"such as 4$"):
        per_rank_batch(3, 4)


@pytest.mark.parametrize("value", [0, -1, 2**31, True, 2.0, "8", None])
@pytest.mark.parametrize("name", ["local_batch_size", "global_batch_size", "val_resolution", "input_resolution"])
def test_sizes_must_be_positive_whole_numbers(setting: GlobalSetting, name: str, value: object) -> None:
    with pytest.raises(ValueRejected, match=name):
        getattr(setting.use_cpu(), name)(value)


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.5])
def test_seed_is_an_unsigned_64_bit_number(setting: GlobalSetting, value: object) -> None:
    with pytest.raises(ValueRejected, match="manual_seed"):
        setting.manual_seed(value)  # type: ignore[arg-type]
    assert setting.manual_seed(2**64 - 1).snapshot().seed == 2**64 - 1


def test_auto_seed_logs_the_seed_it_took(setting: GlobalSetting, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "renaissance.settings"):
        seed = setting.auto_seed().snapshot().seed
    assert str(seed) in caplog.text
    with pytest.raises(ValueRejected, match="seed is already"):
        setting.manual_seed(seed ^ 1)


@pytest.mark.parametrize("value", [1, "float16", None, ["bf16"]])
def test_amp_takes_a_boolean_or_the_name_of_a_type(setting: GlobalSetting, value: object) -> None:
    with pytest.raises(ValueRejected, match=r"amp is .*; expected True, False, 'fp16' or 'bf16'"):
        setting.amp(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "amp", "half"),
    [
        ("cpu", True, DType.BF16),
        ("cpu", "bf16", DType.BF16),
        ("cpu", False, None),
        ("cuda", True, DType.FP16),
        ("cuda", "bf16", DType.BF16),
        ("cuda", "fp16", DType.FP16),
        ("cuda", False, None),
    ],
)
def test_amp_is_fp16_on_a_gpu_and_bf16_on_the_cpu_unless_it_is_named(
    setting: GlobalSetting, device: str, amp: bool | str, half: DType | None
) -> None:
    for device_first in (True, False):
        setting.reset()
        steps = [lambda: setting.use_cpu() if device == "cpu" else setting.use_gpu("0", present=False)]
        steps.insert(len(steps) if device_first else 0, lambda: setting.amp(amp))
        for step in steps:
            step()
        snapshot = setting.snapshot()
        assert (snapshot.amp, snapshot.half) == (amp is not False, half)
        assert snapshot.to_json()["half"] == (None if half is None else half.name.lower())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("amp", "fp16", "amp is 'fp16', but the CPU has kernels for bf16 only"), ("tf32", True, "the CPU has no TF32")],
)
def test_what_only_a_gpu_can_is_refused_on_the_cpu_in_either_order(
    setting: GlobalSetting, name: str, value: object, why: str
) -> None:
    getattr(setting, name)(value)
    with pytest.raises(ValueRejected, match=why):
        setting.use_cpu()
    assert setting.device is None
    assert setting.use_gpu("0", present=False).device == "cuda"
    setting.reset()
    with pytest.raises(ValueRejected, match=why):
        getattr(setting.use_cpu(), name)(value)
    setting.tf32(False)


def test_tf32_and_amp_cannot_both_act(setting: GlobalSetting) -> None:
    setting.use_gpu("0", present=False).tf32(True).amp(False)
    for first, second in (("amp", "tf32"), ("tf32", "amp")):
        setting.reset()
        getattr(setting, first)(True)
        with pytest.raises(ValueRejected, match=r"tf32 is True and amp is True, .* with amp all of them take 16 bit"):
            getattr(setting, second)(True)


@pytest.mark.parametrize("wrong", [0, [0, 1], True, b"0", ("0",)])
def test_gpus_are_named_by_text(setting: GlobalSetting, wrong: object) -> None:
    with pytest.raises(ValueRejected, match=r'use_gpu is .* \(\w+\); expected text, such as "0", "0,1" or "0-3"'):
        setting.use_gpu(wrong)  # type: ignore[arg-type]


def test_gpus_that_are_there_become_the_ranks_of_the_run(
    setting: GlobalSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: tuple(Gpu(i, "H200", (9, 0)) for i in range(4)))
    for wanted, ids in ((None, (0, 1, 2, 3)), ("all", (0, 1, 2, 3)), ("2", (2,)), ("1,3", (1, 3))):
        setting.reset()
        snapshot = setting.use_gpu(wanted).global_batch_size(64).snapshot()
        assert (snapshot.device, snapshot.gpus, snapshot.world_size) == ("cuda", ids, len(ids))
        assert snapshot.local_batch_size == 64 // len(ids)
    with pytest.raises(ValueRejected, match="device is already 'cuda' and cannot become 'cpu'"):
        setting.use_cpu()


@pytest.mark.parametrize(
    ("there", "wanted", "why"),
    [
        (0, None, "0 GPUs are visible, a run takes 1, 2, 4 or 8"),
        (
            3,
            None,
            r'3 GPUs are visible.*name those to use, such as use_gpu\("0"\).*0 \(GPU 0\), 1 \(GPU 1\), 2 \(GPU 2\)',
        ),
        (2, "0-3", r"GPU 0, 1, 2, 3 asked for, but there is no GPU 2, 3; visible: 0 \(GPU 0\), 1 \(GPU 1\)"),
        (1, "7", "there is no GPU 7.*CUDA_VISIBLE_DEVICES decides"),
        (2, "1", r"GPU 1 \(GPU 1\) has compute capability 7.0; expected at least 7.5"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error_that_says_why(
    setting: GlobalSetting, monkeypatch: pytest.MonkeyPatch, there: int, wanted: str | None, why: str
) -> None:
    found = tuple(Gpu(i, f"GPU {i}", (7, 0 if i == 1 else 5)) for i in range(there))
    monkeypatch.setattr(gpus, "visible_gpus", lambda: found)
    with pytest.raises(DeviceError, match=f"use_gpu: .*{why}.*; to train on the CPU, call use_cpu"):
        setting.use_gpu(wanted)
    assert setting.device is None


def test_a_run_for_gpus_that_are_elsewhere_can_be_planned(setting: GlobalSetting) -> None:
    with pytest.raises(ValueRejected, match="name them"):
        setting.use_gpu(present=False)
    assert setting.use_gpu("0-7", present=False).snapshot().world_size == 8


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0", (0,)), ("0,1", (0, 1)), ("0-3", (0, 1, 2, 3)), ("3, 1,1", (1, 3)), ("0-1,6-7", (0, 1, 6, 7))],
)
def test_gpu_lists_that_can_be_read(text: str, ids: tuple[int, ...]) -> None:
    assert parse_gpus(text) == ids


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "3-1", "0-2", "0-15", "0;1", "1.0", "0--3", "٣"])
def test_gpu_lists_that_cannot_be_read_are_refused(setting: GlobalSetting, text: str) -> None:
    with pytest.raises(ValueRejected, match="use_gpu"):
        setting.use_gpu(text)


def test_progressive_resolution_is_two_sizes_and_the_epochs_of_the_first(setting: GlobalSetting) -> None:
    progressive = setting.train_resolution((0, 20), (3, 28)).snapshot().train_resolution
    assert progressive == TrainResolution(20, 28, 3)
    with pytest.raises(ValueRejected, match=r"already \(0, 20\), \(3, 28\) and cannot become 28"):
        setting.train_resolution(28)
    setting.reset()
    assert setting.train_resolution((0, 28), (3, 28)).snapshot().train_resolution == TrainResolution(28, 28)


def test_resolution_of_an_epoch() -> None:
    r = TrainResolution(20, 28, 3)
    assert [r.at(e) for e in range(5)] == [20, 20, 20, 28, 28]
    assert (r.progressive, TrainResolution(28, 28).progressive) == (True, False)


@pytest.mark.parametrize(
    "args", [((1, 20), (3, 28)), ((0, 20), (0, 28)), ((0, 0), (3, 28)), ((0, 20), (3, -1)), ((0, 20),), (20, (3, 28))]
)
def test_impossible_progressive_forms_are_refused(setting: GlobalSetting, args: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueRejected, match="train_resolution"):
        setting.train_resolution(*args)


def test_dataset_facts_are_set_once_like_everything_else(setting: GlobalSetting) -> None:
    s = setting.dataset_facts(DatasetType.MNIST, 10, 1).snapshot()
    assert (s.dataset_type, s.num_classes, s.color_channels) == (DatasetType.MNIST, 10, 1)
    with pytest.raises(ValueRejected, match="num_classes is already 10 and cannot become 100"):
        setting.dataset_facts(DatasetType.MNIST, 100, 1)
    with pytest.raises(ValueRejected, match="color_channels is 2"):
        setting.dataset_facts(DatasetType.MNIST, 10, 2)


def test_snapshot_is_frozen_and_writes_as_json(setting: GlobalSetting) -> None:
    snapshot = setting.use_cpu().manual_seed(7).input_resolution(28).dataset_facts(DatasetType.MNIST, 10, 1).snapshot()
    with pytest.raises(AttributeError):
        snapshot.seed = 8  # type: ignore[misc]
    plain = json.loads(json.dumps(snapshot.to_json()))
    assert plain["seed"] == 7
    assert plain["dataset_type"] == "MNIST"
    assert plain["train_resolution"] == {"begin": 28, "end": 28, "boundary_epoch": None}


def test_unknown_options_do_not_exist(setting: GlobalSetting) -> None:
    for name in ("use_tf32", "sdmp_factor", "reproducible"):
        assert not hasattr(setting, name)
