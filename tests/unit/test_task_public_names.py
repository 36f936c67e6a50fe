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


NVIDIA = ("cupy", "cudnn", "cuda", "nvidia")
HEAVY = (*NVIDIA, "numpy", "numba", "grpc", "tqdm")


def imported(code: str, of: tuple[str, ...]) -> set[str]:
    """Those of the packages ``of`` that a fresh interpreter has after ``code``."""
    told = f"{code}\nimport sys; print(*({set(of)!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("code", ["import renaissance", "from renaissance.cli.main import main; main(['--help'])"])
def test_importing_the_package_or_asking_for_help_imports_nothing_heavy(code: str) -> None:
    assert imported(code, HEAVY) == set()


def test_nothing_of_nvidia_is_imported_before_somebody_asks_for_a_gpu() -> None:
    """A machine without a GPU has none of it, and one with a GPU does not wait for it when it trains on the CPU."""
    code = """
import importlib, pkgutil, renaissance, renaissance.backend.cuda as cuda
for module in pkgutil.iter_modules(cuda.__path__, "renaissance.backend.cuda."):
    importlib.import_module(module.name)
from renaissance.backend.registry import default_registry
from renaissance.cli import plan, predict, train
default_registry("cuda")
renaissance.GLOBAL_SETTING.use_cpu()
renaissance.DeepLearningTask(), renaissance.SimpleTask()
"""
    assert imported(code, NVIDIA) == set()
