"""What the tools say: mypy, ruff, clang-format. Each failure shows the tool's own report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.test_layers import sources
from tests.support.backend import ROOT

# A tool takes 20 s on an idle machine, and minutes on one that other tests and compilers share.
pytestmark = pytest.mark.timeout(600)


def run(tool: str, *arguments: str) -> None:
    """Run a tool of this environment in the repository; its output is the failure."""
    command = [str(Path(sys.executable).with_name(tool)), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert ended.returncode == 0, (
        f"{tool} {' '.join(arguments[:3])}\n{ended.stdout[-6000:]}{ended.stderr[-3000:]}"
    )


def test_every_test_module_can_be_imported() -> None:
    """Now, and not after the minutes that the parts before that module take."""
    run("pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "tests")


def test_mypy_strict_on_the_package() -> None:
    run("mypy", "--strict", "torch_rpc_ext", "scripting")


def test_ruff_check() -> None:
    run("ruff", "check", ".")


def test_ruff_format() -> None:
    run("ruff", "format", "--check", ".")


def test_clang_format() -> None:
    run("clang-format", "--dry-run", "--Werror", *map(str, [*sources(), *sources(ROOT / "tests")]))
