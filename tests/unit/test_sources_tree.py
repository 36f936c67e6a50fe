"""Folder trees: classes and pictures in the order of their bytes, nothing outside the root, damage named (law 7)."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from source_builders import grow_tree

from renaissance.core.errors import CorruptSample, FormatError, MissingFileError, RenaissanceError, ValueRejected
from renaissance.data.sources import Encoding, Source
from renaissance.data.sources import tree as tree_module

TRAIN = {
    "n02": {"b.JPEG": b"2b", "a.jpg": b"2aa", "B.jpeg": b"2B", "a10.JPG": b"2a10", "a9.JPEG": b"2a9"},
    "n01": {"x.JPEG": b"1x", "notes.txt": b"no", ".hidden.JPEG": b"no", "y.png": b"no", "jpeg": b"no"},
    "Z": {"z.JpEg": b"z" * 1000},
}
"""Sorted by bytes: Z, n01, n02; and in n02: B.jpeg, a.jpg, a10.JPG, a9.JPEG, b.JPEG."""
ORDER = [b"z" * 1000, b"1x", b"2B", b"2aa", b"2a10", b"2a9", b"2b"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    grow_tree(folder, "train", TRAIN)
    grow_tree(folder, "val", {"n02": {"v1.JPEG": b"v1"}, "Z": {"v2.JPEG": b"v22"}, "n01": {}})
    for name in (".ipynb_checkpoints", ".git"):
        (folder / "train" / name).mkdir()
    (folder / "train" / "train_summary.bin").write_bytes(b"not a class")
    return folder


def everything(source: Source) -> list[bytes]:
    return [source.read(sample) for sample in range(source.spec.samples)]


def test_classes_and_pictures_come_in_the_order_of_their_bytes(root):
    with Source.open("imagenet", root, "train") as source:
        assert everything(source) == ORDER
        assert source.labels.tolist() == [0, 1, 2, 2, 2, 2, 2]
        assert source.sizes.tolist() == [len(data) for data in ORDER]
        assert source.block_starts is None  # an epoch by folders would be one class after the other
        assert source.offsets is None
        assert source.class_names() == ["Z", "n01", "n02"]
        assert source.describe(4) == str(root / "train" / "n02" / "a10.JPG")
        spec = source.spec
        assert (spec.encoding, spec.format, spec.level, spec.tree) == (Encoding.PICTURES, "raw", None, True)
        assert (spec.files, spec.num_classes, spec.samples) == ((str(root),), 3, 7)
        assert (spec.stored_bytes, spec.largest) == (sum(map(len, ORDER)), 1000)


def test_validation_classes_have_the_numbers_of_training(root):
    with Source.open("imagenet", root, "val") as source:
        assert everything(source) == [b"v22", b"v1"]
        assert source.labels.tolist() == [0, 2]
        assert source.spec.num_classes == 3


def test_a_validation_class_that_training_lacks_is_named(root):
    grow_tree(root, "val", {"n00": {"v.JPEG": b"v"}})
    with pytest.raises(FormatError, match=r"val/n00: class n00 is not a folder of .*train.*1 of 4"):
        Source.open("imagenet", root, "val")


def test_validation_needs_only_the_names_of_the_training_classes(tmp_path):
    grow_tree(tmp_path, "train", {"a": {}, "b": {}})
    grow_tree(tmp_path, "val", {"b": {"v.jpg": b"v"}})
    assert Source.open("imagenet", tmp_path, "val").labels.tolist() == [1]
    with pytest.raises(FormatError, match="train/a: a class without"):
        Source.open("imagenet", tmp_path, "train")


def test_a_class_with_its_pictures_one_level_too_deep_is_explained(tmp_path):
    grow_tree(tmp_path, "train", {"a": {"x.jpg": b"x"}, "b": {}})
    grow_tree(tmp_path / "train", "b", {"images": {"x.jpg": b"x"}})
    with pytest.raises(FormatError, match="holds a folder images: pictures must lie directly in their class"):
        Source.open("imagenet", tmp_path, "train")


def test_names_that_are_no_text_are_read_and_shown_with_escapes(tmp_path):
    awkward = {b"\xff\xfe.JPEG": b"1", "bild ä.jpg".encode(): b"2", b"new\nline\x1b[31m.jpeg": b"3", b" .jpg": b"4"}
    grow_tree(tmp_path, "train", {b"cla\xdfss": awkward})
    with Source.open("imagenet", tmp_path, "train") as source:
        assert everything(source) == [b"4", b"2", b"3", b"1"]
        assert source.class_names() == ["cla\\xdfss"]
        assert source.describe(1).endswith("cla\\xdfss/bild ä.jpg")
        assert source.describe(2).endswith("new\\nline\\x1b[31m.jpeg")
        assert source.describe(3).endswith("\\xff\\xfe.JPEG")


@pytest.mark.parametrize(
    ("split", "missing", "message"),
    [("train", "train", "its folders give the classes"), ("val", "train", "its folders"), ("val", "val", "validation")],
)
def test_a_missing_split_is_named(root, split, missing, message):
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(MissingFileError, match=message):
        Source.open("imagenet", root, split, format="raw")


def test_trees_that_are_none_are_named(tmp_path):
    (tmp_path / "train").write_bytes(b"")
    with pytest.raises(FormatError, match="train: is not a folder"):
        Source.open("imagenet", tmp_path, "train")
    (tmp_path / "train").unlink()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.JPEG").write_bytes(b"")
    with pytest.raises(FormatError, match=r"holds no class folders; expected .*<class>"):
        Source.open("imagenet", tmp_path, "train")
    grow_tree(tmp_path, "train", {"a": {"x.JPEG": b"x"}})
    grow_tree(tmp_path, "val", {"a": {}})
    with pytest.raises(FormatError, match="its 1 class folders hold no"):
        Source.open("imagenet", tmp_path, "val")


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "broken"])
def test_a_picture_that_is_no_regular_file_is_named(root, kind):
    path = root / "train" / "n01" / "odd.JPEG"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("x.JPEG" if kind == "link" else "nothing")
    with pytest.raises(FormatError, match=r"n01/odd.JPEG: is (not a regular file|a link)"):
        Source.open("imagenet", root, "train")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("what", ["train", "class"])
def test_a_link_to_a_folder_is_refused_wherever_it_leads(root, tmp_path, what, inside):
    target = (root if inside else tmp_path) / "target"
    path = root / "train" if what == "train" else root / "train" / "n01"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(FormatError, match=f"{path}: is a link"):
        Source.open("imagenet", root, "train")


def test_the_root_itself_may_be_a_link(root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    with Source.open("imagenet", link, "train") as source:
        assert source.spec.files == (str(root),)
        assert everything(source) == ORDER


def test_an_unreadable_folder_is_named(root, monkeypatch):
    opened = os.open

    def refuse(path: bytes, *arguments: object, **options: object) -> int:  # chmod does not stop root
        if os.fsencode(path).endswith(b"n01"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RenaissanceError, match="n01: cannot be read: Permission denied"):
        Source.open("imagenet", root, "train")


def test_an_error_of_the_disk_while_scanning_is_named(root, monkeypatch):
    def refuse(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(RenaissanceError, match="train/Z: cannot be read: Input/output error"):
        tree_module.open_tree(str(root), "train")


def test_a_file_too_large_for_a_picture_is_named_before_memory_is_made_for_it(root):
    path = root / "train" / "Z" / "z.JpEg"
    os.truncate(path, (256 << 20) + 1)  # sparse: it takes no room
    with pytest.raises(FormatError, match=r"Z/z.JpEg: is 268435457 bytes; expected a picture, of at most 268435456"):
        Source.open("imagenet", root, "train")
    with Source.open("imagenet", root, "train", measure=False) as source:
        sample = next(i for i in range(source.spec.samples) if source.describe(i).endswith("z.JpEg"))
        with pytest.raises(CorruptSample, match=r"Z/z.JpEg: is 268435457 bytes; a picture has at most 268435456"):
            source.read(sample)
        with pytest.raises(CorruptSample, match=r"a picture has at most 268435456"):
            source.read_into(sample, memoryview(bytearray(8)))


def test_slow_folders_are_scanned_in_threads_with_the_same_result(tmp_path, monkeypatch):
    classes = {f"c{k:02}": {f"{i}.jpg": bytes(i + 1) for i in range(k % 5 + 1)} for k in range(40)}
    grow_tree(tmp_path, "train", classes)
    fast = tree_module.open_tree(str(tmp_path), "train")
    monkeypatch.setattr(tree_module, "SLOW_FILE", 0.0)
    slow = tree_module.open_tree(str(tmp_path), "train")
    assert fast[0] == slow[0]
    assert all(np.array_equal(fast[1][name], slow[1][name]) for name in fast[1])
    (tmp_path / "train" / "c30" / "x.jpg").mkdir()
    with pytest.raises(FormatError, match=r"c30/x.jpg"):
        tree_module.open_tree(str(tmp_path), "train")


def test_without_measuring_sizes_are_found_when_asked_for(root):
    with Source.open("imagenet", root, "train", measure=False) as source:
        assert (source.spec.stored_bytes, source.spec.largest) == (0, 0)
        assert not source.sizes.any()
        assert source.size(0) == 1000
        assert everything(source) == ORDER
        with pytest.raises(ValueRejected, match="is 1000 bytes; the buffer has room for 999"):
            source.read_into(0, memoryview(bytearray(999)))
        (root / "train" / "n01" / "x.JPEG").unlink()
        with pytest.raises(CorruptSample, match="No such file"):
            source.size(1)


def test_the_index_costs_what_is_stated(tmp_path):
    names = {f"n01440764_{i}.JPEG": b"" for i in range(10000, 10400)}
    grow_tree(tmp_path, "train", {"n01440764": names})
    with Source.open("imagenet", tmp_path, "train") as source:
        per_file = 12 + len("n01440764_10000.JPEG")
        assert source.spec.index_bytes - 400 * per_file < 4096 + 7 * 64


# What happens to a tree while it is served.


def attached(source: Source) -> Source:
    index = bytearray(source.spec.index_bytes)
    source.write_index(memoryview(index))
    return Source.attach(source.spec, bytes(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("longer", r"n01/x.JPEG: is 5 bytes; it had 2 when the set was opened"),
        ("shorter", r"is 1 bytes; it had 2"),
        ("empty", r"is 0 bytes; it had 2"),
        ("gone", "No such file"),
        ("link", "is a link; links are not followed"),
        ("folder", "no longer a regular file"),
        ("pipe", "no longer a regular file"),
        ("class gone", "No such file"),
        ("class link", "Not a directory"),
        ("split link", "Not a directory"),
    ],
)
def test_a_picture_that_is_not_what_was_scanned_is_corrupt_and_the_others_are_not(root, tmp_path, change, message):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x.JPEG").write_bytes(b"!!")
    folder = root / "train" / "n01"
    path = folder / "x.JPEG"
    with attached(Source.open("imagenet", root, "train")) as source:
        if change in ("longer", "shorter", "empty"):
            path.write_bytes({"longer": b"12345", "shorter": b"1", "empty": b""}[change])
        elif change in ("gone", "link", "folder", "pipe"):
            path.unlink()
        else:
            moved = folder if change.startswith("class") else root / "train"
            moved.rename(root / "moved")
            if change == "class link":
                folder.symlink_to(secret)
            elif change == "split link":
                (root / "train").symlink_to(root / "moved")
        if change == "link":
            path.symlink_to(secret / "x.JPEG")
        elif change == "folder":
            path.mkdir()
        elif change == "pipe":
            os.mkfifo(path)
        with pytest.raises(CorruptSample, match=message) as caught:
            source.read(1)
        assert str(path) in str(caught.value)
        if change != "split link":
            assert source.read(2) == b"2B"


def test_an_empty_picture_is_corrupt_and_the_set_still_opens(root):
    (root / "train" / "n01" / "x.JPEG").write_bytes(b"")
    with Source.open("imagenet", root, "train") as source:
        with pytest.raises(CorruptSample, match="is empty"):
            source.read(1)
        assert source.read(0) == ORDER[0]


def test_a_picture_cut_between_size_and_read_is_corrupt(root, monkeypatch):
    with Source.open("imagenet", root, "train") as source:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(CorruptSample, match="ends after 0 of 1000 bytes"):
            source.read(0)


@pytest.mark.parametrize(("number", "corrupt"), [(errno.EIO, True), (errno.EACCES, True), (errno.EMFILE, False)])
def test_errors_of_the_disk_are_damage_and_shortages_are_not(root, monkeypatch, number, corrupt):
    with Source.open("imagenet", root, "train") as source:
        source.read(0)

        def refuse(*_: object, **__: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(RenaissanceError, match=r"n02/B.jpeg: cannot be read") as caught:
            source.read(2)
        assert isinstance(caught.value, CorruptSample) is corrupt


def test_descriptors_do_not_grow_with_the_classes_read(tmp_path):
    grow_tree(tmp_path, "train", {f"c{k}": {"x.jpg": b"x", "y.jpg": b"y"} for k in range(50)})
    before = len(os.listdir("/proc/self/fd"))
    with Source.open("imagenet", tmp_path, "train") as source:
        for sample in (*range(100), *range(99, -1, -1)):
            source.read(sample)
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir("/proc/self/fd")) == before
