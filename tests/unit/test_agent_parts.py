"""Parts of the agent, each without the others and without a transport."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.sanitize.programs import compiler
from tests.support import cxx

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "unit_agent"
BASE = ("boundary", "error", "log")
GROUP = (
    "barrier",
    "call_label",
    "group",
    "hello",
    "membership",
    "peers",
    "worker_events",
    "wrapped_message",
)
OPEN_CALLS = (
    "answer_wait",
    "call_label",
    "executor",
    "hello",
    "load_limits",
    "mailbox",
    "membership",
    "open_calls",
    "peers",
    "pending_calls",
    "unread_rrefs",
    "wrapped_message",
)

POLLER = (*BASE, "poller", "timer")
#: name -> (files of agent/, of base/, of memory/)
PROGRAMS = {
    "group": (GROUP, BASE, ()),
    "mailbox": (("mailbox",), (), ()),
    "thread_state": (("thread_state",), BASE, ()),
    "open_calls": (OPEN_CALLS, (*POLLER, "busy_poll"), ()),
    "lender": (
        ("lender", "one_copy"),
        (*POLLER, "fork", "short_time_slices", "streaming_copy"),
        ("buffer_cache", "shared_map"),
    ),
}


@pytest.mark.timeout(cxx.TIMEOUT)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_part_alone(name: str) -> None:
    libraries = Path(torch.__file__).parent / "lib"
    sources = {
        name: [
            HERE / f"{name}.cpp",
            *(cxx.CSRC / "agent" / f"{part}.cpp" for part in agent),
            *(cxx.CSRC / "base" / f"{part}.cpp" for part in base),
            *(cxx.CSRC / "memory" / f"{part}.cpp" for part in memory),
        ]
        for name, (agent, base, memory) in PROGRAMS.items()
    }
    # All at once: the programs share most of what takes long to compile.
    built = cxx.build(
        BUILD,
        sources,
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
    ended = subprocess.run([built[name]], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
