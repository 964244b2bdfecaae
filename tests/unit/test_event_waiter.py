"""Who waits for a device hears of its end or its error, or of what was thrown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.sanitize.programs import compiler
from tests.support import cxx

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit"
SOURCES = ["agent/device/event_waiter.cpp", "base/boundary.cpp", "base/log.cpp"]


@pytest.mark.timeout(cxx.TIMEOUT)
def test_event_waiter() -> None:
    libraries = Path(torch.__file__).parent / "lib"
    built = cxx.build(
        BUILD,
        {"event_waiter": [HERE / "event_waiter.cpp", *(cxx.CSRC / name for name in SOURCES)]},
        compiler=compiler(),
        flags=("-O1", "-pthread", *(f"-isystem {path}" for path in cpp_extension.include_paths())),
        libraries=(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10"),
    )
    ended = subprocess.run([built["event_waiter"]], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert [line.rpartition(": ")[2] for line in ended.stderr.splitlines()] == [
        "out of memory",
        "in the middle",
    ]
