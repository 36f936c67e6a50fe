"""PREPROCESSOR_SETTING: what commit accepts, what it refuses by name, what it freezes (spec/data 6.1 to 6.3)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from renaissance.core.enums import DatasetType, NormMode
from renaissance.core.errors import MissingFileError, ValueRejected
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.data.preprocessor import PREPROCESSOR_SETTING, PreprocessorSetting
from renaissance.data.recipe import Normalization
from renaissance.data.transforms import Pad, RandomCrop, RandomErasing, RandomRotation, RandomScale


@pytest.fixture(name="setting")
def fresh() -> Iterator[PreprocessorSetting]:
    with GLOBAL_SETTING.scoped(), PREPROCESSOR_SETTING.scoped():
        GLOBAL_SETTING.use_cpu().input_resolution(28)
        yield PREPROCESSOR_SETTING


def test_the_chain_of_the_example_commits(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("MNIST", tmp_path).preprocess_workers(2).normalization(NormMode.MNIST).train_transforms(
        Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5)
    ).commit()
    c = setting.config
    assert (c.dataset, c.folder, c.format) == ("mnist", tmp_path, "auto")
    assert (c.preprocess_workers, c.load_workers, c.ring_depth) == (2, 1, 4)
    assert (c.shuffle_train, c.drop_last) == (True, False)
    assert [t.name for t in c.train_recipe.transforms][:2] == ["Pad", "RandomCrop"]
    assert c.val_recipe.transforms == ()
    assert c.train_recipe.normalization == c.val_recipe.normalization == Normalization((0.1307,), (0.3081,), "MNIST")
    assert c.train_recipe.resolution == c.val_recipe.resolution == 28


def test_commit_pushes_the_facts_of_the_data_set(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).commit()
    s = GLOBAL_SETTING.snapshot()
    assert (s.dataset_type, s.num_classes, s.color_channels) == (DatasetType.MNIST, 10, 1)


def test_every_option_reaches_the_configuration(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).using_dts_format(False).shuffle_train(False).drop_last(True).ring_depth(2)
    setting.load_workers(1).normalization([0.5], [0.25]).val_transforms(Pad(0)).commit()
    c = setting.config
    assert (c.format, c.shuffle_train, c.drop_last, c.ring_depth) == ("raw", False, True, 2)
    assert c.preprocess_workers is None
    assert c.val_recipe.normalization == Normalization((0.5,), (0.25,))
    assert len(c.val_recipe.transforms) == 1


def test_settings_are_set_once(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).dataset("MNIST", tmp_path).drop_last(False).drop_last(False)
    with pytest.raises(ValueRejected, match="dataset is already 'mnist' and cannot become 'cifar10'"):
        setting.dataset("cifar10", tmp_path)
    with pytest.raises(ValueRejected, match="drop_last is already False and cannot become True"):
        setting.drop_last(True)
    setting.train_transforms(Pad(2), RandomCrop(28)).train_transforms(Pad(2), RandomCrop(28))
    with pytest.raises(ValueRejected, match="train_transforms is already"):
        setting.train_transforms(Pad(4), RandomCrop(28))


def test_commit_is_idempotent_and_closes_the_builder(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).commit()
    first = setting.config
    assert setting.commit().config == first
    setting.dataset("mnist", tmp_path)
    with pytest.raises(ValueRejected, match=r"ring_depth cannot be set to 8 after commit\(\)"):
        setting.ring_depth(8)
    setting.reset()
    assert not setting.committed
    setting.ring_depth(8)


def test_config_before_commit_says_what_to_do(setting: PreprocessorSetting) -> None:
    with pytest.raises(ValueRejected, match="nothing is committed yet"):
        _ = setting.config


def test_commit_names_what_is_missing(setting: PreprocessorSetting, tmp_path: Path) -> None:
    with pytest.raises(ValueRejected, match="no data set is chosen"):
        setting.commit()
    setting.dataset("mnist", tmp_path / "absent")
    with pytest.raises(MissingFileError, match="absent: no such folder"):
        setting.commit()
    setting.reset()
    setting.dataset("mnist", tmp_path).using_dts_format(True)
    with pytest.raises(MissingFileError, match="renaissance pack mnist"):
        setting.commit()


def test_commit_needs_both_resolutions(setting: PreprocessorSetting, tmp_path: Path) -> None:
    with GLOBAL_SETTING.scoped():
        GLOBAL_SETTING.train_resolution(28)
        with pytest.raises(ValueRejected, match="val_resolution is not set"):
            setting.dataset("mnist", tmp_path).commit()


def test_a_refused_commit_leaves_nothing_behind(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).val_transforms(RandomRotation(10))
    with pytest.raises(ValueRejected, match=r"val_transforms: .*RandomRotation"):
        setting.commit()
    assert not setting.committed
    assert GLOBAL_SETTING.snapshot().dataset_type is DatasetType.NONE


@pytest.mark.parametrize(
    ("transforms", "named"),
    [
        ((Pad(2),), "32"),
        ((RandomCrop(28), Pad(2)), "Pad|32"),
        ((Pad,), "not a transform"),
        (("Pad",), "not a transform"),
    ],
)
def test_impossible_training_chains_are_refused_by_name(
    setting: PreprocessorSetting, tmp_path: Path, transforms: tuple[object, ...], named: str
) -> None:
    setting.dataset("mnist", tmp_path).train_transforms(*transforms)  # type: ignore[arg-type]
    with pytest.raises(ValueRejected, match=f"train_transforms: .*({named})"):
        setting.commit()


def test_normalization_must_fit_the_channels(setting: PreprocessorSetting, tmp_path: Path) -> None:
    setting.dataset("mnist", tmp_path).normalization(NormMode.CIFAR)
    with pytest.raises(ValueRejected, match="CIFAR has constants for 3 channel"):
        setting.commit()
    setting.reset()
    with pytest.raises(ValueRejected, match="expected a NormMode"):
        setting.normalization([0.5])
    with pytest.raises(ValueRejected, match="drop one"):
        setting.normalization(NormMode.MNIST, [0.5])


def test_bad_data_sets_are_refused_at_once(setting: PreprocessorSetting, tmp_path: Path) -> None:
    with pytest.raises(ValueRejected, match="unknown data set 'mnits'; expected one of: mnist"):
        setting.dataset("mnits", tmp_path)
    for name, path in (("", tmp_path), ("mnist", "")):
        with pytest.raises(ValueRejected, match="expected text"):
            setting.dataset(name, path)
    with pytest.raises(ValueRejected, match="'imagenet' is known, but this version cannot read it"):
        setting.dataset("imagenet", tmp_path).commit()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preprocess_workers", 0),
        ("preprocess_workers", 129),
        ("preprocess_workers", 2.0),
        ("load_workers", 2),
        ("load_workers", 0),
        ("ring_depth", 1),
        ("ring_depth", 3),
        ("ring_depth", 66),
        ("drop_last", 1),
        ("shuffle_train", "yes"),
        ("using_dts_format", None),
    ],
)
def test_bad_values_are_refused_by_name(setting: PreprocessorSetting, name: str, value: object) -> None:
    with pytest.raises(ValueRejected, match=name):
        getattr(setting, name)(value)


def test_options_that_nothing_implements_do_not_exist(setting: PreprocessorSetting) -> None:
    for name in ("sdmp_factor", "using_cpvs", "download", "fully_mode", "partial_mode", "cpu_binding"):
        assert not hasattr(setting, name)


def test_configuration_writes_as_json(setting: PreprocessorSetting, tmp_path: Path) -> None:
    config = setting.dataset("mnist", tmp_path).train_transforms(Pad(2), RandomCrop(28)).commit().config
    plain = json.loads(json.dumps(config.to_json()))
    assert plain["dataset"] == "mnist"
    assert plain["train_recipe_fingerprint"] == config.train_recipe.fingerprint()
    assert plain["train_recipe_fingerprint"] != plain["val_recipe_fingerprint"]
