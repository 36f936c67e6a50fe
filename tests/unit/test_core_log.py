"""Logging: the library logs below ``renaissance`` and prints nothing; commands choose where lines go."""

import logging
import re
from collections.abc import Iterator

import pytest

from renaissance.core import errors
from renaissance.core.log import configure, get_logger


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger("renaissance")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_loggers_lie_below_the_project() -> None:
    assert get_logger("data.order").name == "renaissance.data.order"


def test_configured_lines_have_time_level_and_module_and_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO")
    get_logger("data").info("opened %d files", 2)
    get_logger("data").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[INFO\] \[renaissance\.data\] opened 2 files\n", err
    )


def test_configuring_twice_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    configure("DEBUG")
    get_logger("data").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_every_error_has_the_common_base_and_a_built_in_one() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert len(classes) > 10
    for c in classes:
        assert issubclass(c, errors.RenaissanceError)
        if c is not errors.RenaissanceError:
            assert any(b.__module__ == "builtins" and b not in (Exception, object) for b in c.__mro__), c


def test_missing_file_error_prints_its_message_only() -> None:
    assert str(errors.MissingFileError("data/x.dts: no such file")) == "data/x.dts: no such file"
    assert str(errors.MissingFileError()) == ""
