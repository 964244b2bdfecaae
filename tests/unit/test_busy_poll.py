"""When a thread polls before it sleeps: the policy alone, without threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sanitize.programs import compiler
from tests.support import cxx

SOURCES = (Path(__file__).parent / "busy_poll.cpp", cxx.CSRC / "base/busy_poll.cpp")


@pytest.mark.timeout(cxx.TIMEOUT)
def test_when_a_thread_polls() -> None:
    built = cxx.build(
        cxx.ROOT / "build" / "unit_busy_poll",
        {"busy_poll": SOURCES},
        compiler=compiler(),
        flags=("-O1",),
    )
    ended = subprocess.run([built["busy_poll"]], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
