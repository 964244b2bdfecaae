"""The members of a group, without a transport and without an agent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.sanitize.programs import compiler
from tests.support import cxx

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit_group"
AGENT = ("barrier", "call_label", "group", "hello", "membership", "peers", "worker_events")
BASE = ("boundary", "error", "log")


def test_group() -> None:
    libraries = Path(torch.__file__).parent / "lib"
    sources = [f"agent/{name}.cpp" for name in AGENT] + [f"base/{name}.cpp" for name in BASE]
    built = cxx.build(
        BUILD,
        {"group": [HERE / "group.cpp", *(cxx.CSRC / name for name in sources)]},
        compiler=compiler(),
        flags=(
            "-O0",
            "-pthread",
            "-DUSE_DISTRIBUTED",
            "-DUSE_RPC",
            *(f"-isystem {path}" for path in cpp_extension.include_paths()),
        ),
        libraries=(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"),
    )
    ended = subprocess.run([built["group"]], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
