"""A worker that leaves while another connects to it is heard to leave."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sanitize.programs import compiler
from tests.support import cxx
from torch_rpc_ext._native import build, loader

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit_goodbye"
CORE = Path(loader.__file__).resolve().parents[1] / build.CORE_LIBRARY


@pytest.mark.timeout(cxx.TIMEOUT)
def test_a_goodbye_amid_the_handshake() -> None:
    ucx = build.ucx_root()
    assert ucx is not None
    found = [CORE.parent, ucx / "lib", *ucx.parent.glob("libucx*.libs")]
    built = cxx.build(
        BUILD,
        {"goodbye": [HERE / "goodbye.cpp", cxx.CSRC / "agent" / "executor.cpp"]},
        compiler=compiler(),
        flags=("-O1", "-pthread", f"-isystem {ucx / 'include'}"),
        libraries=(
            str(CORE),
            *(f"-L{path} -Wl,-rpath-link,{path}" for path in found),
            "-l:libucp.so.0 -l:libuct.so.0 -l:libucs.so.0",
        ),
    )
    # Also for what these libraries need themselves, which an rpath is not.
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, found))}
    ended = subprocess.run(
        [built["goodbye"]], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
