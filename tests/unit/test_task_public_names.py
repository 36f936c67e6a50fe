"""``import renaissance`` is cheap, and its names are the ones that type checkers are told."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import renaissance


def test_stub_and_package_name_the_same_things() -> None:
    stub = ast.parse((Path(renaissance.__file__).parent / "__init__.pyi").read_text())
    told = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == renaissance._MODULE_OF


@pytest.mark.parametrize("name", sorted(renaissance._MODULE_OF))
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(renaissance, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        _ = renaissance.Transformer  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, renaissance; print([m for m in ('numpy', 'numba', 'grpc', 'tqdm') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
