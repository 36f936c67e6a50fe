"""Compiled kernels are never used after an edit of any source they were compiled from."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from renaissance.core.kernel_cache import COMPILED_FROM, PACKAGE, UNUSED_SECONDS, source_fingerprint

ASK = "import renaissance, os; print(d := os.environ['NUMBA_CACHE_DIR']); assert os.path.isdir(d) or 'mine' in d"


def folder_with(tmp_path: Path, **environment: str) -> Path:
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=env | environment, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / "renaissance", ignore=shutil.ignore_patterns("__pycache__")))


def test_fingerprint_is_stable_while_nothing_changes(package: Path) -> None:
    assert source_fingerprint(package) == source_fingerprint(package)


@pytest.mark.parametrize("pattern", COMPILED_FROM)
def test_an_edit_of_any_compiled_file_changes_the_fingerprint(package: Path, pattern: str) -> None:
    before = source_fingerprint(package)
    source = next(package.glob(pattern))
    stamp = source.stat().st_mtime_ns + 1_000_000
    os.utime(source, ns=(stamp, stamp))
    assert source_fingerprint(package) != before


def test_a_new_file_changes_the_fingerprint(package: Path) -> None:
    before = source_fingerprint(package)
    (package / "backend" / "cpu" / "another.py").write_text("")
    assert source_fingerprint(package) != before


def test_every_file_with_compiled_functions_is_in_the_fingerprint() -> None:
    compiled = re.compile(r"@(numba\.)?(njit|jit|vectorize|intrinsic|Kernel)\b|\bcfunc\(")
    known = {path for pattern in COMPILED_FROM for path in PACKAGE.glob(pattern)}
    found = {path for path in PACKAGE.rglob("*.py") if compiled.search(path.read_text())}
    assert found
    assert found <= known


def test_every_file_whose_constants_are_compiled_in_is_in_the_fingerprint() -> None:
    """A number imported from elsewhere is part of the kernel, and Numba does not look there either."""
    known = {path for pattern in COMPILED_FROM for path in PACKAGE.glob(pattern)}
    found = {source for path in known for source in sources_of_compiled_names(ast.parse(path.read_text()))}
    assert PACKAGE / "core" / "philox.py" in found
    assert found <= known


def sources_of_compiled_names(tree: ast.Module) -> set[Path]:
    """Files of the package that define what compiled functions name, directly or by a constant made from it."""
    behind: dict[str, set[str]] = {}
    files: dict[str, Path] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("renaissance."):
            module = PACKAGE.parent.joinpath(*node.module.split("."))
            for name in node.names:
                choices = module / f"{name.name}.py", module.with_suffix(".py"), module / "__init__.py"
                files[name.asname or name.name] = next(choice for choice in choices if choice.exists())
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                behind.update(dict.fromkeys(names_in(target), names_in(node.value)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [
        f for f in functions if re.search(r"jit|intrinsic|Kernel", " ".join(map(ast.unparse, f.decorator_list)))
    ]
    named = {name for function in compiled for name in names_in(function)}
    while grown := {name for known in named for name in behind.get(known, ())} - named:
        named |= grown
    return {files[name] for name in named if name in files}


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_cache_lies_in_the_users_cache_folder_under_the_fingerprint(tmp_path: Path) -> None:
    assert folder_with(tmp_path) == tmp_path / "renaissance" / f"kernels-{source_fingerprint()}"


def test_numba_imported_earlier_uses_the_folder_too(tmp_path: Path) -> None:
    ask = (
        "import numba, sys; import renaissance; from renaissance.core.digest import xxh64; import numpy as np;"
        "xxh64(np.zeros(8, np.uint8)); print(xxh64.stats.cache_path)"
    )
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert tmp_path / "renaissance" / f"kernels-{source_fingerprint()}" in Path(done.stdout.strip()).parents


def test_a_folder_the_user_chose_is_left_alone(tmp_path: Path) -> None:
    assert folder_with(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "mine")) == tmp_path / "mine"


def test_without_a_writable_home_kernels_go_to_a_temporary_folder(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = folder_with(blocked, TMPDIR=str(tmp_path))
    assert folder.parent == tmp_path
    assert not folder.exists()  # it went with its process


def test_a_user_without_a_home_gets_a_temporary_folder_too(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    code = f"import pwd; pwd.getpwuid = lambda uid: {{}}[uid]; {ASK}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_folders_of_old_states_are_removed_after_a_month(tmp_path: Path) -> None:
    base = tmp_path / "renaissance"
    old, recent = base / "kernels-00000000", base / "kernels-11111111"
    for folder, age in ((old, UNUSED_SECONDS + 60), (recent, 60)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    folder_with(tmp_path)
    assert not old.exists()
    assert recent.exists()
