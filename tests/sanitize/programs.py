"""The stress programs: threads on the parts of csrc that need no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support import cxx
from torch_rpc_ext._native.build import ucx_root

HERE = Path(__file__).parent
BUILD = cxx.ROOT / "build" / "sanitize"

_POLLER = ("base/boundary.cpp", "base/log.cpp", "base/poller.cpp", "base/timer.cpp")
_EXECUTOR = ("agent/executor.cpp", "base/busy_poll.cpp", *_POLLER)
_NEEDS = {
    "gate": ("base/gate.cpp",),
    "boundary": _EXECUTOR,
    "poller": _POLLER,
    "executor": _EXECUTOR,
    "mailbox": ("agent/mailbox.cpp",),
    "streaming_copy": ("base/streaming_copy.cpp",),
    "filling": ("agent/device/fill_level.cpp",),
    "memory": (
        "base/boundary.cpp",
        "base/fork.cpp",
        "base/log.cpp",
        "memory/buffer_cache.cpp",
        "memory/shared_map.cpp",
        "transport/ucx/bulk/shared_maps.cpp",
    ),
    "loopback": (*_EXECUTOR, "base/gate.cpp", "transport/loopback/loopback.cpp"),
}
PROGRAMS = {
    name: [HERE / f"{name}.cpp", *(cxx.CSRC / source for source in sources)]
    for name, sources in _NEEDS.items()
}
#: Those that need UCX: the transport as a whole.
_UCX_FOLDERS = (
    "base",
    "crypto",
    "memory",
    "transport/ucx",
    "transport/ucx/bulk",
    "transport/ucx/lanes",
)
UCX_PROGRAMS = {
    "stops": [
        HERE / "stops.cpp",
        cxx.CSRC / "agent" / "executor.cpp",
        *(path for name in _UCX_FOLDERS for path in sorted((cxx.CSRC / name).glob("*.cpp"))),
    ],
}
#: Else UCX patches functions that the sanitizers patch, and takes their signals.
_UCX_ENVIRONMENT = {"UCX_MEM_EVENTS": "n", "UCX_HANDLE_ERRORS": "none"}
#: What programs are built with -> what that is for.
SANITIZERS = {"thread": "-fsanitize=thread", "address": "-fsanitize=address,undefined"}


def compiler() -> str:
    """The C++ compiler of this machine.

    Raises:
        RuntimeError: there is none.
    """
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or let CXX name one")
    return found


def build(sanitizer: str) -> dict[str, Path]:
    """Build all with one of SANITIZERS; name -> program. Those with UCX where there is a UCX."""
    flags = ("-O1", "-g1", "-pthread", SANITIZERS[sanitizer], "-fno-sanitize-recover=all")
    built = cxx.build(BUILD / sanitizer, PROGRAMS, compiler=compiler(), flags=flags)
    ucx = ucx_root()
    if ucx is not None:
        # Its wheel keeps what it needs itself beside it.
        found = [ucx / "lib", *ucx.parent.glob("libucx*.libs")]
        built |= cxx.build(
            BUILD / f"{sanitizer}_ucx",
            UCX_PROGRAMS,
            compiler=compiler(),
            flags=(*flags, f"-isystem {ucx / 'include'}"),
            libraries=(
                *(f"-L{path} -Wl,-rpath,{path}" for path in found),
                "-l:libucp.so.0 -l:libuct.so.0 -l:libucs.so.0 -lcrypto",
            ),
        )
    return built


def run(program: Path, seconds: float) -> str:
    """Run one program.

    Args:
        program: its file.
        seconds: how long it makes trouble; it takes a few more to end.

    Returns:
        What is wrong; empty when nothing is.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            ended = subprocess.run(
                [*_fixed_addresses(), str(program), str(seconds)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_UCX_ENVIRONMENT},
                timeout=60 + 10 * seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            ended = None
        output.seek(0)
        text = output.read()
    if ended == 0 and not text:
        return ""
    how = "does not end" if ended is None else f"ended with {ended}"
    return f"{program.parent.name}/{program.name} {how}\n{text[:6000]}"


def _fixed_addresses() -> list[str]:
    """ThreadSanitizer's older runtimes do not start where kernels spread addresses widely."""
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if setarch else []
