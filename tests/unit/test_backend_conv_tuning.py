"""Measured choices of algorithms: measured once, kept in a file, used from there, part of the numeric profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conv_harness import Conv

from renaissance.backend.cpu import tuning
from renaissance.core.errors import FormatError, ValueRejected


def small() -> Conv:
    return Conv(2, 8, 8, 32, 32, 3, 1, 1)


def test_a_choice_is_measured_once_and_then_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "choices.json"
    with tuning.using(path) as first:
        c = small()
        c.forward()
        c.forward()
        c.backward_weight()
        c.backward_data()
    assert first.measured == 3
    stored = json.loads(path.read_text())
    assert stored["format"] == 1
    assert [key.split()[0] for key in stored["choices"]] == ["data", "forward", "weight"]

    monkeypatch.setattr(tuning, "fastest", lambda job, classes: pytest.fail("measured again"))
    with tuning.using(path) as second:
        c = small()
        c.forward()
        c.backward_weight()
        c.backward_data()
    assert second.measured == 0
    assert second.digest() == first.digest()
    small().forward()  # outside: the rule, without measuring


def test_the_digest_is_of_the_choices_that_were_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "choices.json"
    digests = set()
    for number in range(2):
        monkeypatch.setattr(tuning, "fastest", lambda job, classes, number=number: str(classes[number].name))
        path.unlink(missing_ok=True)
        with tuning.using(path) as choices:
            empty = choices.digest()
            small().forward()
        digests |= {empty, choices.digest()}
    assert len(digests) == 3


def test_a_stored_choice_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    with tuning.using(path):
        small().forward()
    stored = json.loads(path.read_text())
    (key,) = stored["choices"]
    results = []
    for name in ("onednn", "winograd 4x4"):
        stored["choices"][key] = name
        path.write_text(json.dumps(stored))
        with tuning.using(path):
            c = small()
            try:
                c.forward()
            except ValueRejected:
                pytest.skip("one algorithm on this CPU")
        results.append(c.get("y"))
    assert (results[0] != results[1]).any()
    assert abs(results[0] - results[1]).max() < 1e-4


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    for text in ("not json", "[]", '{"format": 2, "choices": {}}', '{"format": 1, "choices": {"a": 1}}'):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"choices\.json: not a file of measured choices"), tuning.using(path):
            pass
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"choices\.json: measured choices cannot be read"), tuning.using(path):
        pass
    endless = Path("/dev/zero")
    with pytest.raises(FormatError, match="/dev/zero: is not a regular file"), tuning.using(endless):
        pass
    path.unlink()
    with tuning.using(path):
        small().forward()
    path.write_text(path.read_text().replace(json.loads(path.read_text())["choices"].popitem()[1], "magic"))
    with (
        tuning.using(path),
        pytest.raises(ValueRejected, match=r"algorithm 'magic' for forward 2x8x8x32.*expected one"),
    ):
        small().forward()
