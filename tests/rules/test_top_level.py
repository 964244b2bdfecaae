"""What stands at the top of the repository: names that users and tools rely on, and no more."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.backend import ROOT

FOLDERS = {"benchmarks", "csrc", "docs", "scripting", "tests", "torch_rpc_ext", "tutorials"}
FILES = {"LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.py"}


def test_only_the_usual_names_stand_at_the_top() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git: what belongs to the repository is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    top = {path.partition("/")[0] for path in listed.split("\0") if path}
    assert {name for name in top if not name.startswith(".")} == FOLDERS | FILES
