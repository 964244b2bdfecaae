"""The fuzz targets, and what they are built from."""

from __future__ import annotations

from pathlib import Path

from tests.support import cxx

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
BUILD = cxx.ROOT / "build" / "fuzz"

#: What is fuzzed, and what that needs. Nothing here includes torch or UCX.
LIBRARY = [
    cxx.CSRC / name
    for name in (
        "agent/device/ipc_wire.cpp",
        "agent/hello.cpp",
        "base/checksum.cpp",
        "base/error.cpp",
        "base/host.cpp",
        "base/log.cpp",
        "crypto/crypto.cpp",
        "cuda/driver.cpp",
        "cuda/ipc_export.cpp",
        "cuda/ipc_import.cpp",
        "cuda/probe.cpp",
        "transport/ucx/lanes/socket.cpp",
        "transport/ucx/handshake.cpp",
        "transport/ucx/protocol.cpp",
        "transport/ucx/secure_channel.cpp",
        "wire/call_frame.cpp",
    )
]
#: Targets in Python: modules that are programs.
PYTHON_TARGETS = {"pickles": "tests.fuzz.pickles"}
TARGETS = {source.stem: source for source in sorted((HERE / "targets").glob("*.cpp"))}


def programs(*drivers: Path) -> dict[str, list[Path]]:
    """For cxx.build(): a program for each target, with what calls it."""
    return {name: [source, *LIBRARY, *drivers] for name, source in TARGETS.items()}


def inputs(target: str) -> list[Path]:
    """The seeds and the past findings of a target."""
    return [
        path
        for folder in (CORPUS, FINDINGS)
        for path in sorted((folder / target).glob("*"))
        if path.is_file()
    ]
