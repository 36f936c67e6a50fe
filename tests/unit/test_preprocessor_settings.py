"""PREPROCESSOR_SETTING: what commit accepts, what it refuses by name, what it freezes (spec/data 6.1 to 6.3)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_builders import packed

from renaissance.core.enums import DatasetType, NormMode
from renaissance.core.errors import FormatError, MissingFileError, ValueRejected
from renaissance.core.settings import GLOBAL_SETTING
from renaissance.data import download
from renaissance.data.download import Obtained
from renaissance.data.preprocessor import PREPROCESSOR_SETTING, CorruptPolicy, PreprocessorSetting
from renaissance.data.recipe import Normalization
from renaissance.data.resolution import ProgressiveResolution, SteppedResolution
from renaissance.data.transforms import (
    CenterCrop,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    Resize,
)


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
    with pytest.raises(ValueRejected, match=r"mean is 0.5 and std is 0.25; expected a number per channel"):
        setting.normalization(0.5, 0.25)  # type: ignore[arg-type]


def test_bad_data_sets_are_refused_at_once(setting: PreprocessorSetting, tmp_path: Path) -> None:
    with pytest.raises(ValueRejected, match="unknown data set 'mnits'; expected one of: mnist"):
        setting.dataset("mnits", tmp_path)
    for name, path in (("", tmp_path), ("mnist", ""), ("mnist", None), ("mnist", b"folder")):
        with pytest.raises(ValueRejected, match="expected text"):
            setting.dataset(name, path)


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
        ("load", "lazily"),
        ("read_ahead", 1000),
        ("read_ahead", 1 << 35),
        ("order", "random"),
        ("decode", "best"),
        ("on_corrupt", "skip"),
        ("download", "yes"),
        ("color_channels", 4),
        ("train_resolutions", 128),
        ("sdmp_factor", 0),
    ],
)
def test_bad_values_are_refused_by_name(setting: PreprocessorSetting, name: str, value: object) -> None:
    with pytest.raises(ValueRejected, match=name):
        getattr(setting, name)(value)


def test_options_that_nothing_implements_do_not_exist(setting: PreprocessorSetting) -> None:
    for name in ("max_intermediate_resolution", "cpu_binding"):
        assert not hasattr(setting, name)
    # Asking for what is done anyway is no error; for anything else there is a reason.
    setting.sdmp_factor(1).using_cpvs(False).load_workers(1)
    setting.reset()
    for option, value, reason in (
        ("sdmp_factor", 2, "would depend on where a run began"),
        ("using_cpvs", True, "are not kept"),
        ("load_workers", 4, r"read_ahead\(bytes\)"),
    ):
        with pytest.raises(ValueRejected, match=reason):
            getattr(setting, option)(value)


def tree(folder: Path, train: dict[str, int], val: dict[str, int]) -> Path:
    """An ImageNet folder tree with so many (unreadable) pictures in each class."""
    for split, classes in (("train", train), ("val", val)):
        for name, count in classes.items():
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                (folder / split / name / f"{i}.JPEG").write_bytes(b"\xff\xd8")
    return folder


@pytest.fixture(name="pictures")
def imagenet(setting: PreprocessorSetting, tmp_path: Path) -> PreprocessorSetting:
    """Three classes of pictures, and the usual chains."""
    tree(tmp_path, {"n01": 2, "n02": 1, "n03": 3}, {"n02": 1})
    setting.train_transforms(RandomResizedCrop(28), RandomHorizontalFlip())
    return setting.val_transforms(Resize(32), CenterCrop(28)).dataset("imagenet", tmp_path)


def test_classes_of_imagenet_are_counted(pictures: PreprocessorSetting) -> None:
    c = pictures.commit().config
    assert (c.num_classes, c.format, c.level, c.load, c.order) == (3, "auto", None, "auto", "global")
    s = GLOBAL_SETTING.snapshot()
    assert (s.dataset_type, s.num_classes, s.color_channels) == (DatasetType.IMAGENET, 3, 3)


def test_cifar_needs_no_count(setting: PreprocessorSetting, tmp_path: Path) -> None:
    with GLOBAL_SETTING.scoped():
        GLOBAL_SETTING.use_cpu().input_resolution(32)
        assert setting.dataset("cifar-100", tmp_path).normalization(NormMode.CIFAR).commit().config.num_classes == 100


def test_options_of_pictures_reach_the_configuration(pictures: PreprocessorSetting) -> None:
    pictures.using_dts_format(False).partial_mode().read_ahead(1 << 20).order("global").decode("fast").color_channels(3)
    c = pictures.on_corrupt("substitute", 7, 0.5).commit().config
    assert (c.format, c.load, c.read_ahead, c.order) == ("raw", "partial", 1 << 20, "global")
    assert c.corrupt == CorruptPolicy("substitute", 7, 0.5)
    assert c.train_recipe.decode == c.val_recipe.decode == "fast"
    assert json.loads(json.dumps(c.to_json()))["on_corrupt"] == "substitute"
    assert c.private_only() == "using_dts_format"


def test_packed_pictures_say_their_classes_and_have_blocks(pictures: PreprocessorSetting, tmp_path: Path) -> None:
    pictures.order("blocks")
    with pytest.raises(ValueRejected, match="is a folder tree, which has none; pack it"):
        pictures.commit()
    for split in ("train", "val"):
        packed(0, split).write(tmp_path)
    c = pictures.commit().config  # now there are packed files, which "auto" prefers
    assert (c.num_classes, c.format, c.order) == (5, "auto", "blocks")
    packed(0, "val", classes=9).write(tmp_path)
    with PREPROCESSOR_SETTING.scoped():
        PREPROCESSOR_SETTING.train_transforms(CenterCrop(28)).val_transforms(CenterCrop(28))
        with pytest.raises(FormatError, match=r"has 5 classes, and .*imagenet_val_lv0\.dts has 9"):
            PREPROCESSOR_SETTING.dataset("imagenet", tmp_path).using_dts_format(True, 0).commit()


def test_both_names_of_the_load_modes_say_the_same(setting: PreprocessorSetting) -> None:
    setting.fully_mode().load("fully").partial_mode(False)
    with pytest.raises(ValueRejected, match="load is already 'fully' and cannot become 'partial'"):
        setting.partial_mode()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order": ("blocks",)}, "order is 'blocks'; files of mnist have no blocks"),
        ({"using_dts_format": (True, 1)}, "only packed pictures have levels, not mnist"),
        ({"read_ahead": (1 << 20,)}, "read_ahead acts in partial loading only"),
        ({"load": ("fully",), "read_ahead": (1 << 20,)}, "read_ahead acts in partial loading only"),
        ({"decode": ("fast",)}, "train_transforms: .*stored as pixels"),
        ({"color_channels": (3,)}, "color_channels is 3; mnist has 1"),
        ({"download": (True,), "using_dts_format": (True,)}, "published files can be fetched, packed ones are made"),
        ({"download": (True, ["ftp://host/"])}, "expected the http or https address"),
    ],
)
def test_options_that_the_set_cannot_obey_are_refused(
    setting: PreprocessorSetting, tmp_path: Path, options: dict[str, tuple[object, ...]], reason: str
) -> None:
    setting.dataset("mnist", tmp_path)
    for name, arguments in options.items():
        getattr(setting, name)(*arguments)
    with pytest.raises(ValueRejected, match=reason):
        setting.commit()


def test_imagenet_is_checked_before_a_process_is_started(pictures: PreprocessorSetting, tmp_path: Path) -> None:
    (tmp_path / "val" / "n99").mkdir()
    (tmp_path / "val" / "n99" / "0.JPEG").touch()
    with pytest.raises(FormatError, match="n99"):
        pictures.commit()
    pictures.using_dts_format(True, "RAW")
    with pytest.raises(MissingFileError, match=r"imagenet_val_lvraw|imagenet_val"):
        pictures.commit()


def test_nothing_is_decoded_at_level_raw(pictures: PreprocessorSetting) -> None:
    pictures.using_dts_format(True, "RAW").decode("exact")
    with pytest.raises(ValueRejected, match="decode is 'exact', but this set is stored as pixels"):
        pictures.commit()
    with pytest.raises(ValueRejected, match="level 1 is one of packed files"):
        pictures.using_dts_format(False, 1)


def test_pictures_of_all_sizes_need_a_first_stage(pictures: PreprocessorSetting, tmp_path: Path) -> None:
    pictures.reset()
    pictures.dataset("imagenet", tmp_path).train_transforms(Pad(2), RandomCrop(28))
    with pytest.raises(ValueRejected, match=r"train_transforms: .*Pad.*RandomResizedCrop"):
        pictures.commit()


def test_imagenet_cannot_be_downloaded(pictures: PreprocessorSetting) -> None:
    with pytest.raises(ValueRejected, match="`renaissance fetch imagenet` says what to do"):
        pictures.download(True).commit()


def test_mirrors_act_or_are_refused(setting: PreprocessorSetting) -> None:
    with pytest.raises(ValueRejected, match="downloading is off"):
        setting.download(False, ["https://host"])
    with pytest.raises(ValueRejected, match="expected a list of addresses"):
        setting.download(True, "https://host")


def test_commit_fetches_what_is_missing(
    setting: PreprocessorSetting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def fetched(*arguments: object) -> list[Obtained]:
        asked.append(arguments)
        (tmp_path / "new").mkdir(exist_ok=True)
        return [Obtained(tmp_path / "new" / "a", "fetched", "https://host/")]

    monkeypatch.setattr(download, "fetch_dataset", fetched)
    setting.dataset("mnist", tmp_path / "new").download(True, ["https://host"]).commit()
    assert asked == [("mnist", tmp_path / "new", ("https://host",))]
    for name in ("mnist_train.dts", "mnist_test.dts"):
        (tmp_path / "new" / name).touch()
    setting.reset()
    setting.dataset("mnist", tmp_path / "new").download(True).commit()
    assert len(asked) == 1  # packed files are there


def test_the_resolution_may_change_from_epoch_to_epoch(pictures: PreprocessorSetting) -> None:
    c = pictures.train_resolutions(ProgressiveResolution(14, 28, 7)).commit().config
    assert [c.train_recipe_at(epoch).resolution for epoch in (0, 1, 6, 7, 99)] == [14, 16, 26, 28, 28]
    assert c.train_recipe_at(7) == c.train_recipe
    assert c.train_recipe_at(0).transforms[0] == RandomResizedCrop(14)
    assert "14" in str(c.to_json()["train_resolutions"])


def test_a_schedule_must_end_at_the_resolution_and_fit_the_chain(pictures: PreprocessorSetting, tmp_path: Path) -> None:
    pictures.train_resolutions(SteppedResolution([(0, 14), (3, 20)]))
    with pytest.raises(ValueRejected, match="ends at 20 pixels, but GLOBAL_SETTING's train_resolution is 28"):
        pictures.commit()
    pictures.reset()
    pictures.dataset("mnist", tmp_path).train_resolutions(SteppedResolution([(0, 14), (3, 28)]))
    with pytest.raises(ValueRejected, match=r"train_resolutions: at 14 pixels: .*no transform sets the size"):
        pictures.commit()


def test_configuration_writes_as_json(setting: PreprocessorSetting, tmp_path: Path) -> None:
    config = setting.dataset("mnist", tmp_path).train_transforms(Pad(2), RandomCrop(28)).commit().config
    plain = json.loads(json.dumps(config.to_json()))
    assert plain["dataset"] == "mnist"
    assert plain["train_recipe_fingerprint"] == config.train_recipe.fingerprint()
    assert plain["train_recipe_fingerprint"] != plain["val_recipe_fingerprint"]
