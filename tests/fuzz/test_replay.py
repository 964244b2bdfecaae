"""The seeds and past findings of `make fuzz`, and mutations of each, with this machine's compiler.

The same inputs each time: what a fuzzer finds by chance belongs in tests/fuzz/findings.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz import registry
from tests.support import cxx

pytestmark = pytest.mark.timeout(cxx.TIMEOUT)


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    """A program for each target; the first build takes over a minute of CPU time."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    assert compiler is not None, "the extension needs a C++ compiler, and so do its tests"
    sanitize = "-fsanitize=address,undefined"
    flags = [sanitize, "-fno-sanitize-recover=all"] if cxx.accepts(compiler, sanitize) else []
    return cxx.build(
        registry.BUILD / "replay",
        registry.programs(registry.HERE / "replay.cpp"),
        compiler=compiler,
        flags=["-O1", "-g1", *flags],
        libraries=["-lcrypto"],
    )


@pytest.mark.parametrize("target", registry.TARGETS)
def test_seeds_findings_and_their_mutations(target: str, programs: dict[str, Path]) -> None:
    files = registry.inputs(target)
    assert files, f"no seeds in {registry.CORPUS / target}"
    ended = subprocess.run(
        [str(programs[target]), *map(str, files)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    executed = re.search(r"(\d+) executions", ended.stdout)
    assert executed is not None and int(executed[1]) > 300
