"""``renaissance replay``: digest files that real daemons wrote are made again alone, batch by batch; what has changed
in the data folder since is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import picture_sets as sets
import pytest
from picture_sets import open_cifar, open_pictures
from PIL import Image

from renaissance.cli.main import main
from renaissance.core.dtype import DType
from renaissance.core.errors import FormatError, ValueRejected
from renaissance.data.digest_file import EpochDigests, read_digests, write_digests
from renaissance.data.private_daemon import start_private_daemon
from renaissance.data.replay import Replay, Wanted, suspects
from renaissance.data.station import TransferStation

CHANGED = 57
RECORD = 3073


def read(station: TransferStation, epochs: int = 1) -> None:
    with station:
        for epoch in range(epochs):
            for _ in station.epoch(epoch):
                pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data folders, and beside each, under NAME.digests, what a daemon wrote about its sessions."""
    root = tmp_path_factory.mktemp("served")
    made = {name: root / name for name in ("cifar", "tree", "packed", "raw")}
    for folder in made.values():
        folder.mkdir()
        (folder.parent / f"{folder.name}.digests").mkdir()
    sets.make_cifar(made["cifar"])
    sets.make_tree(made["tree"])
    sets.pack_tree(made["tree"], made["packed"])
    sets.pack_tree(made["tree"], made["raw"], "RAW")
    sets.damage(made["tree"])
    digests = {name: root / f"{name}.digests" for name in made}
    both = {"cifar10": made["cifar"], "imagenet": made["packed"]}
    with start_private_daemon(both, workers=2, load="fully", digest_folder=digests["packed"]) as daemon:
        read(open_pictures(daemon.address, order="blocks"), 2)
        read(open_pictures(daemon.address, split="val", recipe=sets.VAL_RECIPE, dtype=DType.BF16))
        for rank in range(2):
            read(open_pictures(daemon.address, rank=rank, world_size=2, drop_last=True))
        read(open_cifar(daemon.address), 4)
        read(open_cifar(daemon.address, rank=2, world_size=3, shuffle=False, padded_channels=4))
    for path in digests["packed"].glob("cifar10-*"):
        path.rename(digests["cifar"] / path.name)
    both = {"cifar10": made["cifar"], "imagenet": made["tree"]}
    with start_private_daemon(both, workers=1, load="partial", digest_folder=digests["tree"]) as daemon:
        for policy in ("substitute", "blank"):
            read(open_pictures(daemon.address, on_corrupt=policy, max_corrupt_share=0.5))
        read(open_cifar(daemon.address))
    for path in digests["tree"].glob("cifar10-*"):
        path.rename(digests["cifar"] / path.name)
    with start_private_daemon({"imagenet": made["raw"]}, workers=1, digest_folder=digests["raw"]) as daemon:
        read(open_pictures(daemon.address, order="blocks", dtype=DType.FP16))
    return made | {f"{name}.digests": folder for name, folder in digests.items()}


@pytest.mark.parametrize(("name", "files"), [("cifar", 6), ("tree", 2), ("packed", 5), ("raw", 1)])
def test_every_batch_that_a_daemon_delivered_is_made_again_alone(
    served: dict[str, Path], name: str, files: int, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = sorted(served[f"{name}.digests"].iterdir())
    assert len(paths) >= files  # and epochs that were prepared before the consumer left
    assert main(["replay", *map(str, paths), "--folder", str(served[name])]) == 0
    assert "differ" not in capsys.readouterr().out


def test_batches_can_be_made_in_any_order(served: dict[str, Path]) -> None:
    for name in ("cifar", "raw"):
        path = min(served[f"{name}.digests"].iterdir())
        wanted = read_digests(path)
        with Replay(wanted.header, served[name]) as replay:
            for index in (len(wanted.batches) - 1, 1, 0, 1, 2):
                assert replay.batch(index).digest == wanted.batches[index]
            with pytest.raises(ValueRejected, match="batch is"):
                replay.batch(len(wanted.batches))


@pytest.fixture
def cifar_epochs(served: dict[str, Path]) -> list[str]:
    """The digest files of four epochs of one session."""
    found = [(path, read_digests(path).header) for path in sorted(served["cifar.digests"].iterdir())]
    return [str(path) for path, header in found if header.world_size == 1 and not header.stored_format]


@pytest.fixture
def changed(served: dict[str, Path], tmp_path: Path) -> Path:
    """The CIFAR folder with one flipped byte amid sample CHANGED."""
    folder = tmp_path / "changed"
    shutil.copytree(served["cifar"], folder)
    file = folder / f"data_batch_{1 + CHANGED // 41}.bin"
    content = bytearray(file.read_bytes())
    content[CHANGED % 41 * RECORD + 1 + 500] ^= 0x10
    file.write_bytes(content)
    return folder


def test_flipped_byte_of_an_image_is_found_among_the_samples(
    cifar_epochs: list[str], changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(cifar_epochs) == 4
    assert main(["replay", *cifar_epochs, "--folder", str(changed)]) == 1
    out = capsys.readouterr().out
    assert out.count("the file says") == 4
    assert f"sample {CHANGED}: {changed}" in out
    assert int(out.split("one of ")[1].split()[0]) <= 4


def test_images_kept_elsewhere_name_the_row(
    served: dict[str, Path], cifar_epochs: list[str], changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Replay(read_digests(Path(cifar_epochs[0])).header, served["cifar"]) as replay:
        index = next(k for k in range(7) if CHANGED in replay.samples(k))
        row = replay.samples(index).index(CHANGED)
    kept = tmp_path / "kept.npy"
    common = ["replay", cifar_epochs[0], "--batch", str(index)]
    assert main([*common, "--folder", str(served["cifar"]), "--save", str(kept)]) == 0
    assert np.load(kept).shape == (32, 32, 32, 3)
    capsys.readouterr()
    assert main([*common, "--folder", str(changed), "--against", str(kept)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " differs from " in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"  row {row} differs")
    assert f"sample {CHANGED}: " in lines[0]
    np.save(kept, np.zeros((3, 3), np.float32))
    assert main([*common, "--folder", str(changed), "--against", str(kept)]) == 1
    kept.write_bytes(b"no array")
    assert main([*common, "--folder", str(changed), "--against", str(kept)]) == 1


def test_sample_that_has_become_unreadable_is_named(
    served: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tree"
    shutil.copytree(served["tree"], folder)
    (folder / "train/n0/n0_007.JPEG").write_bytes(b"\xff\xd8 no more")
    headers = {read_digests(path).header.on_corrupt: path for path in served["tree.digests"].iterdir()}
    assert main(["replay", str(headers["blank"]), "--folder", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "sample 7 (blank): " in out
    assert "n0_007.JPEG" in out


def test_saved_picture_of_a_batch_has_the_same_bytes_every_time(served: dict[str, Path], tmp_path: Path) -> None:
    path = min(served["raw.digests"].iterdir())
    for name in "ab":
        out = str(tmp_path / f"{name}.png")
        assert main(["replay", str(path), "--folder", str(served["raw"]), "--batch", "1", "--save", out]) == 0
    Image.open(tmp_path / "a.png").verify()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_other_folder_size_or_form_is_refused(
    served: dict[str, Path], cifar_epochs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", cifar_epochs[0], "--folder", str(served["tree"])]) == 1
    assert "no data_batch_1.bin" in capsys.readouterr().err
    smaller = tmp_path / "smaller"
    shutil.copytree(served["cifar"], smaller)
    (smaller / "data_batch_5.bin").write_bytes((smaller / "data_batch_5.bin").read_bytes()[:-RECORD])
    assert main(["replay", cifar_epochs[0], "--folder", str(smaller)]) == 1
    assert "204 samples" in capsys.readouterr().err
    packed = min(served["packed.digests"].iterdir())
    assert main(["replay", str(packed), "--folder", str(served["raw"])]) == 1
    assert "imagenet_train_lv0.dts: no such file" in capsys.readouterr().err
    assert main(["replay", *cifar_epochs, "--folder", str(served["cifar"]), "--save", "x.npy"]) == 1
    assert main(["replay", cifar_epochs[0], "--folder", str(served["cifar"]), "--batch", "1", "--save", "x.gif"]) == 1


def test_session_can_be_described_without_a_file(
    served: dict[str, Path], cifar_epochs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted("cifar", "train", sets.CIFAR_RECIPE, sets.SEED, 32, epoch=2)
    known = read_digests(Path(cifar_epochs[2]))
    assert wanted.header(served["cifar"]) == known.header
    blocks = Wanted("imagenet", "train", sets.PICTURE_RECIPE, sets.SEED, 16, dtype=DType.FP16, order="blocks")
    of_raw = {read_digests(path).header.epoch: path for path in served["raw.digests"].iterdir()}
    assert blocks.header(served["raw"]) == read_digests(of_raw[0]).header
    (tmp_path / "r.json").write_text(sets.CIFAR_RECIPE.to_json())
    common = ["replay", "--folder", str(served["cifar"])]
    session = ["--dataset", "cifar10", "--batch-size", "32", "--recipe", str(tmp_path / "r.json")]
    assert main([*common, *session, "--seed", str(sets.SEED), "--epoch", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == Path(cifar_epochs[2]).read_text().splitlines()[1:]
    assert main([*common, *session[:2]]) == 1
    assert main([*common, *session, "--save", "x.png"]) == 1
    assert main([*common, cifar_epochs[0], "--seed", "1"]) == 1
    assert main(common) == 1


def test_header_that_contradicts_itself_is_refused(served: dict[str, Path], cifar_epochs: list[str]) -> None:
    header = read_digests(Path(cifar_epochs[0])).header
    for changes in (
        {"recipe_fingerprint": "0" * 64},
        {"batches_per_epoch": 1 << 40},
        {"height": 31},
        {"batch_size": 1 << 40},
        {"rank": 1},
        {"on_corrupt": "shrug"},
        {"dtype": "int8"},
        {"order": "blocks"},
        {"recipe": "{}"},
    ):
        with pytest.raises((FormatError, ValueRejected, TypeError)):
            Replay(replace(header, **changes), served["cifar"])  # type: ignore[arg-type]


def test_other_decoder_is_said_before_anything_is_compared(
    served: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known: EpochDigests = read_digests(min(served["packed.digests"].iterdir()))
    path = tmp_path / "old.digests"
    write_digests(path, replace(known.header, decoder="otherjpeg 0.1"), known.batches)
    assert main(["replay", str(path), "--folder", str(served["packed"])]) == 0
    out = capsys.readouterr().out
    assert "decoded by otherjpeg 0.1, here by simplejpeg" in out
    assert out.index("otherjpeg") < out.index("batches are the same")


def test_samples_that_explain_most_differences_are_suspected() -> None:
    assert suspects([[1, 2, 3], [3, 4], [3, 1, 9]]) == [3]
    assert suspects([[1, 2]]) == [1, 2]
    assert suspects([]) == []
