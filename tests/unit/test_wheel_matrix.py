"""What the public CI builds wheels for, and how it puts those of one Python together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.release.merge import merged
from tests.support.backend import ROOT

WORKFLOW = (ROOT / ".github/workflows/wheels.yml").read_text()


def axis(name: str) -> list[str]:
    """Of the matrix of jobs, which those that build and those that test share."""
    [build, test] = re.findall(rf"^        {name}: (\[.*\])$", WORKFLOW, re.MULTILINE)
    assert build == test
    return json.loads(build)


TABLE = (ROOT / "docs/compatibility.md").read_text()


def test_pythons_are_those_of_cibuildwheel() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    match = re.fullmatch(r"cp3\{([\d,]+)\}-manylinux_x86_64", tools["cibuildwheel"]["build"])
    assert match is not None
    assert axis("python") == [f"3.{minor}" for minor in match[1].split(",")]


def test_torches_are_all_from_the_oldest_to_the_newest_tried() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = next(int(m[1]) for line in declared if (m := re.match(r"torch>=2\.(\d+)", line)))
    newest = max(int(minor) for minor in re.findall(r"^\| 2\.(\d+)\.\d", TABLE, re.MULTILINE))
    built = [int(torch.split(".")[1]) for torch in axis("torch")]
    assert built == list(range(oldest, newest + 1))


def wheel(folder: Path, extension: str) -> None:
    """A wheel with the core and one extension module."""
    tree = folder / "tree"
    info = tree / "torch_rpc_ext-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-rpc-ext\nVersion: 1\n")
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        "Tag: cp311-cp311-linux_x86_64\n"
    )
    (info / "RECORD").touch()
    (tree / "torch_rpc_ext").mkdir()
    for name in (extension, "libtorch_rpc_ext_core.so.0"):
        (tree / "torch_rpc_ext" / name).write_text(name)
    pack = [sys.executable, "-m", "wheel", "pack", "-d", str(folder), str(tree)]
    subprocess.run(pack, check=True, capture_output=True)


def test_wheels_of_one_python_become_one(tmp_path: Path) -> None:
    pytest.importorskip("wheel")
    extensions = [f"_C_torch2{minor}.so" for minor in (11, 12, 15)]
    for extension in extensions:
        wheel(tmp_path / extension, extension)
    [made] = merged(tmp_path, tmp_path / "dist")
    names = zipfile.ZipFile(made).namelist()
    assert [name for name in sorted(names) if name.endswith(".so")] == [
        f"torch_rpc_ext/{extension}" for extension in extensions
    ]
    assert names.count("torch_rpc_ext/libtorch_rpc_ext_core.so.0") == 1


@pytest.mark.parametrize("module", ["wheel", "try_wheel", "compat"])
def test_its_programs_need_nothing_of_the_tests(module: str) -> None:
    """A fresh clone has no pytest when `make wheel-test` begins."""
    code = f"import sys; sys.modules['pytest'] = None; import tests.release.{module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
