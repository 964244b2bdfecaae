"""Bulk over TCP alone: lanes, their ends, and strangers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sanitize.programs import SANITIZERS, compiler
from tests.support import cxx

BASE = (
    *(f"base/{name}.cpp" for name in ("boundary", "error", "gate", "log", "short_time_slices")),
    "crypto/crypto.cpp",
    *(
        f"transport/ucx/lanes/{name}.cpp"
        for name in ("bulk_receiver", "bulk_sender", "lane_set", "socket")
    ),
)


@pytest.mark.timeout(cxx.TIMEOUT)
def test_lanes() -> None:
    # A read of memory that has been given back would be silent without this.
    address = SANITIZERS["address"]
    flags = ("-O1", "-pthread", *([address] if cxx.accepts(compiler(), address) else []))
    built = cxx.build(
        cxx.ROOT / "build" / "unit_lanes",
        {"lanes": [Path(__file__).parent / "lanes.cpp", *(cxx.CSRC / s for s in BASE)]},
        compiler=compiler(),
        flags=flags,
        libraries=("-lcrypto",),
    )
    ended = subprocess.run([built["lanes"]], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
