"""What the package imports is declared, and whoever lists what to install lists all of it.

`make demo` once ended with a ModuleNotFoundError on a fresh machine: a dependency stood in
pyproject.toml, and the Makefile had a list of its own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import gpu

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=,;]", requirement)[0]


DECLARED = {_name(line) for line in PROJECT["dependencies"]}
# torch is there before anything is installed, in the release that its user has chosen.
INSTALLED = DECLARED - {"torch"}
# Of an extra, or what one of an extra's packages brings: looked for when it is used.
OPTIONAL = {
    _name(line) for lines in PROJECT["optional-dependencies"].values() for line in lines
} | {
    "llvmlite",
    "numba",
    "setuptools",
}


def _imported() -> dict[str, Path]:
    """Each other package that one of our modules imports, and one that does."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / "torch_rpc_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.split(".")[0], path.relative_to(ROOT))
    return found


def test_what_is_imported_is_declared() -> None:
    own = {"torch_rpc_ext", "scripting", "libucx"} | set(sys.stdlib_module_names)
    undeclared = {
        name: str(path)
        for name, path in _imported().items()
        if name not in own | DECLARED | OPTIONAL
    }
    assert not undeclared


def test_make_installs_what_is_declared(tmp_path: Path) -> None:
    # As on a machine that has no .venv.
    listed = tmp_path / ".stamps" / "requirements.txt"
    variables = [f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
    subprocess.run(["make", "-s", *variables, str(listed)], cwd=ROOT, check=True)
    assert set(PROJECT["dependencies"]) <= set(listed.read_text().splitlines())


def test_the_readme_and_the_gpu_machines_list_name_all() -> None:
    lines = re.findall(r"^pip install \"setuptools.*$", (ROOT / "README.md").read_text(), re.M)
    for line, ucx in zip(lines, ("libucx-cu13", "libucx-cu12"), strict=True):
        assert set(line.replace(ucx, "libucx-cu13").split()) >= INSTALLED and ucx in line
    for needs in gpu.NEEDS.values():
        assert set(needs.values()) >= INSTALLED


@pytest.mark.parametrize(
    "module",
    [
        "benchmarks.__main__",
        "benchmarks.applications.__main__",
        "tests.fuzz.__main__",
    ],
)
def test_what_runs_without_the_test_extra_needs_no_pytest(module: str) -> None:
    """`make fuzz`, `make bench` and `make paper` do not install the extra."""
    code = f"import sys; sys.modules['pytest'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
