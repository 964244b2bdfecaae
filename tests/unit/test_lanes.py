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
@pytest.mark.parametrize("program", ["lanes", "silent_lanes"])
def test_lanes(program: str) -> None:
    # A read of memory that has been given back would be silent without this.
    address = SANITIZERS["address"]
    flags = ("-O1", "-pthread", *([address] if cxx.accepts(compiler(), address) else []))
    built = cxx.build(
        cxx.ROOT / "build" / f"unit_{program}",
        {program: [Path(__file__).parent / f"{program}.cpp", *(cxx.CSRC / s for s in BASE)]},
        compiler=compiler(),
        flags=flags,
        libraries=("-lcrypto",),
    )
    ended = subprocess.run([built[program]], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
