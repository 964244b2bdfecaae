"""The source distribution: what git tracks and a build needs, nothing else, reproducibly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.backend import ROOT

#: What a build needs: these files, and everything in these folders.
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
FOLDERS = ("csrc/", "scripting/", "torch_rpc_ext/")
#: What setuptools adds.
ADDED = ("PKG-INFO", "setup.cfg", "torch_rpc_ext.egg-info/")
#: What a source tree has that was built and worked in.
LEFT_BEHIND = (
    "build/units/agent_0.cpp",
    "torch_rpc_ext.egg-info/SOURCES.txt",
    "torch_rpc_ext/_build_info.py",
    "torch_rpc_ext/_C_torch213.cpython-311-x86_64-linux-gnu.so",
    "torch_rpc_ext/libtorch_rpc_ext_core.so.0",
    "torch_rpc_ext/_native/__pycache__/build.cpython-311.pyc",
)
# A setup.py that must not need torch, as pip makes it run in isolation.
MAKE = """
import sys
sys.modules["torch"] = None
from setuptools import build_meta
print(build_meta.build_sdist(sys.argv[1]))
"""


# Stands for the compiler: makes whatever it is told to make.
COMPILER = """#!/usr/bin/env python3
import sys
if "-o" in sys.argv:
    open(sys.argv[sys.argv.index("-o") + 1], "w").write("made")
"""


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout, or a folder that git ignores")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def needed(name: str) -> bool:
    return name in FILES or name.startswith(FOLDERS)


def make(tracked: list[str], folder: Path) -> Path:
    """Copy the source tree and make its sdist."""
    tree = folder / "tree"
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    for name in LEFT_BEHIND:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "torch_rpc_ext" / "scripting").symlink_to("../scripting")
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(folder)],
        cwd=tree,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def archive(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tracked, tmp_path_factory.mktemp("sdist"))


def test_sdist_holds_what_git_tracks(tracked: list[str], archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = [entry.name.partition("/")[2] for entry in opened if entry.isfile()]
    assert len(names) == len(set(names))
    there = {name for name in names if not name.startswith(ADDED)}
    assert there == {name for name in tracked if needed(name)}


def test_sdist_has_the_same_bytes_again(tracked: list[str], archive: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = make(tracked, tmp_path)
    finally:
        os.umask(before)
    assert again.read_bytes() == archive.read_bytes()


def test_the_installed_sources_can_be_compiled(archive: Path) -> None:
    """pyproject.toml says what is installed: all of csrc/ that the compiler reads."""
    import tomllib

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    installed = {
        path.relative_to(ROOT).as_posix()
        for pattern in setuptools["package-data"]["torch_rpc_ext._csrc"]
        for path in (ROOT / "csrc").glob(pattern)
    }
    with tarfile.open(archive) as opened:
        names = {entry.name.partition("/")[2] for entry in opened if entry.isfile()}
    there = {name for name in names if name.startswith("csrc/")}
    assert there - installed == {"csrc/README.md"}
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in (ROOT / "torch_rpc_ext").rglob("*.py")
        if "scripting" not in path.parts
    }
    assert folders <= set(setuptools["packages"])


def test_an_isolated_build_makes_the_core(archive: Path, tmp_path: Path) -> None:
    """From the unpacked archive, without a torch; in place, as an editable installation has it."""
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    tree = next(tmp_path.iterdir())
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "CXX": str(compiler), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_rpc_ext: built the core in" in done.stderr
    package = tree / "torch_rpc_ext"
    assert (package / "libtorch_rpc_ext_core.so.0").read_text() == "made"
    assert "UCX_VERSION" in (package / "_build_info.py").read_text()
    assert not list(package.glob("_C_torch*.so"))
