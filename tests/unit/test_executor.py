"""The threads of an agent, without an agent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sanitize.programs import compiler
from tests.support import cxx

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit_executor"
SOURCES = (
    "agent/executor.cpp",
    "base/busy_poll.cpp",
    "base/boundary.cpp",
    "base/log.cpp",
    "base/poller.cpp",
    "base/timer.cpp",
)


@pytest.mark.timeout(cxx.TIMEOUT)
def test_what_stop_and_a_thread_that_leads_run() -> None:
    built = cxx.build(
        BUILD,
        {"executor": [HERE / "executor.cpp", *(cxx.CSRC / source for source in SOURCES)]},
        compiler=compiler(),
        flags=("-O1", "-pthread"),
    )
    ended = subprocess.run([built["executor"]], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
