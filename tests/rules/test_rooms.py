"""Which module of the package may import which: import-linter's contracts in pyproject.toml, and
what they cannot say. docs/decisions/0027-the-house.md has the rooms."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.backend import ROOT

PACKAGE = ROOT / "torch_rpc_ext"
ROOMS = ("_base", "_calls", "_group", "_lifecycle", "_native", "_security", "_upstream")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Hold the package in a folder to the contracts of this repository."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    command += ["--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)


def test_imports_point_downwards_and_not_in_circles() -> None:
    ended = lint(ROOT)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("file", "added", "broken"),
    [
        ("_base/version.py", "from torch_rpc_ext._group import stores", "layers"),
        ("_group/stores.py", "def f():\n    from torch_rpc_ext import events", "layers"),
        ("_upstream/hooks.py", "from torch_rpc_ext._calls import attempts", "layers"),
        ("_group/stores.py", "def f():\n    from torch_rpc_ext._group import dynamic", "circle"),
        ("odds_and_ends.py", "", "layers"),
    ],
)
def test_the_contracts_would_notice(tmp_path: Path, file: str, added: str, broken: str) -> None:
    for folder in ("torch_rpc_ext", "scripting"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=_all_but_python)
    with open(tmp_path / "torch_rpc_ext" / file, "a") as changed:
        changed.write(f"\n{added}\n")
    ended = lint(tmp_path)
    assert ended.returncode != 0
    lines = [line for line in ended.stdout.splitlines() if line.endswith("BROKEN")]
    named = {"layers": "imports what stands below", "circle": "No import circle"}[broken]
    assert any(named in line for line in lines) or "odds_and_ends" in ended.stdout, ended.stdout


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if "." in name and not name.endswith(".py")]


def test_nothing_imports_the_package_itself() -> None:
    """Its name has everything, so such an import could be a circle with any module. The modules of
    scripting/ are installed as torch_rpc_ext.scripting: above all of the package."""
    found = [
        f"{path}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_of_the_whole(node)
    ]
    assert not found


def _is_of_the_whole(node: ast.Import | ast.ImportFrom) -> bool:
    names = {alias.name for alias in node.names}
    if isinstance(node, ast.Import):
        return any(name == "torch_rpc_ext" or _is_scripting(name) for name in names)
    return _is_scripting(node.module or "") or (
        node.module == "torch_rpc_ext" and "scripting" in names
    )


def _is_scripting(module: str) -> bool:
    return f"{module}.".startswith("torch_rpc_ext.scripting.")


def test_a_room_costs_nothing_to_enter() -> None:
    """`import torch` imports some of them."""
    for room in ROOMS:
        body = ast.parse((PACKAGE / room / "__init__.py").read_text()).body
        assert [type(node) for node in body] == [ast.Expr], room


def test_private_modules_are_in_rooms() -> None:
    private = {path.stem for path in PACKAGE.glob("_*.py")} - {"__init__", "__main__"}
    assert private - {"_build_info"} == {"_autoload"}


def test_the_files_that_texts_name_exist() -> None:
    named = re.compile(rf"\b((?:{'|'.join(ROOMS)})/\w+\.py)\b|\btorch_rpc_ext/([\w/]+\.py)\b")
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")]
    texts += [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.*"), ROOT / "pyproject.toml"]
    found = [
        (text, in_room or below)
        for text in texts
        for in_room, below in named.findall(text.read_text(encoding="utf-8"))
    ]
    assert len(found) > 40
    missing = [f"{text}: {file}" for text, file in found if not (PACKAGE / file).exists()]
    assert not missing, "\n".join(missing)
